from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fxamp import capture, errors, graph, testing
from fxamp.testing import Program
from fxamp.testing.trace import trace
from tests.programs import graph_of

EVERYTHING = Program(
    '''
    def forward(x: "f32[4, 4] whole", w: "f32[4, 4] parameter", m: "f32[4] buffer", i: "i64[4]", p: "b8[4, 4]", v: "= x.t()"):
        a = x @ w
        a += v
        a[1:3] = m[0]
        a[0] += a[1]
        b, c = a.chunk(2)
        m.mul_(0.5)
        d = torch.where(p, a, -x)
        with torch.no_grad():
            e = torch.cat([a, d])
        with torch.autocast("cpu", enabled=False):
            f = a.softmax(-1) * 2.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            g = a @ x
        h = torch.relu_(a.clone())
        j = F.dropout(a[i] > 0, 0.5, False)
        return b, c, d, e, f, g, h, j
    '''
)

CALLS = ("call_function", "call_method")


def described(gm: torch.fx.GraphModule):
    """What the stages after capture read of a graph: operations, types, aliasing classes, regions."""
    storages: dict[object, int] = {}
    for node in gm.graph.nodes:
        value = graph.value_of(node)
        kinds = [(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in graph.tensors_of(value)]
        memory = [storages.setdefault(key, len(storages)) for key in sorted(graph.storages(node), key=str)]
        yield node.op, capture.name_of(node), str(node.target) if node.op == "call_function" else "", kinds, memory


def test_the_trace_is_dynamos_graph():
    made = EVERYTHING.make_arguments()
    theirs, _ = graph_of(EVERYTHING.module(made), *EVERYTHING.inputs(made))
    mine, _ = trace(EVERYTHING)
    inputs = [set(map(str, (d[3] for d in described(gm) if d[0] == "placeholder"))) for gm in (mine, theirs)]
    assert inputs[0] == inputs[1]
    calls = [[d[:4] for d in described(gm) if d[0] in CALLS] for gm in (mine, theirs)]
    assert calls[0] == calls[1]


def test_the_facts_are_dynamos():
    made = EVERYTHING.make_arguments()
    theirs = capture.capture(*graph_of(EVERYTHING.module(made), *EVERYTHING.inputs(made)))
    mine = capture.capture(*trace(EVERYTHING))

    def facts(captured: capture.Captured):
        calls = [n for n in captured.gm.graph.nodes if n.op in CALLS and graph.tensors_of(graph.value_of(n))]
        found = [(captured.facts[n.name], n.name in captured.pinned) for n in calls]
        return [(f.op, f.where, f.code, f.region, f.mode_index, pinned) for f, pinned in found]

    assert facts(mine) == facts(theirs)
    assert sorted(mine.roles.values()) == sorted(theirs.roles.values())
    assert mine.fresh_outputs == theirs.fresh_outputs


@given(testing.programs())
def test_a_program_reads_as_it_prints(program: Program):
    assert eval(repr(program), {"Program": Program}) == program
    assert program.text.startswith("def forward(x: ")


def test_arguments_are_the_same_every_time_and_say_what_they_are():
    a, b = EVERYTHING.make_arguments(), EVERYTHING.make_arguments()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["v"].data_ptr() == a["x"].data_ptr()
    assert torch.equal(a["x"], a["x"].round())
    assert not torch.equal(a["m"], a["m"].round())
    assert isinstance(a["w"], torch.nn.Parameter)
    assert not a["x"].requires_grad


def test_a_program_runs_forward_and_backward():
    adds = 'def forward(x: "f32[3] grad whole", m: "f32[3] buffer whole"):\n    m.add_(x.detach())\n    return x * 3.0,'
    run = testing.run(Program(adds))
    assert run.gradients["x"] is not None
    assert torch.equal(run.gradients["x"], torch.tensor([-3.0, 0.0, 3.0]))
    before = Program('def forward(m: "f32[3] buffer whole"):\n    return m,').make_arguments()["m"]
    assert torch.equal(run.arguments["m"], before + run.arguments["x"].detach())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def forward(x: 'f33[4]'): pass", "argument 'x' of a program is annotated 'f33.4.'"),
        ("def forward(x: 'f32[4] big'): pass", "annotated 'f32.4. big'"),
        ("def forward(x): pass", "annotated ''"),
        ("x = 1", "a program is a Assign"),
        ("def forward(", "a program cannot be read"),
    ],
)
def test_what_is_no_program_is_refused(text, message):
    with pytest.raises(errors.InvalidOption, match=message):
        Program(text)


def test_what_cannot_be_traced_says_where():
    program = Program('def forward(x: "f32[4]"):\n    while x:\n        pass\n    return x,')
    with pytest.raises(errors.InvalidOption, match=r"`while x:` cannot be traced, at program_\w+.py:2. Give lower="):
        testing.check(program)
