"""What is computed: models, losses and data, the same for every system that is measured on them.

A workload for GPUs has its published size; its small twin of the same kind is for CPUs. Weights and data are random and
come from fixed seeds; the data has structure, so that a loss can fall and a system that does not train is found out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import MLP, LlamaStack, ResNet, TextModel, TextSize, ViT, ViTSize

NUM_BATCHES: Final = 4
"""Different batches that a run goes round. Few enough to be learnt in the few steps that losses are compared over."""

Batch = tuple[Tensor, Tensor]
Kind = Literal["train", "infer"]
Size = Literal["full", "small"]
SweepOver = Literal["batch size", "layers"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A workload on a device."""

    model: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    batches: tuple[Batch, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its loss and its data. `make` is called under the device and the seed that it is to use."""

    name: str
    about: str
    size: Size
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    criterion: Callable[[Tensor, Tensor], Tensor]
    num_items: int
    """Tokens, images or samples in a batch."""
    unit: Literal["tokens", "images", "samples"] = "tokens"
    kind: Kind = "train"
    num_micro_batches: int = 1
    """Batches whose gradients are accumulated in one step."""
    is_loss_in_graph: bool = True
    """Are model and loss compiled as one? False: the model alone, and its fp32 output leaves the graph."""
    is_channels_last: bool = False
    needs: str | None = None
    """A package that the model comes from."""
    learning_rate: float = 3e-4
    num_loss_steps: int = 20
    """First steps, over which losses are compared with fp32. They are the warm-up too."""
    is_extra: bool = False
    """Measured only when asked for by name."""
    sweep: tuple[SweepOver, int] | None = None
    """What is varied, and its value here, of a workload that is one of a row."""

    @property
    def num_items_per_step(self) -> int:
        return self.num_items * self.num_micro_batches

    def missing(self) -> str | None:
        """Why the workload cannot run here, or None."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return None

    def parts(self, device: str) -> Parts:
        """Model and data on a device; equal for equal devices, whoever asks."""
        with torch.device(device):
            torch.manual_seed(0)
            model = self.model()
            torch.manual_seed(1)
            batches = tuple(self.batch() for _ in range(NUM_BATCHES))
        if self.is_channels_last:
            # torch's stub knows the overloads of `to` without memory_format only.
            model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            batches = tuple((x.to(memory_format=torch.channels_last), y) for x, y in batches)
        return Parts(model=model.train(self.kind == "train"), criterion=self.criterion, batches=batches)


# ---- losses ----------------------------------------------------------------------------------------------------------
def token_loss(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


# ---- data ------------------------------------------------------------------------------------------------------------
def tokens(batch_size: int, num_positions: int, num_tokens: int) -> Callable[[], Batch]:
    """Walks through the vocabulary in random steps of 1 to 8: a model can learn to expect a token among the next
    eight."""

    def make() -> Batch:
        step_BT = torch.randint(1, 9, (batch_size, num_positions + 1))
        start_B1 = torch.randint(num_tokens, (batch_size, 1))
        walk_BT = (start_B1 + step_BT.cumsum(1)) % num_tokens
        return walk_BT[:, :-1].contiguous(), walk_BT[:, 1:].contiguous()

    return make


def images(batch_size: int, num_pixels: int, num_classes: int) -> Callable[[], Batch]:
    """Noise, tinted by the class."""

    def make() -> Batch:
        label_B = torch.randint(num_classes, (batch_size,))
        hue_B = label_B * (2 * torch.pi / num_classes)
        tint_B3 = torch.stack((hue_B.cos(), hue_B.sin(), (2 * hue_B).cos()), dim=1)
        return torch.randn(batch_size, 3, num_pixels, num_pixels) + tint_B3[:, :, None, None], label_B

    return make


def hidden_states(batch_size: int, num_positions: int, width: int) -> Callable[[], Batch]:
    """Noise, and as target the state one position before."""

    def make() -> Batch:
        x_BTC = torch.randn(batch_size, num_positions, width)
        return x_BTC, x_BTC.roll(1, dims=1)

    return make


def features(batch_size: int, width: int) -> Callable[[], Batch]:
    """Noise, and as target a smooth function of its neighbours."""

    def make() -> Batch:
        x_BC = torch.randn(batch_size, width)
        return x_BC, (x_BC + x_BC.roll(1, dims=1)).tanh()

    return make


# ---- models of transformers, which need not be installed where types are checked ------------------------------------
class _Output(nn.Module):
    """A model of transformers that takes one tensor and returns one."""

    def __init__(self, model: nn.Module, takes: str, returns: str, **settings: Any) -> None:
        super().__init__()
        self.model, self.takes, self.returns, self.settings = model, takes, returns, settings

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(**{self.takes: x}, **self.settings), self.returns)


SDPA: Final[Mapping[str, Any]] = MappingProxyType({"attn_implementation": "sdpa"})
"""For the configurations of transformers, which take it without declaring it."""


def gpt2() -> nn.Module:
    """GPT-2 of 124M parameters. Without dropout, whose random numbers would tell systems apart."""
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SDPA)
    return _Output(GPT2LMHeadModel(config), "input_ids", "logits", use_cache=False)


def bert() -> nn.Module:
    """BERT-base with its language-model head, without dropout."""
    from transformers import BertConfig, BertForMaskedLM  # pyright: ignore[reportMissingImports]

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SDPA)
    return _Output(BertForMaskedLM(config), "input_ids", "logits")


def llama(width: int, num_layers: int, num_positions: int = 2048) -> nn.Module:
    """Llama's layers and final norm, fed with hidden states: the embedding is there, small and unused."""
    from transformers import LlamaConfig, LlamaModel  # pyright: ignore[reportMissingImports]

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=num_positions,
        vocab_size=8,
        **SDPA,
    )
    model = LlamaModel(config)
    model.embed_tokens.weight.requires_grad_(False)  # unused: it would get no gradient
    return _Output(model, "inputs_embeds", "last_hidden_state", use_cache=False)


# ---- the list --------------------------------------------------------------------------------------------------------
def _launch_bound() -> list[Workload]:
    return [
        Workload(
            name="tiny-gpt",
            about="GPT, 4 layers of width 128, B8 T64",
            size="full",
            model=lambda: TextModel(TextSize(num_layers=4, num_heads=4, width=128, num_positions=64, num_tokens=256)),
            batch=tokens(8, 64, 256),
            criterion=token_loss,
            num_items=8 * 64,
            learning_rate=1e-3,
        ),
        Workload(
            name="mlp",
            about="MLP, 8 layers of width 256, B128",
            size="full",
            model=lambda: MLP(width=256, num_layers=8),
            batch=features(128, 256),
            criterion=F.mse_loss,
            num_items=128,
            unit="samples",
            learning_rate=1e-3,
        ),
    ]


def _gpt2() -> list[Workload]:
    base = Workload(
        name="gpt2",
        about="GPT-2 124M of transformers, B16 T1024",
        size="full",
        model=gpt2,
        batch=tokens(16, 1024, 50257),
        criterion=token_loss,
        num_items=16 * 1024,
        needs="transformers",
    )
    size = TextSize(num_layers=12, num_heads=12, width=768, num_positions=1024, num_tokens=50257)
    return [
        base,
        replace(
            base,
            name="gpt2-logits",
            about="the same, but only the model is compiled: fp32 logits leave the graph, as the loss is outside",
            is_loss_in_graph=False,
        ),
        replace(
            base,
            name="gpt2-accumulate",
            about="GPT-2 124M of transformers, 8 micro-batches of B4 T1024",
            batch=tokens(4, 1024, 50257),
            num_items=4 * 1024,
            num_micro_batches=8,
            num_loss_steps=10,
        ),
        replace(
            base,
            name="gpt2-causal",
            about="GPT of GPT-2's size written by hand, with is_causal=True for attention, B16 T1024",
            model=lambda: TextModel(size),
            needs=None,
            is_extra=True,
        ),
    ]


def _llama(width: int, num_layers: int, batch_size: int) -> Workload:
    return Workload(
        name=f"llama-{width}",
        about=f"{num_layers} Llama layers of hidden size {width}, 32 heads, B{batch_size} T2048",
        size="full",
        model=lambda: llama(width, num_layers),
        batch=hidden_states(batch_size, 2048, width),
        criterion=F.mse_loss,
        num_items=batch_size * 2048,
        needs="transformers",
        learning_rate=1e-4,
    )


def _llamas() -> list[Workload]:
    large = _llama(4096, num_layers=6, batch_size=4)
    return [
        large,
        _llama(2048, num_layers=6, batch_size=8),
        _llama(8192, num_layers=2, batch_size=2),
        replace(
            large,
            name="llama-4096-accumulate",
            about="6 Llama layers of hidden size 4096, 32 heads, 8 micro-batches of B1 T1024",
            model=lambda: llama(4096, num_layers=6, num_positions=1024),
            batch=hidden_states(1, 1024, 4096),
            num_items=1024,
            num_micro_batches=8,
            num_loss_steps=10,
            is_extra=True,
        ),
        replace(
            large,
            name="llama-4096-causal",
            about="6 Llama layers of hidden size 4096 written by hand, with is_causal=True for attention, B4 T2048",
            model=lambda: LlamaStack(width=4096, num_heads=32, num_layers=6, num_positions=2048),
            needs=None,
            is_extra=True,
        ),
        replace(
            large,
            name="decode-4096",
            about="decoding: 4 Llama layers of hidden size 4096, fp32 weights, 16 sequences, one token each, no_grad",
            kind="infer",
            model=lambda: llama(4096, num_layers=4),
            batch=hidden_states(16, 1, 4096),
            num_items=16,
        ),
    ]


def _encoders() -> list[Workload]:
    vit = Workload(
        name="vit-b16",
        about="ViT-B/16, B256",
        size="full",
        model=lambda: ViT(ViTSize()),
        batch=images(256, 224, 1000),
        criterion=F.cross_entropy,
        num_items=256,
        unit="images",
        learning_rate=1e-4,
    )
    return [
        Workload(
            name="bert-base",
            about="BERT-base of transformers with its language-model head, B32 T512",
            size="full",
            model=bert,
            batch=tokens(32, 512, 30522),
            criterion=token_loss,
            num_items=32 * 512,
            needs="transformers",
        ),
        vit,
        replace(
            vit, name="vit-infer", about="batch inference: ViT-B/16 with fp32 weights, B256, no_grad", kind="infer"
        ),
    ]


def _resnets() -> list[Workload]:
    base = Workload(
        name="resnet50",
        about="ResNet-50, B256, channels_last",
        size="full",
        model=lambda: ResNet((3, 4, 6, 3), width=64, num_classes=1000),
        batch=images(256, 224, 1000),
        criterion=F.cross_entropy,
        num_items=256,
        unit="images",
        is_channels_last=True,
        learning_rate=1e-3,
    )
    as_written = replace(
        base,
        name="resnet50-nchw",
        about="ResNet-50, B256, NCHW: model and images in the layout that PyTorch gives them",
        is_channels_last=False,
        is_extra=True,
    )
    return [base, as_written]


def _small() -> list[Workload]:
    """For CPUs, where compiling takes far longer than running: hence one or two layers."""
    gpt = Workload(
        name="gpt-small",
        about="GPT, 1 layer of width 128, B8 T64",
        size="small",
        model=lambda: TextModel(TextSize(num_layers=1, num_heads=4, width=128, num_positions=64, num_tokens=256)),
        batch=tokens(8, 64, 256),
        criterion=token_loss,
        num_items=8 * 64,
        learning_rate=1e-3,
        num_loss_steps=8,
    )
    bert_size = TextSize(num_layers=1, num_heads=4, width=128, num_positions=64, num_tokens=256, is_causal=False)
    vit_size = ViTSize(num_layers=1, num_heads=4, width=128, num_pixels=64, num_patch_pixels=16, num_classes=16)
    mlp = Workload(
        name="mlp-small",
        about="MLP, 3 layers of width 256, B128",
        size="small",
        model=lambda: MLP(width=256, num_layers=3),
        batch=features(128, 256),
        criterion=F.mse_loss,
        num_items=128,
        unit="samples",
        learning_rate=1e-3,
        num_loss_steps=8,
    )
    llama_small = Workload(
        name="llama-small",
        about="1 Llama layer of hidden size 256, 4 heads, B4 T64",
        size="small",
        model=lambda: LlamaStack(width=256, num_heads=4, num_layers=1, num_positions=64),
        batch=hidden_states(4, 64, 256),
        criterion=F.mse_loss,
        num_items=4 * 64,
        learning_rate=1e-3,
        num_loss_steps=8,
    )
    vit = replace(
        gpt,
        name="vit-small",
        about="ViT, 1 layer of width 128, 64x64 pixels, B8",
        model=lambda: ViT(vit_size),
        batch=images(8, 64, 16),
        criterion=F.cross_entropy,
        num_items=8,
        unit="images",
    )
    return [
        mlp,
        replace(
            mlp,
            name="mlp-infer-small",
            about="batch inference: MLP, 3 layers of width 1024 with fp32 weights, B64, no_grad",
            kind="infer",
            model=lambda: MLP(width=1024, num_layers=3),
            batch=features(64, 1024),
            num_items=64,
        ),
        gpt,
        replace(
            gpt,
            name="gpt-logits-small",
            about="the same, but only the model is compiled: fp32 logits leave the graph, as the loss is outside",
            is_loss_in_graph=False,
        ),
        replace(
            gpt,
            name="gpt-accumulate-small",
            about="GPT, 1 layer of width 128, 8 micro-batches of B2 T64",
            batch=tokens(2, 64, 256),
            num_items=2 * 64,
            num_micro_batches=8,
            num_loss_steps=6,
        ),
        replace(
            gpt, name="bert-small", about="BERT-like, 1 layer of width 128, B8 T64", model=lambda: TextModel(bert_size)
        ),
        llama_small,
        replace(
            llama_small,
            name="decode-small",
            about="decoding: 2 Llama layers of hidden size 512 with fp32 weights, 4 sequences, one token each, no_grad",
            kind="infer",
            model=lambda: LlamaStack(width=512, num_heads=4, num_layers=2, num_positions=64),
            batch=hidden_states(4, 1, 512),
            num_items=4,
        ),
        vit,
        replace(
            vit,
            name="resnet-small",
            about="ResNet of 2 bottlenecks, 32x32 pixels, B8, channels_last",
            model=lambda: ResNet((1, 1), width=16, num_classes=16),
            batch=images(8, 32, 16),
            is_channels_last=True,
        ),
    ]


def all_workloads() -> dict[str, Workload]:
    """Every workload by name but the sweeps, the most telling first."""
    tiny, mlp = _launch_bound()
    gpt2, *more_gpt2 = _gpt2()
    *llamas, decode = _llamas()
    resnet, *more_resnets = _resnets()
    full = [tiny, gpt2, resnet, llamas[0], decode, *more_gpt2, *_encoders(), *llamas[1:], *more_resnets, mlp]
    return {w.name: w for w in (*full, *_small())}


CROSSINGS: Final[Mapping[str, tuple[str, Mapping[SweepOver, int]]]] = MappingProxyType(
    {"cuda": ("tiny-gpt", {"layers": 4, "batch size": 8}), "cpu": ("gpt-small", {"layers": 1, "batch size": 8})}
)
"""Device -> (the workload that both sweeps go through, its values)."""


def sweeps(device_type: str) -> dict[str, Workload]:
    """A small GPT with more and fewer layers, and with larger and smaller batches. Both sweeps go through one that is a
    workload of its own, and comes first; then the extremes, for runs that end early."""
    name, at = CROSSINGS[device_type]
    crossing = all_workloads()[name]
    all_layers, all_batch_sizes = ((16, 1), (512, 64, 1)) if device_type == "cuda" else ((4, 2), (32, 2))

    def make(sweep: tuple[SweepOver, int], num_layers: int, batch_size: int) -> Workload:
        size = TextSize(num_layers=num_layers, num_heads=4, width=128, num_positions=64, num_tokens=256)
        return replace(
            crossing,
            name=f"gpt-{num_layers}-layers-batch-{batch_size}",
            about=f"GPT, {num_layers} {'layer' if num_layers == 1 else 'layers'} of width 128, B{batch_size} T64",
            model=lambda: TextModel(size),
            batch=tokens(batch_size, 64, 256),
            num_items=batch_size * 64,
            num_loss_steps=8,
            sweep=sweep,
        )

    over_layers = [make(("layers", n), n, at["batch size"]) for n in all_layers]
    over_batch_sizes = [make(("batch size", n), at["layers"], n) for n in all_batch_sizes]
    by_turns = [w for pair in zip_longest(over_layers, over_batch_sizes) for w in pair if w is not None]
    return {w.name: w for w in (crossing, *by_turns)}


def find(name: str) -> Workload:
    """A workload by its name, sweeps included."""
    return (all_workloads() | sweeps("cpu") | sweeps("cuda"))[name]


def default_names(device_type: str) -> Sequence[str]:
    """What is measured unless workloads are named."""
    size: Size = "full" if device_type == "cuda" else "small"
    return [w.name for w in all_workloads().values() if w.size == size and not w.is_extra]


QUICK: Final = ("mlp-small", "gpt-small", "decode-small")
"""One of each kind that a CPU compiles in seconds."""
