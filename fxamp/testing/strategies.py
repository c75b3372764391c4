"""Hypothesis strategies for programs.

A program is drawn as a list of steps, each a template and a few small numbers that pick its operands; `build` reads the list.
A step that does not run, or leaves the range in which a comparison means something, is left out: so every sublist of a
counter-example is a program too, and shrinking leaves a few readable lines.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.overrides import TorchFunctionMode

from fxamp import graph
from fxamp.testing.program import Program
from fxamp.testing.values import Rounded, gradients, rounding_error

LARGEST: Final = 128.0
"""Values of whole programs stay below: bf16 holds every whole number up to 256, and sums inside a kernel get room."""

MAX_ERROR: Final = 2.0**-4
"""Largest effect, relative to the largest value, that rounding every value of a program may have on any value or gradient."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """A statement with slots: {a} {b} {c} a float, {m} {n} a 4x4 float, {o} a contiguous one, {i} int64, {p} bool, {r} new."""

    text: str
    is_whole: bool
    """Does it map small whole numbers to small whole numbers?"""
    is_rounding: bool
    """Is it continuous, so that rounding its operands changes its result a little? Else it is used on whole numbers only."""
    is_low: bool = False
    """Is it a product, which the default policy lowers? These are drawn more often: what is never lowered shows little."""


def _templates(text: str, *, is_whole: bool = True, is_rounding: bool = True, is_low: bool = False) -> list[Template]:
    lines = [line.strip() for line in text.strip().splitlines()]
    return [Template(text=line, is_whole=is_whole, is_rounding=is_rounding, is_low=is_low) for line in lines]


TEMPLATES: Final = tuple(
    [
        *_templates("{r} = {m} @ {n}", is_low=True),
        *_templates("{r} = {a} + {b}\n{r} = {a} * 2.0\n{r} = {a}.relu()"),
        *_templates("{r} = {a}.sum(-1)"),
        *_templates(
            """{r} = F.linear({m}, {n})
            {r} = {m}.mm({n})
            {r} = torch.addmm({a}, {m}, {n})
            {r} = torch.matmul({m}, {a})
            {r} = torch.bmm({m}.unsqueeze(0), {n}.unsqueeze(0))
            {r} = torch.einsum("ij,jk->ik", {m}, {n})
            {r} = F.conv1d({m}.unsqueeze(0), {n}.unsqueeze(-1))""",
            is_low=True,
        ),
        *_templates(
            """{r} = F.scaled_dot_product_attention({m}.unsqueeze(0), {n}.unsqueeze(0), {m}.unsqueeze(0))
            {r} = F.linear({m}, {n}, {n}[0])
            {r} = F.prelu({m}, {n}[0])""",
            is_whole=False,
            is_low=True,
        ),
        *_templates(
            """{r} = torch.cumsum({a}, -1)
            {r} = {a}.pow(2)
            {r} = F.l1_loss({a}, {b})
            {r} = F.mse_loss({a}, {b}, reduction="sum")""",
        ),
        *_templates(
            """{r} = {a}.softmax(-1)
            {r} = F.layer_norm({m}, (4,))
            {r} = F.layer_norm({m}, (4,), {n}[0], {n}[1])
            {r} = {a}.exp()
            {r} = torch.log_softmax({a}, -1)
            {r} = F.cross_entropy({m}, {i})
            {r} = F.dropout({a}, 0.5, True)
            {r} = torch.logsumexp({a}, -1)
            {r} = F.softplus({a})""",
            is_whole=False,
        ),
        *_templates(
            """{r} = torch.cat([{m}, {n}])
            {r} = torch.stack([{a}, {b}])
            {r} = torch.addcmul({a}, {b}, {c})
            {r} = torch.tensordot({m}, {n}, 1)
            {r} = torch.index_put({m}, ({i},), {n}[0])
            {r} = torch.scatter_add({m}, 0, {i}.expand(4, 4), {n})""",
        ),
        *_templates(
            """{r} = {a} - {b}
            {r} = -{a}
            {r} = {a} * {b}
            {r} = {a} + 1
            {r} = torch.maximum({a}, {b})
            {r} = {a}.clamp(-2.0, 2.0)
            {r} = {a}.abs()
            {r} = torch.where({p}, {a}, {b})
            {r} = {a}.masked_fill({p}, 0.0)
            {r} = {a}.clone()
            {r} = {a}.detach()
            {r} = {a}.t()
            {r} = {a}.transpose(0, -1)
            {r} = {a}.view(-1)
            {r} = {a}.reshape(-1)
            {r} = {a}.reshape(2, -1)
            {r} = {a}.contiguous()
            {r} = {a}.flatten()
            {r} = {a}.unsqueeze(0)
            {r} = {a}.squeeze()
            {r} = {a}[0]
            {r} = {a}[1:3]
            {r} = {a}[:, :2]
            {r} = {a}[{i}]
            {r} = {a}[None]
            {r} = {a}.select(0, 1)
            {r} = {a}.narrow(0, 0, 2)
            {r} = {m}.expand(2, 4, 4)
            {r} = {a}.diagonal()
            {r}, {r} = {a}.chunk(2)
            {r}, {r} = {a}.split(2)
            {r} = {a}.flip(0)
            {r} = {a}.tril()
            {r} = {a}.roll(1, 0)
            {r} = {a}.index_select(0, {i})
            {r} = F.pad({a}, (1, 1))
            {r} = F.max_pool1d({m}.unsqueeze(0), 2)""",
        ),
        *_templates(
            """{r} = F.gelu({a})
            {r} = {a}.sigmoid()
            {r} = {a}.tanh()
            {r} = F.silu({a})
            {r} = {a} / 3.0
            {r} = torch.lerp({a}, {b}, 0.3)
            {r} = F.avg_pool1d({m}.unsqueeze(0), 3)
            {r} = F.batch_norm({m}, None, None, None, None, True)
            {r} = F.batch_norm({m}, {n}[0].detach(), {n}[1].detach().abs(), None, None, True)""",
            is_whole=False,
        ),
        # ---- kept as traced ---------------------------------------------------------------------------------------------
        *_templates("{r} = {a}.erf()\n{r} = {a}.mean(-1)\n{r} = {a}.var(-1)", is_whole=False),
        *_templates(
            """{r}, {r} = {a}.max(-1)
            {r} = {a} > {b}
            {r} = {a}.argmax(-1)
            {r}, {r} = {a}.sort(-1)
            {r} = {a}.round()
            {r} = {a}.sign()""",
            is_rounding=False,
        ),
        # ---- constants, other types, the user's own casts ------------------------------------------------------------------
        *_templates(
            """{r} = torch.ones(4, 4)
            {r} = torch.tensor(2.0)
            {r} = torch.arange(4.0)
            {r} = torch.zeros_like({a})
            {r} = torch.zeros(4, 4, dtype=torch.float64)
            {r} = {i} + 1
            {r} = torch.logical_not({p})
            {r} = {i}.to(torch.float32)
            {r} = {p}.float()
            {r} = {a} * {i}
            {r} = {a}.double()
            {r} = {a}.float()
            {r} = {a}.to(torch.float32)
            {r} = {a}.type_as({b})"""
        ),
        *_templates("{r} = {a}.half()\n{r} = {a}.bfloat16()"),
        # ---- writes -----------------------------------------------------------------------------------------------------
        *_templates(
            """{a}.add_(1.0)
            {a} += {b}
            {a}.mul_(2.0)
            {a} *= 2.0
            {a}.add_({b})
            {a}.copy_({b})
            {a}.zero_()
            {a}.relu_()
            {a}[0] = 1.0
            {a}[1:3] = {b}[0]
            {a}[{i}] = 0.0
            {a}[0] += {b}[1]
            {a}.view(-1).mul_(2.0)
            {a}.t().add_(1.0)
            {a}.detach().add_(1.0)
            {a}[:, 0].fill_(2.0)
            {a}.masked_fill_({p}, 0.0)
            F.relu({a}, inplace=True)
            torch.relu_({a})
            torch.add({b}, {c}, out={o})
            torch.ops.aten.add_.Tensor({a}, {b})
            torch._foreach_add_([{a}, {b}], 1.0)
            {r} = {a}.add_(1.0)
            {r} = {a}.clamp_(-2.0, 2.0)
            {r} = F.relu({a}, inplace=True)
            {i}.add_(0)
            {a}.sub_({b})"""
        ),
        *_templates("{a}.sigmoid_()\n{a}.div_(3.0)\n{r} = F.dropout({a}, 0.5, True, True)", is_whole=False),
    ]
)
"""Statements of programs, the simplest first: counter-examples shrink towards the front."""

HIGHER_ORDER: Final = tuple(
    [
        *_templates(
            """{r} = checkpoint(lambda x: (x @ {n}).relu(), {m})
            {r} = checkpoint(lambda x, y: (x @ y) * 2.0, {m}, {n})"""
        ),
        *_templates(  # clones: Dynamo takes no operands that share memory
            "{r} = cond({m}.sum() > 0, lambda x, y: (x @ y).relu(), lambda x, y: y @ x, ({m}.clone(), {n}.clone()))",
            is_rounding=False,
        ),
        *_templates("{r} = checkpoint(lambda x: (x @ {n}).tanh() @ {n}, {m})", is_whole=False),
    ]
)

REGIONS: Final = (
    "",
    "with torch.no_grad():",
    'with torch.autocast("cpu", enabled=False):',
    'with torch.autocast("cpu", dtype=torch.bfloat16):',
)
"""What a step may stand in, plain first. Neighbours in one kind of region share a block."""

_ARGUMENTS: Final = (
    ("w", "f32[4, 4]{whole} parameter"),
    ("y", "f32[4, 4]{whole}"),
    ("m", "f32[4]{whole} buffer"),
    ("i", "i64[4]"),
    ("p", "b8[4, 4]"),
    ("s", "f32[]{whole}"),
    ("k", "f32[4, 4]{whole} buffer"),
    ("h", "f16[4, 4]{whole}"),
    ("l", "bf16[4, 4]{whole}"),
    ("d", "f64[4, 4]{whole}"),
    ("tied", "= x"),
    ("seen", "= x.t()"),
    ("row", "= x[1]"),
)
"""What a program may have besides its first input, x."""


@dataclass(frozen=True)
class Step:
    """A drawn statement: which template, in which region, on which operands."""

    template: Template
    picks: tuple[int, ...]
    """For each slot: the how-many-th newest variable that fits."""
    region: str


@st.composite  # which also keeps the templates out of its repr
def programs(draw: st.DrawFn, *, higher_order: bool = False, max_steps: int = 8) -> Program:
    """Programs of all operation classes, with views, writes, regions, other types, shared inputs and outputs.

    Half of them compute with small whole numbers only: there every format gives the same bits, so whatever differs is wrong.
    The others round, but are so conditioned that rounding every value changes little (`MAX_ERROR`).

    Args: higher_order adds checkpoint and cond, which only Dynamo can capture.
    """
    is_whole = draw(st.booleans())
    # `build` is called here, not by the strategy: so a counter-example prints as a program, and not as the choices behind it
    return build(
        is_whole=is_whole,
        needs_grad=draw(st.booleans()),
        others=draw(_OTHERS),
        steps=draw(_steps(is_whole, higher_order, max_steps)),
        returned=draw(_RETURNED),
    )


_OTHERS: Final = st.sets(st.sampled_from(range(len(_ARGUMENTS))), max_size=6)
_RETURNED: Final = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@functools.cache
def _steps(is_whole: bool, higher_order: bool, max_steps: int) -> SearchStrategy[list[Step]]:
    pool = [t for t in TEMPLATES if (t.is_whole if is_whole else t.is_rounding)]
    pool += [t for t in pool if t.is_low] * 3
    if higher_order:
        bodies = [t for t in HIGHER_ORDER if (t.is_whole if is_whole else t.is_rounding)]
        pool = [*bodies, *pool, *bodies * 8]
    step = st.builds(
        Step,
        st.sampled_from(pool),
        st.tuples(*[st.integers(0, 5)] * 4),
        st.sampled_from((REGIONS[0],) * 5 + REGIONS),
    )
    return st.lists(step, min_size=1, max_size=max_steps)


def build(
    *, is_whole: bool, needs_grad: bool, others: frozenset[int] | set[int], steps: Sequence[Step], returned: Sequence[int]
) -> Program:
    """The program that a list of choices stands for."""
    whole = " whole" if is_whole else ""
    arguments = {"x": f"f32[4, 4]{' grad' if needs_grad else ''}{whole}"}
    for index in sorted(others):
        name, text = _ARGUMENTS[index]
        if text.startswith("= ") and needs_grad and text != "= x":
            continue  # a view of a leaf is no leaf, and has no gradient of its own
        if not needs_grad:
            text = text.replace(" parameter", " buffer")
        arguments[name] = text.format(whole=whole)
    names = [f"v{n}" for n in range(100)]
    lines: list[str] = []
    region = ""
    known = _variables(arguments, lines, is_whole)
    assert known is not None, arguments
    for step in steps:
        statement = _render(step, known, names)
        if statement is None:
            continue
        opening = [f"    {step.region}"] if step.region and step.region != region else []
        trial = [*lines, *opening, f"{'        ' if step.region else '    '}{statement}"]
        now = _variables(arguments, trial, is_whole)
        if now is not None:
            lines, known, region = trial, now, step.region
    tensors = list(reversed(known))
    chosen = list(dict.fromkeys(tensors[pick % len(tensors)] for pick in returned))
    used = set(re.findall(r"\w+", "\n".join([*lines, *chosen])))
    used |= {word for name in used & arguments.keys() for word in re.findall(r"\w+", arguments[name])}
    kept = {name: text for name, text in arguments.items() if name in used or name == "x"}
    return Program(_text(kept, lines, f"{', '.join(chosen)},"))


def _text(arguments: dict[str, str], lines: Sequence[str], returned: str) -> str:
    signature = ", ".join(f'{name}: "{text}"' for name, text in arguments.items())
    return "\n".join([f"def forward({signature}):", *lines, f"    return {returned}"])


_SLOT: Final = re.compile(r"\{(\w)\}")


def _render(step: Step, known: dict[str, torch.Tensor], names: Sequence[str]) -> str | None:
    """The statement with names in its slots; None if there is no variable of a kind that it needs."""
    chosen: dict[str, str] = {}
    picks = iter(step.picks * 2)
    fresh = iter(name for name in names if name not in known)

    def fill(match: re.Match[str]) -> str:
        slot = match[1]
        if slot == "r":
            return next(fresh)
        if slot not in chosen:
            fitting = [name for name, tensor in reversed(known.items()) if _fits(slot, tensor)]
            chosen[slot] = fitting[next(picks) % len(fitting)] if fitting else ""
        return chosen[slot]

    text = _SLOT.sub(fill, step.template.text)
    return None if "" in chosen.values() else text


def _fits(slot: str, tensor: torch.Tensor) -> bool:
    if slot == "i":
        return tensor.dtype == torch.int64 and tensor.shape == (4,)
    if slot == "p":
        return tensor.dtype == torch.bool and tensor.shape == (4, 4)
    if slot in "mn":
        return tensor.is_floating_point() and tensor.shape == (4, 4)
    return tensor.is_floating_point() and (slot != "o" or tensor.is_contiguous())  # Dynamo takes no other out=


def _variables(arguments: dict[str, str], lines: Sequence[str], is_whole: bool) -> dict[str, torch.Tensor] | None:
    """All tensors that a piece of program knows at its end; None if it does not run, or runs out of range."""
    return _known(_text(arguments, lines, "locals()"), is_whole)


@functools.lru_cache(maxsize=512)
def _known(text: str, is_whole: bool) -> dict[str, torch.Tensor] | None:
    program = Program(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            real, rounded = program.make_arguments(), program.make_arguments()
            torch.manual_seed(0)
            with _Noticed():
                want = _tensors(program.function()(*real.values()))
            torch.manual_seed(0)
            with Rounded(torch.bfloat16, rounded.values()) as mode:
                got = _tensors(program.function()(*rounded.values()))
            pulled, rough = gradients(list(want.values()), real), gradients(list(got.values()), rounded)
    except (RuntimeError, IndexError, TypeError, ValueError, UserWarning):  # an operation's way to say no
        return None
    if not all(t.isfinite().all() for t in (*want.values(), *got.values(), *_present(pulled).values())):
        return None
    if max(float(t.detach().double().abs().max()) for t in want.values() if t.numel()) > LARGEST:
        return None
    if is_whole and mode.num_rounded:
        return None
    exact, near = want | _present(pulled), got | _present(rough)
    return None if any(rounding_error(near[name], exact[name]) > MAX_ERROR for name in exact) else want


class _Noticed(TorchFunctionMode):
    """Refuses what PyTorch itself, compiling, computes otherwise than eagerly.

    Tells autograd of what `batch_norm` writes, so that it refuses a backward through what was read there before: by itself it
    takes the statistics for what was read. A list in which memory stands twice is written twice, compiled once
    (`_foreach_add_([x, x.t()], 1.0)` adds 1).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for statistics in args[1:3] if func is F.batch_norm else ():
            if statistics is not None:
                torch.autograd.graph.increment_version(statistics)  # before the call, which keeps them for its own backward
        if func is torch._foreach_add_ and len(set(map(graph.memory_of, args[0]))) < len(args[0]):
            raise RuntimeError("memory that is written twice")
        return func(*args, **(kwargs or {}))


def _present(found: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {f"gradient of {name}": gradient for name, gradient in found.items() if gradient is not None}


def _tensors(variables: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in variables.items() if isinstance(value, torch.Tensor)}
