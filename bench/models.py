"""Models that need nothing but torch, in their standard architectures and with random weights.

Suffixes of tensors: B batch, T positions, C channels (width), H heads, D channels of a head, V vocabulary, X and Y
pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


# ---- MLP -------------------------------------------------------------------------------------------------------------
class MLP(nn.Module):
    """Linear layers of one width with a GELU behind each but the last."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x_BC: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x_BC = F.gelu(layer(x_BC))
        return last(x_BC)


# ---- transformers with layer norms and a GELU ------------------------------------------------------------------------
class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and beside a residual connection: GPT-2's block, and ViT's."""

    def __init__(self, width: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm_attention(x_BTC))
        return x_BTC + self.down(F.gelu(self.up(self.norm_mlp(x_BTC))))

    def attention(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            t_BTC.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t_BTC in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=self.is_causal)
        return self.out(out_BHTD.transpose(1, 2).flatten(2))


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """Size of a `TextModel`."""

    num_layers: int
    num_heads: int
    width: int
    num_positions: int
    num_tokens: int
    """Size of the vocabulary."""
    is_causal: bool = True
    """True as in GPT, False as in BERT."""


class TextModel(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]. The head shares the embedding's weight, as in GPT-2 and BERT."""

    def __init__(self, size: TextSize) -> None:
        super().__init__()
        self.embed_token = nn.Embedding(size.num_tokens, size.width)
        self.embed_position = nn.Embedding(size.num_positions, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads, size.is_causal) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.num_tokens, bias=False)
        self.head.weight = self.embed_token.weight
        nn.init.normal_(self.embed_token.weight, std=0.02)  # GPT-2's; the default, 1, makes tied logits far too large
        nn.init.normal_(self.embed_position.weight, std=0.02)

    def forward(self, input_BT: Tensor) -> Tensor:
        position_T = torch.arange(input_BT.shape[1], device=input_BT.device)
        x_BTC = self.embed_token(input_BT) + self.embed_position(position_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


# ---- Llama -----------------------------------------------------------------------------------------------------------
class LlamaLayer(nn.Module):
    """RMS norms, rotary positions, a gated MLP, no biases."""

    def __init__(self, width: int, num_heads: int, width_mlp: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, width_mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(width_mlp, width, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm_attention(x_BTC), cos_TD, sin_TD)
        y_BTC = self.norm_mlp(x_BTC)
        return x_BTC + self.down(F.silu(self.gate(y_BTC)) * self.up(y_BTC))

    def attention(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            project(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q_BHTD, k_BHTD = rotated(q_BHTD, cos_TD, sin_TD), rotated(k_BHTD, cos_TD, sin_TD)
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.out(out_BHTD.transpose(1, 2).flatten(2))


def rotated(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary position embedding."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD


class LlamaStack(nn.Module):
    """Llama's layers and final norm without embedding and head: hidden states [B, T, C] -> hidden states."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, width: int, num_heads: int, num_layers: int, num_positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(width, num_heads, width * 7 // 2) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        num_frequencies = width // num_heads // 2
        angle_TD = torch.outer(torch.arange(num_positions), 1e4 ** -(torch.arange(num_frequencies) / num_frequencies))
        self.register_buffer("cos_TD", angle_TD.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin_TD", angle_TD.sin().repeat(1, 2), persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        num_positions = x_BTC.shape[1]
        for layer in self.layers:
            x_BTC = layer(x_BTC, self.cos_TD[:num_positions], self.sin_TD[:num_positions])
        return self.norm(x_BTC)


# ---- vision ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ViTSize:
    """Size of a `ViT`; the defaults are ViT-B/16 on ImageNet."""

    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    num_pixels: int = 224
    num_patch_pixels: int = 16
    num_classes: int = 1000


class ViT(nn.Module):
    """Vision transformer: images [B, 3, Y, X] -> logits [B, V], read from a class token."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        num_patches = (size.num_pixels // size.num_patch_pixels) ** 2
        self.patches = nn.Conv2d(3, size.width, size.num_patch_pixels, size.num_patch_pixels)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.embed_position = nn.Parameter(torch.randn(1, num_patches + 1, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads, is_causal=False) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.num_classes)

    def forward(self, image_B3YX: Tensor) -> Tensor:
        x_BTC = self.patches(image_B3YX).flatten(2).transpose(1, 2)
        class_B1C = self.class_token.expand(len(x_BTC), -1, -1)
        x_BTC = torch.cat((class_B1C, x_BTC), dim=1) + self.embed_position
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC[:, 0]))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with the stride in the middle one (the "v1.5" that everybody trains)."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y_BCYX = F.relu(self.norm1(self.conv1(x_BCYX)))
        y_BCYX = F.relu(self.norm2(self.conv2(y_BCYX)))
        return F.relu(self.norm3(self.conv3(y_BCYX)) + self.shortcut(x_BCYX))


class ResNet(nn.Module):
    """Images [B, 3, Y, X] -> logits [B, V]. `ResNet((3, 4, 6, 3), 64, 1000)` is ResNet-50."""

    def __init__(self, num_blocks: tuple[int, ...], width: int, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        num_channels = width
        for stage, count in enumerate(num_blocks):
            for i in range(count):
                blocks.append(Bottleneck(num_channels, width << stage, stride=2 if stage > 0 and i == 0 else 1))
                num_channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(num_channels, num_classes)

    def forward(self, image_B3YX: Tensor) -> Tensor:
        x_BCYX = F.max_pool2d(F.relu(self.norm(self.conv(image_B3YX))), 3, stride=2, padding=1)
        return self.head(self.blocks(x_BCYX).mean((2, 3)))
