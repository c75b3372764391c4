from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fxamp import errors, graph, legal, passes
from fxamp.passes import Change
from tests.programs import planned, rewritten


def gm_and_check():
    captured, _ = planned(lambda a: (a @ a).exp(), torch.rand(2, 2))
    return rewritten(lambda a: (a @ a).exp(), torch.rand(2, 2)), legal.checker(legal.REWRITTEN, captured.gm)


def test_a_rewritten_graph_passes():
    gm, check = gm_and_check()
    check(gm)


def test_an_output_that_changed_its_dtype_is_found():
    gm, check = gm_and_check()
    output = gm.graph.output_node()
    cast = graph.insert_cast(output.all_input_nodes[0], torch.bfloat16, before=output, why="planted")
    graph.map_operands(output, lambda _, x: cast)
    with pytest.raises(errors.IllegalGraph, match=r"Dynamo rewrite has inputs and outputs .*bfloat16.* before it .*float32"):
        check(gm)


def test_a_cast_that_claims_another_dtype_is_found():
    gm, check = gm_and_check()
    cast = next(n for n in gm.graph.nodes if graph.own_cast(n) is not None)
    graph.set_value(cast, graph.value_of(cast).to(torch.float16))
    with pytest.raises(errors.IllegalGraph, match="casts torch.float32 to torch.bfloat16 but claims torch.float16"):
        check(gm)


def test_a_recorded_value_that_is_not_the_computed_one_is_found():
    gm, check = gm_and_check()
    cast = next(n for n in gm.graph.nodes if graph.own_cast(n) is not None)
    graph.set_value(cast, graph.value_of(cast).view(4))
    with pytest.raises(errors.IllegalGraph, match=r"recorded as torch.bfloat16\[4\], is torch.bfloat16\[2, 2\]"):
        check(gm)


def test_a_cast_in_a_nested_graph_is_looked_at():
    def fn(a):
        return checkpoint(lambda b: (b @ b).exp(), a, use_reentrant=False)

    captured, _ = planned(fn, torch.rand(2, 2))
    gm, check = rewritten(fn, torch.rand(2, 2)), legal.checker(legal.REWRITTEN, captured.gm)
    check(gm)
    cast = next(n for n in graph.all_of(gm)[1].graph.nodes if graph.own_cast(n) is not None)
    graph.set_value(cast, graph.value_of(cast).to(torch.float16))
    with pytest.raises(errors.IllegalGraph, match="casts torch.float32 to torch.bfloat16 but claims torch.float16"):
        check(gm)


def test_a_value_that_is_read_before_it_is_made_is_found():
    gm, check = gm_and_check()
    cast = next(n for n in gm.graph.nodes if graph.own_cast(n) is not None)
    gm.graph.output_node().prepend(cast)
    with pytest.raises(errors.IllegalGraph, match=r"matmul in the Dynamo rewrite reads .*_bf16, which comes later"):
        check(gm)


class Breaks:
    def __repr__(self) -> str:
        return "Breaks()"

    def __call__(self, gm: torch.fx.GraphModule) -> Change:
        raise KeyError("lost")


def test_a_pass_that_fails_is_named():
    gm, check = gm_and_check()
    with pytest.raises(errors.StageFailed) as caught:
        passes.run(gm, [Breaks()], check)
    assert str(caught.value) == (
        "ERROR[StageFailed]: pass Breaks() failed: 'lost'. Please report this; on_error='eager' compiles the untouched graph "
        "meanwhile"
    )
    assert isinstance(caught.value.__cause__, KeyError)


class Nothing:
    def __call__(self, gm: torch.fx.GraphModule) -> Change:
        return Change(pass_name="Nothing")


@pytest.mark.parametrize(("full", "times"), [("0", 1), ("1", 3)])
def test_the_check_runs_behind_the_last_pass_or_behind_each(full: str, times: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXAMP_CHECK", full)
    gm, _ = gm_and_check()
    seen: list[torch.fx.GraphModule] = []
    passes.run(gm, [Nothing(), Nothing(), Nothing()], seen.append)
    assert seen == [gm] * times


def test_a_graph_that_passes_spoilt_without_anybody_looking(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FXAMP_CHECK")
    gm, check = gm_and_check()
    graph.map_operands(gm.graph.output_node(), lambda _, x: x.all_input_nodes[0].all_input_nodes[0])
    with pytest.raises(errors.StageFailed, match=r"one of the passes \(FXAMP_CHECK=1 .*\) failed: .*inputs and outputs"):
        passes.run(gm, [Nothing()], check)
