"""Would the tests notice? Takes one rule at a time out of a copy of fxamp, and runs the tests named for it.

Run: python tools/mutants.py [--jobs N] [--only WORD] [--write docs/mutants.md]
Exits with 1 if a mutant survives, or a named test fails without any mutant.

A mutant is data: a file, a text that stands in it exactly once, what to put instead, and a subset of the tests. Each runs in a
process of its own, on a copy of its own; the parent imports torch once, and forks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

RULES: Final = "tests/testing/test_found_programs.py"
FOUND: Final = "tests/test_found.py"
CAPTURE: Final = "tests/test_capture.py"
WRITERS: Final = f"{CAPTURE}::test_writers_name_what_they_write"
WATCHED: Final = f"{CAPTURE}::test_operands_that_must_be_the_traced_value_itself"
SNAPSHOTS: Final = f"{FOUND}::test_a_cast_is_a_snapshot"
OPAQUE: Final = f"{CAPTURE}::test_who_has_no_body_to_look_into_may_write_anything"
PLAN: Final = "tests/test_plan.py"
TABLE: Final = "tests/test_optable.py"
LEGAL: Final = "tests/test_legal.py"
LOWER: Final = "tests/rewrite/test_lower.py"
IN_PLACE: Final = "tests/rewrite/test_out_of_place.py"
GUARDS: Final = "tests/test_guards.py"
WIDENING: Final = "tests/test_widening.py"
MOVEMENT: Final = "tests/joint/test_movement.py"


@dataclass(frozen=True)
class Mutant:
    """One rule taken out."""

    name: str
    file: str
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files, or node ids, of the tests that have to notice; the likeliest first."""

    def applied(self) -> str:
        """The text of the mutated file. Raises ValueError where `old` is not there exactly once."""
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the tests said."""

    killed_by: str
    """The first test that failed; "" if none did."""
    seconds: float


def _each(file: str, tests: Sequence[str], *edits: tuple[str, str, str]) -> Iterable[Mutant]:
    return (Mutant(name, file, old, new, tuple(tests)) for name, old, new in edits)


def _without_rows(*tables: str) -> Iterable[Mutant]:
    for table in tables:
        yield Mutant(f"optable: {table} has no operations", "fxamp/optable.py", f", {table}, ", ', "", ', (TABLE, PLAN))


def _without_obstacles(*obstacles: tuple[str, str]) -> Iterable[Mutant]:
    for name, line in obstacles:
        nothing = "pass\n" if line.endswith("\n") else "pass"
        yield Mutant(f"plan: lowers what {name}", "fxamp/plan.py", line, nothing, (RULES, PLAN, FOUND))


MUTANTS: Final = (
    # ---- who writes ---------------------------------------------------------------------------------
    *_each(
        "fxamp/capture.py",
        (OPAQUE, WRITERS),
        ("writes: not through out=", 'written = _nodes_in(node.kwargs.get("out"))', "written = _nodes_in(None)"),
        (
            "writes: not by methods",
            "return written + _nodes_in(node.args[:1]) if _is_in_place(str(target)) else written",
            "return written",
        ),
        (
            "writes: not inside higher-order operations",
            "return written if pure else written + node.all_input_nodes",
            "return written",
        ),
        (
            "writes: not by schema, positional",
            "for argument, value in zip(overload._schema.arguments, node.args, strict=False):",
            "for argument, value in ():",
        ),
        (
            "writes: not by schema, named",
            "if argument.name in node.kwargs and argument.alias_info",
            "if False and argument.alias_info",
        ),
        (
            "writes: not by operators",
            "if target in _IN_PLACE_OPERATORS or target is operator.setitem:",
            "if target is operator.setitem:",
        ),
        (
            "writes: not by slice assignment",
            "if target in _IN_PLACE_OPERATORS or target is operator.setitem:",
            "if target in _IN_PLACE_OPERATORS:",
        ),
        (
            "writes: not by functions with an underscore",
            'if (_is_in_place(getattr(target, "__name__", "")) and not is_operator) or _asks',
            "if _asks",
        ),
        ("writes: not by inplace=True", "or _asks_in_place(target, node):", "or False:"),
        (
            "writes: not to running statistics",
            'for index in optable.WRITTEN_OPERANDS.get(name_of(node) or "", ()):',
            "for index in ():",
        ),
        ("writes: not to named running statistics", 'for name in ("running_mean", "running_var"):', "for name in ():"),
    ),
    # ---- whose memory is written ------------------------------------------------------------------------
    *_each(
        "fxamp/capture.py",
        (WATCHED, CAPTURE, SNAPSHOTS, RULES),
        (
            "pinned: no written memory",
            "        for written in writes(node):\n            for key in groups[written]:",
            "        for written in ():\n            for key in groups[written]:",
        ),
        (
            "pinned: no versions",
            "if any(t._version > born.get(graph.memory_of(t), 0) for t in tensors):",
            "if False:",
        ),
        ("pinned: not in torch.func", "    if is_inside_func:\n", "    if False:\n"),
        ("pinned: not what is read by stride", "    elif _reads_by_stride(node):\n", "    elif False:\n"),
        (
            "pinned: not whose strides somebody may read",
            "elif calls and name not in optable.TABLE and name not in optable.METADATA and name not in _BY_VALUE:",
            "elif False:",
        ),
        (
            "pinned: not what the program differentiates",
            "elif node.target in DIFFERENTIATES:",
            "elif False:",
        ),
        (
            "pinned: not what is handed on where gradients are off",
            "if node in off and _hands_on_history(node):",
            "if False:",
        ),
        ("pinned: no outputs that share memory", "        if count > 1:\n", "        if False:\n"),
        ("capture: outputs are all fresh", "all(key not in inputs and left[key] == 1 for key in groups[node])", "True"),
        (
            "capture: only what the table says hands on memory",
            "optable.may_alias(facts[node.name].op) or any(groups[node] & keys for keys in operand_keys)",
            "optable.may_alias(facts[node.name].op)",
        ),
        ("capture: no switch of mode", "        count += _switches_mode(node)\n", ""),
    ),
    # ---- in place or not ----------------------------------------------------------------------------------
    *_each(
        "fxamp/rewrite/out_of_place.py",
        (RULES, IN_PLACE, FOUND),
        ("out of place: functions of the user's own", "if capture.name_of(node) is None:", "if False:"),
        (
            "out of place: more than plain tensors",
            "if any(type(t) is not FakeTensor for n",
            "if False and any(type(t) is not FakeTensor for n",
        ),
        ("out of place: a write to an input", 'if member.op in ("placeholder", "get_attr"):', "if False:"),
        ("out of place: across a switch of grad mode", "if modes[member] != modes[node]:", "if False:"),
        ("out of place: what is read again", "        if late:\n", "        if False:\n"),
        ("out of place: another dtype", "refusal = graph.difference(value, graph.value_of(node))", "refusal = None"),
        (
            "out of place: other strides",
            "if refusal is None and value.stride() != graph.value_of(node).stride():",
            "if False:",
        ),
        (
            "out of place: random fills too",
            '("add", "sub", "mul", "div", "relu", "sigmoid", ',
            '("bernoulli", "add", "sub", "mul", "div", "relu", "sigmoid", ',
        ),
        ("out of place: what draws too", "    if _draws(node):\n", "    if False:\n"),
        ("out of place: values stay where they were", "        _move(members[key], first)\n", "        pass\n"),
    ),
    # ---- reads by stride ----------------------------------------------------------------------------------
    *_each(
        "fxamp/capture.py",
        (f"{CAPTURE}::test_a_read_by_stride_is_watched_until_its_operand_is_contiguous", f"{FOUND}::test_windows"),
        ("strided: beyond the operand", "    if result.numel() > 0 and last >= value.numel():\n", "    if False:\n"),
        ("strided: of what is not dense", "if not value.permute(order).is_contiguous() or offset", "if offset"),
        ("strided: from any place", " or offset not in (None, value.storage_offset()):", ":"),
        ("strided: of what is not made contiguous", "return read is None or not read.is_made_dense", "return read is None"),
    ),
    *_each(
        "fxamp/rewrite/strided.py",
        (f"{FOUND}::test_windows",),
        ("strided: of written memory", "if graph.storages(node).isdisjoint(written)]", "]"),
    ),
    # ---- where values are widened -------------------------------------------------------------------------
    *_each(
        "fxamp/widening.py",
        (WIDENING,),
        ("widening: what some read low", "all(user in wide or is_wide for user, is_wide in readers[node]) and ", ""),
        ("widening: what may not be wide", " and is_free(node):\n", ":\n"),
        ("widening: what a cast lays out otherwise", "if all(map(is_source, given)) and _numel", "if _numel"),
        ("widening: where it costs more", " and _numel(given) < _numel(widened_now):\n", ":\n"),
    ),
    *_each(
        "fxamp/rewrite/lower.py",
        (LOWER, WIDENING),
        ("casts: gradients may be summed low", " and not rounds_gradients(value, dtype):\n", ":\n"),
    ),
    *_each(
        "fxamp/joint/absorb.py",
        (MOVEMENT,),
        (
            "absorb: by operations that do not widen",
            "not all(_moves_on(user, thin) or _may_absorb(user, node) or _narrows(user, dtype) for user in node.users)",
            "False",
        ),
        (
            "absorb: with no wide operand left",
            "elif all(x in thin and x not in wanted for x in deciding):",
            "elif False:",
        ),
        (
            "absorb: casts that round",
            "return formats.is_lossless(before, after) and same_layout(source, result)",
            "return same_layout(source, result)",
        ),
        ("absorb: whatever the strides", " and same_layout(source, result)", ""),
        ("absorb: 0-dim operands decide", "value.dim() > 0 and value.dtype == _dtype(node)", "value.dtype == _dtype(node)"),
        (
            "absorb: sums in the narrow format",
            'graph.set_arguments(node, node.args, {**node.kwargs, "dtype": graph.value_of(node).dtype})',
            "pass",
        ),
        (
            "absorb: the user's own casts",
            "if not (graph.is_own_cast(node) or graph.is_of_a_decomposition(node)):",
            "if False:",
        ),
    ),
    *_each(
        "fxamp/joint/movement.py",
        (MOVEMENT, f"{MOVEMENT.removesuffix('movement.py')}casts.py"),
        ("movement: into constants that are rounded", "and _is_number_of(dtype, node.args[1])", ""),
        (
            "movement: padded by what is rounded",
            "return _is_number_of(dtype, node.args[2] if len(node.args) > 2 else 0)",
            "return True",
        ),
        (
            "movement: what somebody reads wide",
            "next(iter(dtypes)) if len(dtypes) == 1 else None",
            "next(filter(None, dtypes), None)",
        ),
        ("movement: whatever it costs", "if values is None or not _is_less(part, dtype):", "if values is None:"),
        ("movement: strides are not laid out anew", "    if can_stand_for(cast, graph.value_of(narrow)):\n", "    if True:\n"),
        ("movement: outputs are copies", "    if is_output(cast) or is_read_by_stride(cast):", "    if False:"),
    ),
    # ---- snapshots and sharing ----------------------------------------------------------------------------
    *_each(
        "fxamp/rewrite/lower.py",
        (RULES, LOWER, FOUND),
        (
            "casts: of written memory are shared",
            " and value.name not in self.snapshots\n",
            "\n",
        ),
        (
            "casts: shared by who may alias",
            "may_share = self._keeps_to_itself(user) and value",
            "may_share = value",
        ),
        ("casts: of fp32 births are shared", "            self.snapshots.add(cast.name)", "            pass"),
        (
            "casts: shared across switches of mode",
            "        key = (value, dtype, mode_index, saturates)\n",
            "        key = (value, dtype, 0, saturates)\n",
        ),
        (
            "casts: outputs are cast where the graph ends",
            "place = graph.after(value) if self.switches else output",
            "place = output",
        ),
    ),
    *_each(
        "fxamp/optable.py",
        (RULES, PLAN, FOUND, TABLE),
        ("MAY_ALIAS: no movement", "MAY_ALIAS: Final = frozenset(MOVEMENT.split())", "MAY_ALIAS: Final = frozenset(())"),
        ("MAY_ALIAS: not what is not listed", "return op not in TABLE or op in MAY_ALIAS", "return op in MAY_ALIAS"),
        ("optable: batch_norm follows with all operands", '{"batch_norm": 1, "higher', '{"higher'),
        (
            "optable: 0-dim tensors never decide",
            '        *("where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max"),\n',
            "",
        ),
        ("optable: every kernel takes low formats", '"avg_pool3d", "adaptive_avg_pool3d", "higher', '"higher'),
        ("optable: reading a size is a use", '"sym_size", "sym_stride", ', ""),
    ),
    # ---- classes --------------------------------------------------------------------------------------------
    *_without_rows(
        *("AUTOCAST_LOW", "AUTOCAST_HIGH", "COMPOSITE_HIGH", "RANDOM", "AUTOCAST_WIDEST", "BUILTIN_PROMOTION", "MOVEMENT"),
        *("ELEMENTWISE", "POOLING", "RECURRENT", "LIKE_HIGH", "REDUCTIONS", "EXACT", "COMPARISONS"),
    ),
    # ---- obstacles ------------------------------------------------------------------------------------------
    *_each(
        "fxamp/plan.py",
        (RULES, PLAN, FOUND),
        ("plan: lowers what opted out", '    "opted_out": "inside autocast(enabled=False)",\n', ""),
        (
            "plan: lowers what stands in the user's region",
            '    "users": "inside an autocast region of the user\'s own, which PyTorch casts",\n',
            "",
        ),
    ),
    *_without_obstacles(
        ("runs under ambient autocast", "return self.note.removesuffix(_UNTOUCHED)"),
        ("has no fp32 operand", 'return "has no fp32 operand"'),
        ("writes into out=", 'return "writes into out="'),
        ("names a dtype", 'return "names a dtype"'),
        ("contracts nothing", 'return "contracts nothing: it only moves or multiplies values"'),
        ("has no low kernel", 'return f"has no {formats.name(low)} kernel on {self.captured.device.type}"'),
        ("is a view, or writes in place", 'return f"in place: {written}" if written else "is a view here"'),
        ("has a shape that depends on data", 'return "its shape depends on data"'),
        ("holds other floats", 'return f"a value is {formats.name(dtype)} in the user\'s program"'),
        ("holds more than plain tensors", 'return f"a value is a {type(tensor).__name__} with layout {tensor.layout}"'),
    ),
    *(
        Mutant(f"guards: no {name}", "fxamp/guards.py", f"\n    {name},\n", "\n", (GUARDS,))
        for name in (
            *("constant_beyond", "constant_below", "eps_of_a_norm", "operand_beyond", "operand_below", "long_reduction"),
            *("sum_of_a_mean", "squares_of_a_norm", "computed_scalar"),
        )
    ),
    *_each(
        "fxamp/plan.py",
        (RULES, PLAN, FOUND),
        ("plan: written results stay low", "result, why = TRACED if value.dtype != TRACED else None,", "result, why = None,"),
        (
            "plan: written values follow",
            "if pinned is not None and (cls is not OpClass.LOW or node.name in self.captured.read_by_stride):",
            "if pinned is not None and node.name in self.captured.read_by_stride:",
        ),
        (
            "plan: an operation cannot refuse",
            "        if refusal is not None:\n            return self._keep",
            "        if False:\n            return self._keep",
        ),
    ),
    Mutant(
        "plan: readers of what is widened early keep their strides",
        "fxamp/plan.py",
        "            elif decision.value is not graph.value_of(node) and not changed.isdisjoint(node.all_input_nodes):\n",
        "            elif False:\n",
        ("tests/testing/test_found_programs.py",),
    ),
    # ---- who gets low outputs -------------------------------------------------------------------------------
    *_each(
        "fxamp/handing_on.py",
        ("tests/test_handing_on.py",),
        ("handing on: names that others read", "and name not in _shared(function) and", "and"),
        ("handing on: loops", "return not any(b.repeats for b in blocks) and", "return"),
        (
            "handing on: what reads the value",
            "                case _ if self.reads(statement):\n",
            "                case _ if False:\n",
        ),
        (
            "handing on: two calls in a statement",
            "    if sum(isinstance(node, ast.Call) for node in ast.walk(waiting)) != 1:\n",
            "    if False:\n",
        ),
    ),
    # ---- launches side by side ------------------------------------------------------------------------------
    *_each(
        "fxamp/run/branches.py",
        ("tests/run/test_branches.py",),
        (
            "branches: readers of what is written do not wait",
            "                if writes or wrote:\n",
            "                if wrote:\n",
        ),
        (
            "branches: writers of what is read do not wait",
            "                if writes or wrote:\n",
            "                if writes:\n",
        ),
        ("branches: nobody waits for what is put off", "(touches[where] or writes)", "False"),
        ("branches: the main branch is not waited for", "            self._wait(branch, self._mark(0))\n", ""),
        ("branches: nobody waits for sharers in the main branch", "        self._wait_for_sharers(0, touches)\n", ""),
        ("branches: nobody waits for sharers in others", "            self._wait_for_sharers(branch, touches)\n", ""),
        ("branches: what strangers do is known", "        if not given.is_known:\n", "        if False:\n"),
        ("branches: nothing is held", "            self._hold(given.tensors)\n", ""),
        ("branches: other launches follow the plan", "self._follows and i < len(plan.names) and ", "i < len(plan.names) or "),
        ("branches: arguments of the user's kernels are read", 'or not name.startswith("in_ptr")', ""),
        ("branches: what is called in_ptr is never written", "(name in mutated or not ", "(not "),
        ("branches: launches in other languages", ' and makers <= {"triton", "wait"}', ""),
        ("branches: streams of the user, and programmatic launches", " and not is_ordered", ""),
        ("branches: inputs that overlap", "None if _overlap(inputs) else run_of(code)", "run_of(code)"),
        ("branches: graphs that operations call", ", self._here.through(None), switch:", ", switch:"),
        ("branches: switches of when it was asked for", "is_tf32 and not tf32", "False and not tf32"),
        ("branches: errors leave branches open", "                run.break_off()\n", ""),
        (
            "branches: what parts behind a join need not wait",
            "        self._counts[0] += 1  # what parts",
            "        # what parts",
        ),
        ("branches: plans stay when they are none", "            self._plans.pop(id(code), None)\n", ""),
        ("branches: other threads follow", " and recorder.is_recording()", ""),
        (
            "branches: templates write what they call so",
            " and kernel.heuristic_type is not HeuristicType.TEMPLATE",
            "",
        ),
        ("branches: kernels of the user are known", " and not kernel.custom_kernel", ""),
        (
            "branches: memory is counted each time",
            "            if address(x) not in self._held:\n",
            "            if True:\n",
        ),
    ),
    *_each(
        "fxamp/rewrite/backends.py",
        ("tests/rewrite/test_backends.py",),
        ("flash: PyTorch's own order is the user's", " or allowed[: len(_PREFERS_CUDNN)] == _PREFERS_CUDNN", ""),
        ("flash: the user's order is PyTorch's", "        if not is_free or ", "        if "),
    ),
    # ---- what a recording holds fast ------------------------------------------------------------------------
    *_each(
        "fxamp/run/unchanged.py",
        ("tests/run/test_unchanged.py", "tests/run/test_surroundings.py"),
        (
            "glance: keys are others",
            "            _note(manager.get_key_manager(i, _SOURCE, key, _PLAIN), key)\n            of_value",
            "            of_value",
        ),
        (
            "glance: values are others",
            "                _note(of_value, value)\n",
            "                pass\n",
        ),
        ("glance: Python numbers in a state", "            if isinstance(value, kind):\n", "            if True:\n"),
        (
            "glance: outer keys are others",
            "            _note(manager.get_key_manager(i, _SOURCE, key, _PLAIN), key)\n            self._note_items",
            "            self._note_items",
        ),
        (
            "glance: types of what is not a tensor",
            "                of_value.add_type_match_guard(id(type(value)), *_REASON)\n",
            "                pass\n",
        ),
        ("glance: lists get longer", "        manager.add_length_check_guard(len(found), *_REASON)\n", ""),
        (
            "glance: what was not there",
            "                manager.add_dict_contains_guard(False, key, *_REASON)\n",
            "                pass\n",
        ),
        (
            "glance: None gets a hook",
            "                    of_value.add_none_match_guard(*_REASON)\n",
            "                    pass\n",
        ),
        (
            "glance: an empty dict gets a hook",
            "                    of_value.add_dict_length_check_guard(0, *_REASON)\n",
            "                    pass\n",
        ),
        ("glance: gradients", ".add_none_match_guard(*_REASON)\n\n    def _manager_of", "\n\n    def _manager_of"),
    ),
    *_each(
        "fxamp/run/surroundings.py",
        ("tests/run/test_surroundings.py",),
        ("glance: state and groups as a whole", " and self._is_same_optimizer())\n", ")\n"),
        ("glance: lists of parameters", '            unchanged.note_list(group["params"])\n', "            pass\n"),
        ("glance: other lists of parameters", ', *((group, "params") for group in groups)', ""),
        ("glance: modules", "            unchanged.note_dict(walked)\n", "            pass\n"),
        ("glance: states", "        unchanged.note_dict_of_dicts(state, Tensor)\n", ""),
        ("glance: hooks", "        unchanged.note_empty(self._parameters, NAMES_OF_HOOKS)\n", ""),
        ("glance: types in a state", "self._are_tensors == list(map(isinstance, states, itertools.repeat(Tensor)))", "True"),
        ("glance: keys of a group", "            and self._keys == list(map(list, at.optimizer.param_groups))\n", ""),
        ("glance: dicts of modules", "[*of_modules, *(place", "[*(place"),
        (
            "glance: what does not last is noted again",
            "if not is_right and self._unchanged is not None:\n            at.num_right *= 2\n",
            "if False:\n            pass\n",
        ),
        (
            "glance: what never holds is noted",
            "        if unchanged.holds():\n",
            "        if True:\n",
        ),
        ("glance: what is made anew is noted", "if not self._is_same_optimizer() or not all(", "if not all("),
        ("glance: orders that guards do not know", " or not all(map(_has_plain_order, dicts))", ""),
        ("glance: the order of an OrderedDict", 'map(operator.methodcaller("values"), spaces)', "map(dict.values, spaces)"),
        ("glance: large models are noted", " and self._num_parts() <= MAX_NOTED", ""),
        (
            "glance: where states begin",
            "            and self._starts == list(map(Tensor.data_ptr, self._tensors))",
            "            and True",
        ),
    ),
    *_each(
        "fxamp/run/surroundings.py",
        ("tests/run/test_surroundings.py",),
        ("settled: for good", "if now is not None and now == self._settled_version:", "if now is not None:"),
        ("settled: asked every time", "        self._settled_version = now\n", ""),
    ),
    *_each(
        "fxamp/run/flags.py",
        ("tests/run/test_flags.py",),
        (
            "settled: new slots",
            "        self._is_stale = True\n        self.num_changes += 1\n        released =",
            "        self._is_stale = True\n        released =",
        ),
        (
            "settled: free slots",
            "        self._is_stale = True\n        self.num_changes += 1\n        self._released",
            "        self._is_stale = True\n        self._released",
        ),
        (
            "settled: forgotten masks",
            "            self._masks.pop(owners, None)\n            self.num_changes += 1\n",
            "            self._masks.pop(owners, None)\n",
        ),
    ),
    *_each(
        "fxamp/run/scaler.py",
        ("tests/run/test_flags.py", "tests/test_variants.py"),
        ("settled: other optimizers", "        if len(self._attached) > 1:\n            return None\n", ""),
        ("floor: answers from before", " and not self._at_floor.is_outdated:", ":"),
    ),
    *_each(
        "fxamp/run/attachment.py",
        ("tests/run/test_skipping.py",),
        ("compiled steps: the hook behind them", "untraced(made.after)", "made.after"),
        ("compiled steps: Dynamo's frames", """.startswith("torch._dynamo")""", """.startswith("nobody's")"""),
        ("compiled steps: closures", "begin = untraced(self._begin)", "begin = self._begin"),
    ),
    *_each(
        "fxamp/ops.py",
        ("tests/test_ops.py",),
        ("largest: without numbers", "is_one_call and all(map(Tensor.numel, tensors))", "is_one_call"),
        ("largest: several kinds", "is_one_call = not others and", "is_one_call ="),
        ("largest: any format", " and dtype in (torch.float32, torch.float16, torch.bfloat16)", ""),
        ("largest: any slots", "if slots == [*range(len(slots))] and ", "if "),
    ),
    *_each(
        "fxamp/run/scaler.py",
        ("tests/test_ops.py",),
        ("not finite: complex", " and not gradient.is_complex() and", " and"),
        ("not finite: overlaps", " or not gradient.is_contiguous():", ":"),
    ),
    *_each(
        "fxamp/run/scaler.py",
        ("tests/test_variants.py",),
        ("resumed: answers on their way", "        self._at_floor.load_state_dict(at_floor)\n", ""),
        ("resumed: what is known of the floor", """        self._num_at_floor = float(at_floor["known"])\n""", ""),
    ),
    *_each(
        "fxamp/run/loss_scale.py",
        ("tests/test_variants.py",),
        ("resumed: updates at the floor", """        self.num_at_floor.fill_(state.get("num_at_floor", 0))""", "        pass"),
    ),
    *_each(
        "fxamp/backend.py",
        ("tests/test_variants.py",),
        ("resumed: the precision", "            self._precisions.force(precision)\n", "            pass\n"),
    ),
    *_each(
        "fxamp/run/agreement.py",
        ("tests/run/test_data_parallel.py",),
        ("ranks: answers from before", " or self._mailbox.is_outdated", ""),
    ),
    *_each(
        "fxamp/run/train_step.py",
        ("tests/run/test_own_memory.py",),
        ("own memory: of all updates", "            self._has_taken = True\n", ""),
        ("own memory: not given back", "with travelling, contextlib.closing(self._own_memory):", "with travelling:"),
    ),
    # ---- legality -------------------------------------------------------------------------------------------
    *_each(
        "fxamp/legal.py",
        (LEGAL,),
        ("legal: any order", "        if not seen.issuperset(node._input_nodes):\n", "        if False:\n"),
        (
            "legal: casts may lie",
            "if not (source.is_floating_point() and result.is_floating_point() and node.args[1] == result.dtype):",
            "if False:",
        ),
        ("legal: inputs and outputs may change", "    if now != signature:\n", "    if False:\n"),
        ("legal: recorded values may be wrong", "    if wants_full_check() and stage is REWRITTEN:\n", "    if False:\n"),
        (
            "legal: nested graphs are not looked at",
            "    for part in graph.all_of(gm):\n        _check_order(part, stage)\n",
            "    for part in [gm]:\n        _check_order(part, stage)\n",
        ),
    ),
)


def run(mutant: Mutant | None, tests: Sequence[str], *, root: Path = ROOT) -> Outcome:
    """Runs tests on a copy of the project with one mutant in it, in this process, which is not to be used afterwards."""
    import pytest

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fxamp-mutant-") as folder:
        for name in ("fxamp", "tests"):
            shutil.copytree(root / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", folder)
        if mutant is not None:
            (Path(folder) / mutant.file).write_text(mutant.applied())
        sys.path.insert(0, folder)
        os.chdir(folder)
        seen = _FirstFailure()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--capture=no", *tests], plugins=[seen])
        import fxamp

        assert Path(fxamp.__file__).is_relative_to(Path(folder).resolve()), fxamp.__file__
    killed_by = seen.name or ("" if code == 0 else f"pytest: {code!r}")
    return Outcome(killed_by, time.perf_counter() - start)


class _FirstFailure:
    """A pytest plugin."""

    name = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (does not load)"


def _prepare() -> None:
    """Imports what every child needs, once."""
    import torch
    import torch._dynamo
    import torch._functorch.aot_autograd

    torch.set_num_threads(1)  # a forked child has none of its parent's threads


def table(rows: Iterable[tuple[str, Outcome]]) -> str:
    """The result, in Markdown."""
    lines = ["| mutant | killed by | seconds |", "|---|---|---|"]
    for name, outcome in rows:
        lines.append(
            f"| {name} | {f'`{outcome.killed_by}`' if outcome.killed_by else '**survived**'} | {outcome.seconds:.1f} |"
        )
    return "\n".join(lines)


def merged(path: Path, rows: Sequence[tuple[str, Outcome]]) -> list[tuple[str, Outcome]]:
    """The rows of a page that is there, for mutants that there still are, with these in place of what they replace."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, rest = line.removeprefix("| ").removesuffix(" |").partition(" | ")
        killed_by, _, seconds = rest.rpartition(" | ")
        if seconds.replace(".", "").isdecimal():
            found[name] = Outcome("" if killed_by == "**survived**" else killed_by.strip("`"), float(seconds))
    found |= rows
    return [(mutant.name, found[mutant.name]) for mutant in MUTANTS if mutant.name in found]


def page(rows: Sequence[tuple[str, Outcome]]) -> str:
    """docs/mutants.md."""
    num_killed = sum(bool(outcome.killed_by) for _, outcome in rows)
    command = "python tools/mutants.py --write docs/mutants.md"
    one = "with `--only WORD` it measures some and keeps the other rows"
    return f"# Mutants\n\n{num_killed} of {len(rows)} mutants are killed. Made by `{command}`; {one}.\n\n{table(rows)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", default="", help="only mutants whose name holds this")
    parser.add_argument("--write", type=Path, help="a Markdown file for the result; with --only, its other rows stay")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    for mutant in chosen:
        mutant.applied()
    _prepare()
    subsets = sorted({test for mutant in chosen for test in mutant.tests})
    jobs = [*((mutant, mutant.tests) for mutant in chosen), (None, subsets)]
    rows: list[tuple[str, Outcome]] = []
    for (mutant, _), outcome in zip(jobs, _run_all(jobs, options.jobs), strict=True):
        name = mutant.name if mutant else "(none)"
        rows.append((name, outcome))
        print(f"{name:60} {outcome.seconds:6.1f} s  {outcome.killed_by or 'survived'}", flush=True)
    *mutants, (_, control) = rows
    survivors = [name for name, outcome in mutants if not outcome.killed_by]
    summary = f"{len(mutants) - len(survivors)} of {len(mutants)} mutants are killed"
    print(summary)
    if options.write:
        options.write.write_text(page(merged(options.write, mutants)))
    if control.killed_by:
        print(f"without any mutant, {control.killed_by} fails")
    return 1 if survivors or control.killed_by else 0


def _run_all(jobs: Sequence[tuple[Mutant | None, Sequence[str]]], num_processes: int) -> Iterable[Outcome]:
    """Outcomes in the order of the jobs, each from a process forked for it."""
    context = multiprocessing.get_context("fork")
    with context.Pool(num_processes, maxtasksperchild=1) as pool:
        yield from pool.imap(_run_one, jobs, chunksize=1)


def _run_one(job: tuple[Mutant | None, Sequence[str]]) -> Outcome:
    return run(*job)


if __name__ == "__main__":
    sys.exit(main())
