"""End to end on the CPU: what a user does, and what must come out of it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import fxamp
from fxamp import errors, formats, joint, tf32
from tests.programs import Fn, everything, mlp, pull, relative_error, small_models, step

LOWERINGS = ("inductor", "aot_eager", "eager")


@pytest.mark.installed
def test_the_name_works_without_importing_fxamp():
    program = (
        "import torch; m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU());"
        "f = torch.compile(m, backend='fxamp', options={'precision': 'bf16', 'lower': 'aot_eager'});"
        "f(torch.randn(2, 8)).sum().backward();"
        "import fxamp; print(fxamp.shared(precision='bf16', lower='aot_eager').report().num_low_ops)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.usefixtures("by_name")
def test_modes_and_options_reach_the_shared_amp():
    torch.compile(mlp(8, 8), backend="fxamp", mode="max-autotune-no-cudagraphs")(torch.randn(2, 8))
    assert len(fxamp.shared(mode="max-autotune-no-cudagraphs").graphs) == 1
    with pytest.raises(Exception, match=r"unknown option 'precison'. Did you mean 'precision'\?"):
        torch.compile(mlp(8, 8), backend="fxamp", options={"precison": "bf16"})(torch.randn(2, 8))


def test_options_beside_an_amp_are_an_error():
    with pytest.raises(Exception, match=r"beside an Amp. Give them to fxamp.Amp\(...\)"):
        torch.compile(mlp(8, 8), backend=fxamp.Amp(), options={"precision": "bf16"})(torch.randn(2, 8))


@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize("name", list(small_models()))
def test_bf16_is_near_fp32_and_not_equal(name: str, lower: str):
    torch.manual_seed(0)
    model, inputs = small_models()[name]
    amp = fxamp.Amp(precision="bf16", lower=lower)
    got, want = step(model, inputs, backend=amp), step(model, inputs, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        peer = step(model, inputs, backend="eager")
    assert got.keys() == want.keys()
    differ = 0
    for key, value in want.items():
        assert got[key].dtype == value.dtype, key
        # bf16 has 8 significant bits; sums of signed values that nearly cancel lose more, with autocast as well
        assert relative_error(got[key], value) < max(6e-2, 1.5 * relative_error(peer[key], value)), key
        differ += not torch.equal(got[key], value)
    assert differ > 0
    assert amp.report().num_low_ops > 0


@pytest.mark.parametrize("name", list(small_models()))
def test_fp32_is_inductor_bit_for_bit(name: str):
    torch.manual_seed(0)
    model, inputs = small_models()[name]
    got = step(model, inputs, backend=fxamp.Amp(precision="fp32"))
    want = step(model, inputs, backend="inductor")
    assert got.keys() == want.keys()
    unequal = [key for key in want if not torch.equal(got[key], want[key])]
    assert not unequal


def test_the_joint_passes_run_under_aot_eager():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    torch.compile(mlp(8, 8, 8), backend=amp)(torch.randn(2, 8)).sum().backward()
    variant = amp.graphs[0].variants["bf16"]
    passes = joint.order(keeps_roundings=False)
    assert [c.pass_name for c in variant.joint_changes] == [type(p).__name__ for p in passes]
    targets = {str(n.target) for n in variant.joint.graph.nodes}
    assert "aten.mm.default" in targets
    assert any("tangents" in n.name for n in variant.joint.graph.nodes)


def test_a_graph_break_makes_two_graphs():
    def forward(m, x):
        y = m.a(x).relu()
        torch._dynamo.graph_break()
        return m.b(y)

    model = Fn(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    twin, twin_x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    out, want = torch.compile(model, backend=amp)(x), twin(twin_x)
    pull(out), pull(want)
    assert len(amp.graphs) == 2
    got, expected = everything(model, out, [x]), everything(twin, want, [twin_x])
    assert max(relative_error(got[k], expected[k]) for k in expected) < 3e-2
    assert all(got[k].dtype == expected[k].dtype for k in expected)


def test_batches_of_any_size_need_two_graphs():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    model = mlp(8, 16, 2)
    compiled = torch.compile(model, backend=amp)
    for size in (4, 6, 9, 12):
        x = torch.randn(size, 8)
        assert relative_error(compiled(x), model(x)) < 3e-2
    assert len(amp.graphs) == 2


@pytest.mark.parametrize("lower", ["inductor", "aot_eager"])
def test_train_eval_no_grad_and_inference_mode(lower: str):
    amp = fxamp.Amp(precision="bf16", lower=lower)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    twin, x = copy.deepcopy(model), torch.randn(16, 8)
    compiled = torch.compile(model, backend=amp)
    for training in (True, False):
        model.train(training), twin.train(training)
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                got, want = compiled(x), twin(x)
            assert relative_error(got, want) < 3e-2
            assert (got.requires_grad, got.is_inference()) == (want.requires_grad, want.is_inference())
    assert {g.trains for g in amp.graphs} == {True, False}


def test_models_without_parameters_and_with_bf16_ones():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    assert relative_error(torch.compile(lambda a, b: a @ b, backend=amp)(x, w), x @ w) < 3e-2
    model = mlp(8, 8, 2).bfloat16()
    compiled, z = torch.compile(model, backend=amp), torch.randn(4, 8, dtype=torch.bfloat16)
    out = compiled(z)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, model(z))
    assert amp.graphs[1].variants["bf16"].casts == ()


def test_per_block_compile():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
    twin, x = copy.deepcopy(blocks), torch.randn(4, 8)
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    for block in blocks:
        block.compile(backend=amp)
    got, want = x, x
    for block, other in zip(blocks, twin, strict=True):
        got, want = block(got), other(want)
    pull(got), pull(want)
    a, b = everything(blocks, got), everything(twin, want)
    assert max(relative_error(a[k], b[k]) for k in b) < 5e-2
    # the first block's input needs no gradient, the others' do: at most two graphs for four equal layers
    assert len(amp.graphs) <= 2


def test_two_models_of_one_class_and_two_amps():
    one, two = Fn(lambda m, x: m.lin(x), lin=nn.Linear(8, 8)), Fn(lambda m, x: m.lin(x), lin=nn.Linear(8, 8))
    low, high = fxamp.Amp(precision="bf16", lower="aot_eager"), fxamp.Amp(precision="fp32", lower="aot_eager")
    x = torch.randn(4, 8)
    for model in (one, two):
        a, b = torch.compile(model, backend=low)(x), torch.compile(model, backend=high)(x)
        assert torch.equal(b, model(x))
        assert 0 < relative_error(a, b) < 3e-2
    assert {v.precision for v in low.report().variants} == {"bf16"}
    assert {v.precision for v in high.report().variants} == {"fp32"}


def test_outputs_may_stay_low():
    amp = fxamp.Amp(precision="bf16", output_dtype="low", lower="aot_eager")
    out = torch.compile(lambda a: (a @ a, a.exp()), backend=amp)(torch.rand(4, 4))
    assert [t.dtype for t in out] == [torch.bfloat16, torch.float32]


def test_ambient_autocast_is_left_to_pytorch_and_said_once():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    model, x = mlp(8, 8), torch.randn(2, 8)
    compiled = torch.compile(model, backend=amp)
    with pytest.warns(fxamp.FxampWarning, match="ambient autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(torch.randn(3, 8))  # another graph, no second warning
    assert len(amp.graphs) == 2
    assert "ambient autocast" in str(amp.report())
    assert amp.report().fast_paths == ()  # nobody knows what autocast made of it


def test_the_backward_is_never_autocast():
    # contract 5: torch's default would run the backward under the ambient autocast of the forward
    def forward(m, x):
        with torch.autocast("cpu", enabled=False):
            return x @ m.w

    model = Fn(forward, w=nn.Parameter(torch.randn(8, 8)))
    amp = fxamp.Amp(precision="bf16")
    x = torch.randn(4, 8)
    pull(torch.compile(model, backend=amp)(x))
    twin = copy.deepcopy(model)
    twin.w.grad = None
    pull(twin(x))
    assert isinstance(twin.w.grad, torch.Tensor)
    assert relative_error(model.w.grad, twin.w.grad) < 1e-6


def test_a_failure_inside_fxamp_is_typed_and_names_the_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxamp.plan._Planner._wanted", lambda *_: 1 / 0)
    with pytest.raises(Exception, match=r"ERROR\[StageFailed\]: planning \w+ \(.*linear.*\) failed: division by zero, at "):
        torch.compile(mlp(8, 8), backend=fxamp.Amp(precision="bf16"))(torch.randn(2, 8))


@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize("where", ["fxamp.plan._Planner._wanted", "fxamp.joint.casts._chain"])
def test_on_error_eager_compiles_the_untouched_graph(monkeypatch: pytest.MonkeyPatch, where: str, lower: str):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(where, broken)
    amp = fxamp.Amp(precision="bf16", on_error="eager", lower=lower)
    model, x = mlp(8, 8), torch.randn(2, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = torch.compile(model, backend=amp)(x)
    if lower == "eager" and "plan" not in where:
        assert amp.report().num_fallbacks == 0  # no joint passes, nothing to fail
        return
    assert relative_error(got, model(x)) < 1e-6
    assert amp.report().num_fallbacks == 1
    said = [str(w.message) for w in caught if isinstance(w.message, fxamp.FxampWarning)]
    assert len(said) == 1
    assert "compiled untouched" in said[0]
    assert "planted" in said[0]


def test_require_on_a_cpu_is_an_error():
    with pytest.raises(Exception, match=r"ERROR\[CudaGraphsUnavailable\]"):
        torch.compile(mlp(8, 8), backend=fxamp.Amp(cuda_graphs="require"))(torch.randn(2, 8))


def test_tf32_is_on_while_joint_graphs_are_rewritten(monkeypatch: pytest.MonkeyPatch):
    """Inductor's passes over them ask for it: padding that is timed with fp32 products never pays."""
    monkeypatch.setattr(formats, "native_support", lambda device, precision: (True, ""))
    seen: list[bool] = []
    note = lambda graph: seen.append(tf32.is_on("matmul"))  # noqa: E731  (Inductor wants something that it can hash)
    for precision in ("fp32", "tf32"):
        torch._dynamo.reset()
        with inductor_config.patch(joint_custom_post_pass=note, fx_graph_cache=False):
            torch.compile(nn.Linear(4, 4), backend=fxamp.Amp(precision=precision))(torch.randn(2, 4)).sum().backward()
        assert not tf32.is_on("matmul"), "the switch leaked"
    assert seen == [False, True]


def test_tf32_on_a_cpu_is_fp32_with_the_reason():
    amp = fxamp.Amp(precision="tf32", lower="aot_eager")
    model, x = mlp(8, 8), torch.randn(2, 8)
    assert torch.equal(torch.compile(model, backend=amp)(x), model(x))
    assert "tf32 asked for, fp32 used: CPUs have no tf32 products" in str(amp.report())


def test_nothing_of_the_user_is_kept_alive():
    amp = fxamp.Amp(precision="bf16", lower="aot_eager")
    model = mlp(8, 8)
    torch.compile(model, backend=amp)(torch.randn(2, 8)).sum().backward()
    weight = weakref.ref(model[0].weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


def test_graphs_survive_a_reset_of_dynamo():
    amp = fxamp.Amp(precision="bf16", lower="eager")
    assert "No graph was compiled yet" in str(amp.report())
    torch.compile(mlp(8, 8), backend=amp)(torch.randn(2, 8))
    torch._dynamo.reset()
    assert len(amp.graphs) == 1


def test_attach_takes_optimizers_and_changes_nothing_without_scaling():
    model = mlp(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = optimizer.state_dict()
    fxamp.Amp(precision="bf16").attach(optimizer)
    assert optimizer.state_dict() == before
    with pytest.raises(errors.InvalidOption, match=r"attach\(\) was given a Sequential"):
        fxamp.Amp(precision="bf16").attach(model)  # pyright: ignore[reportArgumentType]
