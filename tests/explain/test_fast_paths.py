"""The report of fast paths: each rule on one operation, whole models in a handful of rows, and the advice taken."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from bench.models import LlamaStack, ResNet, TextModel, TextSize
from fxamp import graph, rewrite
from fxamp.explain import fast_paths
from fxamp.explain.fast_paths import FastPath
from tests.programs import planned

ATTEND: Final[Any] = F.scaled_dot_product_attention


def found(fn: Any, *inputs: Tensor, lower: str = "inductor", **options: Any) -> tuple[FastPath, ...]:
    captured, plan = planned(fn, *inputs, **options)
    gm = graph.clone(captured.gm)
    for pass_ in rewrite.passes_for(captured, plan):
        pass_(gm)
    return fast_paths.find(captured, plan, gm, lower=lower)


def one(fn: Any, *inputs: Tensor, **options: Any) -> FastPath:
    (path,) = found(fn, *inputs, **options)
    assert path.where.startswith("test_fast_paths.py:")
    return path


def of(*shape: int) -> Tensor:
    return torch.randn(*shape)


# ---- matrix products ------------------------------------------------------------------------------------------------------
PRODUCTS: Any = (
    (F.linear, [(32, 64), (128, 64)], ""),
    (F.linear, [(4, 8, 64), (128, 64)], ""),
    (F.linear, [(33, 64), (128, 64)], ""),  # rows may be any number: nothing lies along them
    (F.linear, [(32, 64), (257, 64)], "n = 257, no multiple of 8"),
    (F.linear, [(32, 50), (257, 50)], "n = 257 and k = 50, no multiple of 8"),
    (F.linear, [(2, 64), (128, 64)], "m = 2, where matrix units have tiles of 16"),
    (lambda a, b: torch.addmm(b[:1], a, b), [(32, 64), (64, 100)], "n = 100, no multiple of 8"),
    (torch.bmm, [(3, 32, 64), (3, 64, 16)], ""),
    (lambda a, b: a.mT @ b, [(64, 36), (64, 32)], "m = 36, no multiple of 8"),
    (lambda a, b: a.bfloat16()[:, :64] @ b.bfloat16(), [(32, 68), (64, 32)], "rows of a factor are 68 numbers apart"),
    (lambda a, b: a[:, :64] @ b, [(32, 68), (64, 32)], ""),  # its cast lays it out anew
    (lambda a, b: a @ b, [(32, 64), (64,)], "n = 1, where matrix units have tiles of 16"),
    (lambda a, b: torch.einsum("bij,kj->bik", a, b), [(4, 32, 64), (20, 64)], "n = 20, no multiple of 8"),
    (lambda a, b: torch.einsum("bij,kj->bik", a, b), [(4, 32, 64), (24, 64)], ""),
)  # fmt: skip


def of_each(cases: Any) -> tuple[FastPath, ...]:
    """The verdicts on all cases (function, shapes of its inputs, ..) of a table, in one graph."""
    inputs = [of(*shape) for _, shapes, *_ in cases for shape in shapes]

    def together(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        return [fn(*(next(rest) for _ in shapes)) for fn, shapes, *_ in cases]

    paths = found(together, *inputs)
    assert len(paths) == len(cases)
    return paths


def test_products():
    for path, (_, _, why) in zip(of_each(PRODUCTS), PRODUCTS, strict=True):
        assert (path.kind, path.computes) == ("matrix product", "bf16")
        assert path.is_taken == (not why), path
        assert path.why.startswith(why)
        assert bool(path.advice) == bool(why)


def test_an_advised_size_is_taken():
    path = one(lambda x, w: F.linear(x, w), of(32, 64), of(257, 64))
    assert "n = 264" in path.advice
    assert one(lambda x, w: F.linear(x, w), of(32, 64), of(264, 64)).is_taken


def test_products_in_fp32():
    kept = one(lambda x, w: F.linear(x, w), of(32, 64), of(64, 64), policy={"op:linear": "fp32"})
    assert not kept.is_taken
    assert "computes in fp32" in kept.why
    assert "op:linear" in kept.why  # the rule that says so
    assert kept.advice == "nothing, if the rule is meant"
    all_of_it = one(lambda x, w: F.linear(x, w), of(32, 64), of(64, 64), variant="fp32")
    assert "precision='fp32'" in all_of_it.why
    assert all_of_it.advice == "a lower precision, or precision='tf32'"
    wide = one(lambda x, w: F.linear(x, w), of(32, 64).double(), of(64, 64).double())
    assert "computes in f64" in wide.why
    tf32 = one(lambda x, w: F.linear(x, w), of(32, 64), of(64, 64), variant="tf32")
    assert (tf32.is_taken, tf32.computes) == (True, "tf32")
    assert one(lambda x, w: F.linear(x, w), of(32, 68), of(64, 68), variant="tf32").is_taken  # 4 numbers of 4 bytes
    assert not one(lambda x, w: F.linear(x, w), of(32, 68), of(64, 68)).is_taken


@contextlib.contextmanager
def switched(operation: str, value: str) -> Generator[None]:
    """One of PyTorch's switches for fp32 on CUDA."""
    before = torch._C._get_fp32_precision_getter("cuda", operation)
    torch._C._set_fp32_precision_setter("cuda", operation, value)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter("cuda", operation, before)


@pytest.mark.parametrize(("operation", "op"), [("matmul", "linear"), ("conv", "conv2d")])
def test_what_is_kept_in_fp32_is_left_to_the_switch_of_the_process(operation: str, op: str):
    """It computes as it would without fxamp, and the report says what that is."""
    image, weight = (of(*shape).to(memory_format=torch.channels_last) for shape in ((2, 32, 8, 8), (64, 32, 3, 3)))
    inputs = (of(32, 64), of(64, 64)) if op == "linear" else (image, weight)

    def verdict() -> FastPath:
        fn = F.linear if op == "linear" else F.conv2d
        return one(lambda x, w: fn(x, w), *inputs, policy={f"op:{op}": "fp32"})

    with switched(operation, "ieee"):
        assert (verdict().is_taken, verdict().computes) == (False, "fp32")
    with switched(operation, "tf32"):
        assert (verdict().is_taken, verdict().computes) == (True, "tf32")
        assert verdict().why.startswith("by torch.backends.")


# ---- convolutions -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("image", "weight", "options", "lower", "why"),
    [
        ((2, 32, 8, 8), (128, 32, 3, 3), {}, "inductor", "images in NCHW, which Inductor makes channels_last"),
        ((2, 32, 8, 8), (128, 32, 3, 3), {}, "aot_eager", "images in NCHW, and lower='aot_eager'"),
        ((2, 32, 8, 8), (64, 32, 3, 3), {}, "inductor", "images in NCHW, and Inductor converts no layouts where all"),
        ((2, 256, 8, 8), (128, 256, 3, 3), {}, "inductor", "images in NCHW, and Inductor converts no layouts where a conv"),
        ((2, 256, 8, 8), (128, 128, 3, 3), {"groups": 2}, "inductor", "images in NCHW, and Inductor converts no layouts"),
        ((2, 3, 8, 8), (128, 3, 3, 3), {}, "inductor", "3 input channels, no multiple of 8"),
        ((2, 32, 8, 8), (32, 1, 3, 3), {"groups": 32}, "inductor", "it is depthwise"),
    ],
)
def test_convolutions(image: Any, weight: Any, options: dict[str, Any], lower: str, why: str):
    path = one(lambda x, w: F.conv2d(x, w, **options), of(*image), of(*weight).requires_grad_(), lower=lower)
    assert path.why.startswith(why)
    assert path.is_taken == ("which Inductor makes" in why)


def test_convolutions_in_channels_last():
    image, weight = (of(*shape).to(memory_format=torch.channels_last) for shape in ((2, 32, 8, 8), (64, 32, 3, 3)))
    path = one(lambda x, w: F.conv2d(x, w), image, weight, lower="aot_eager")
    assert (path.is_taken, path.why) == (True, "")
    volume, weight3d = of(2, 32, 4, 4, 4), of(64, 32, 1, 1, 1)
    assert one(lambda x, w: F.conv3d(x, w), volume, weight3d, lower="eager").why.startswith("images in NCDHW")


def test_inductor_decides_on_layouts_as_the_report_says():
    """The rules are Inductor's own: asked about the same convolutions, it says the same."""
    from torch._inductor.graph import GraphLowering

    def lays_out(shapes: list[tuple[int, ...]]) -> bool:
        weights = [of(*shape) for shape in shapes]
        traced = torch.fx.Graph()
        image = traced.placeholder("image")
        for i, weight in enumerate(weights):
            node = traced.placeholder(f"weight_{i}")
            node.meta["val"] = torch.empty_like(weight, device="meta")
            image.meta["val"] = torch.empty(2, weight.shape[1], 8, 8, device="meta")
            traced.call_function(torch.ops.aten.convolution.default, (image, node, None, (1,), (0,), (1,), False, (0,), 1))
        return GraphLowering.decide_layout_opt(torch.fx.GraphModule({}, traced), is_inference=False)

    mixed = [(64, 64, 3, 3), (128, 64, 1, 1)]
    for shapes in ([(128, 32, 3, 3)], [(64, 32, 3, 3)], [(128, 256, 3, 3)], [(128, 256, 1, 1)], mixed):

        def convolve(*operands: Tensor) -> list[Tensor]:
            return [F.conv2d(of(2, w.shape[1], 8, 8), w) for w in operands]

        paths = found(convolve, *(of(*shape).requires_grad_() for shape in shapes))
        assert {p.is_taken for p in paths} == {lays_out(shapes)}, shapes


# ---- attention --------------------------------------------------------------------------------------------------------------
SQUARE: Final = [(2, 4, 32, 16)] * 3
ATTENTIONS: Any = (
    (ATTEND, SQUARE, "", ""),
    (lambda *x: ATTEND(*x, is_causal=True), SQUARE, "", ""),
    (lambda *x: ATTEND(*x, dropout_p=0.1), SQUARE, "but not cuDNN's, which drops multiples of 1/16", ""),
    (lambda *x: ATTEND(*x, dropout_p=0.125), SQUARE, "", ""),
    (ATTEND, [(4, 32, 16)] * 3, "the fused kernels want [batch, heads", "unsqueeze"),
    (ATTEND, [(2, 4, 32, 512)] * 3, "heads of 512 and 512 numbers", "another size"),
    (ATTEND, [(2, 4, 32, 16), (2, 4, 32, 16), (2, 4, 32, 8)], "heads of 16 and 8 numbers", "another size"),
    (ATTEND, [(2, 4, 32, 16), (2, 1, 32, 16), (2, 1, 32, 16)], "queries, keys and values have [4, 1, 1] heads", "gqa"),
    (lambda *x: ATTEND(*x, enable_gqa=True), [(2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16)], "", ""),
    (lambda *x: ATTEND(*x, is_causal=True), [(2, 4, 32, 16), (2, 4, 24, 16), (2, 4, 24, 16)], "is_causal=True with 32", ""),
    (lambda *x: ATTEND(*x, torch.ones(32, 32, dtype=torch.bool).tril()), SQUARE, "an explicit mask, causal",
     "relaxed='attention_masks'"),
    (lambda *x: ATTEND(*x, torch.ones(32, 32, dtype=torch.bool).tril().triu(-2)), SQUARE,
     "an explicit mask (the mask is neither causal nor empty", "flex_attention"),
)  # fmt: skip


def test_attention():
    for path, (_, _, why, advice) in zip(of_each(ATTENTIONS), ATTENTIONS, strict=True):
        assert path.op == "scaled_dot_product_attention"
        assert path.why.startswith(why), path
        assert advice in path.advice
        assert path.is_taken == (not why or why.startswith("but not"))


def test_attention_in_fp32():
    path = one(lambda q, k, v: ATTEND(q, k, v), *[of(2, 4, 32, 16)] * 3, policy={"op:scaled_dot_product_attention": "fp32"})
    assert "computes in fp32" in path.why


# ---- whole models -----------------------------------------------------------------------------------------------------------
def report_of(model: nn.Module, *inputs: Tensor, **options: Any) -> fxamp.backend.Report:
    amp = fxamp.Amp(**{"precision": "bf16", "lower": "eager", **options})
    torch.compile(model, backend=amp)(*inputs)
    return amp.report()


def rows(text: str) -> list[str]:
    """First cells of the rows of the table of fast paths."""
    table = text[text.index("fast paths, as they would be on CUDA (this ran on cpu)") :]
    table = table[: table.index("└")]
    return [cells[1].strip() for line in table.splitlines() if len(cells := line.split("│")) > 4 and cells[1].strip()]


def test_a_gpt():
    size = TextSize(num_layers=3, num_heads=2, width=32, num_positions=32, num_tokens=257)
    report = report_of(TextModel(size), torch.randint(257, (2, 32)))
    assert len(report.fast_paths) == 3 * 5 + 1
    missed = [p for p in report.fast_paths if not p.is_taken]
    assert [(p.op, p.why) for p in missed] == [("linear", "n = 257, no multiple of 8")]
    assert "self.head(self.norm" in missed[0].code
    assert rows(str(report)) == ["linear in bf16", "linear in bf16", "scaled_dot_product_attention", "in bf16"]


def test_a_llama_of_the_library():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=224, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=256, attn_implementation="sdpa",
    )  # fmt: skip
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(256, (2, 32))

    def logits(x: Tensor) -> Tensor:
        return model(x, use_cache=False).logits

    for relaxed, num_missed in (((), 2), (("attention_masks",), 0)):
        torch._dynamo.reset()
        amp = fxamp.Amp(precision="bf16", lower="eager", relaxed=relaxed)
        torch.compile(logits, backend=amp)(tokens)
        missed = [p for p in amp.report().fast_paths if not p.is_taken]
        assert [p.advice for p in missed] == ["relaxed='attention_masks' replaces it"] * num_missed


def test_a_llama_by_hand_misses_nothing():
    report = report_of(LlamaStack(width=64, num_heads=2, num_layers=2, num_positions=32), of(2, 32, 64))
    assert len(report.fast_paths) == 2 * 8
    assert all(p.is_taken and not p.why for p in report.fast_paths)


def test_a_resnet():
    model, images = ResNet((1, 1), width=16, num_classes=16), of(16, 3, 32, 32)
    written = [p for p in report_of(model, images).fast_paths if p.kind == "convolution"]
    assert "3 input channels" in written[0].why
    assert all("images in NCHW" in p.why for p in written[1:])
    turned = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    paths = report_of(turned, images.to(memory_format=torch.channels_last)).fast_paths
    assert [p.why for p in paths if p.kind == "convolution"][1:] == [""] * (len(written) - 1)


def test_inside_of_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    linear = nn.Linear(64, 100)
    (path,) = report_of(linear, of(32, 64)).fast_paths

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(linear, x, use_reentrant=False)

    torch._dynamo.reset()
    (inside,) = report_of(Model(), of(32, 64).requires_grad_()).fast_paths
    assert (inside.why, inside.sizes) == (path.why, path.sizes)


def test_dynamic_sizes_add_no_guard():
    """Asking changes nothing: the second length is no new graph."""

    def program(x: Tensor, w: Tensor, image: Tensor, kernel: Tensor) -> list[Tensor]:
        q = F.linear(x, w).unflatten(-1, (4, 16)).transpose(1, 2)
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return [ATTEND(q, q, q, mask), q @ q.mT, F.conv2d(image, kernel)]

    amp = fxamp.Amp(precision="bf16", lower="eager")
    compiled = torch.compile(program, backend=amp, dynamic=True)
    for n in (36, 40):
        compiled(of(2, n, 64), of(64, 64), of(2, 32, n, n), of(128, 32, 3, 3))
        paths = amp.report().fast_paths
        assert len(amp.graphs) == 1
        assert [p.kind for p in paths] == ["matrix product", "attention", "matrix product", "convolution"]
        assert "symbolic" in paths[1].why
        assert "images in NCHW" in paths[3].why


# ---- what Inductor does about layouts ---------------------------------------------------------------------------------------
class Images(nn.Module):
    """Convolutions that Inductor's rules let it lay out anew, and an image as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 128, 3, padding=1), nn.Conv2d(128, 96, 3, padding=1)
        self.norm = nn.BatchNorm2d(128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


def layouts_of(code: str) -> list[str]:
    """The strides of the results of convolutions in Inductor's code: "channels_last", or as they are."""
    results = re.findall(r"(\w+) = extern_kernels\.convolution\(", code)
    found = [re.search(rf"assert_size_stride\({name}, \(([^)]*)\), \(([^)]*)\)", code) for name in results]
    strides = [[int(s) for s in match[2].split(",") if s.strip()] for match in found if match]
    assert len(strides) == len(results)
    return ["channels_last" if s[1] == 1 else str(s) for s in strides]


@pytest.mark.slow
def test_inductor_lays_out_what_was_cast():
    """No pass of fxamp's is needed: with its casts in the graph, Inductor makes images in NCHW channels_last, and what leaves
    the graph has the strides of the program."""
    from torch._inductor.utils import run_and_get_code

    model, image = Images(), of(2, 32, 16, 16)
    compiled = torch.compile(model, backend=fxamp.Amp(precision="bf16"))
    out, (forward, *_) = run_and_get_code(compiled, image)
    assert layouts_of(forward) == ["channels_last", "channels_last"]
    assert out.stride() == model(image).stride()
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.is_contiguous() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layouts_on_a_gpu():
    """Images in NCHW: cuDNN converts no layout, for Inductor handed it channels_last already."""
    from torch._inductor.utils import run_and_get_code

    model, image = Images().cuda(), of(16, 32, 64, 64).cuda()
    amp = fxamp.Amp(precision="bf16")
    compiled = torch.compile(model, backend=amp)
    out, (forward, *_) = run_and_get_code(compiled, image)
    assert layouts_of(forward) == ["channels_last", "channels_last"]
    assert out.stride() == model(image).stride()
    assert all(p.is_taken and "channels_last" in p.why for p in amp.report().fast_paths)

    def step() -> None:
        compiled(image).square().mean().backward()

    profile = amp.profile(step)
    print(profile)
    converting = [k for k in profile.kernels if "nchwtonhwc" in k.name.lower() or "nhwctonchw" in k.name.lower()]
    assert sum(profile.share(k) for k in converting) < 0.05
