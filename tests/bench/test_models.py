from __future__ import annotations

import pytest
import torch

from bench.models import LlamaStack, ResNet, TextModel, TextSize, ViT, ViTSize, rotated

GPT2 = TextSize(num_layers=12, num_heads=12, width=768, num_positions=1024, num_tokens=50257)


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (lambda: ResNet((3, 4, 6, 3), width=64, num_classes=1000), 25_557_032),
        (lambda: ViT(ViTSize()), 86_567_656),
        (lambda: TextModel(GPT2), 124_439_808),
    ],
    ids=["ResNet-50", "ViT-B/16", "GPT-2"],
)
def test_has_as_many_parameters_as_published(make, published):
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize("is_causal", [True, False])
def test_only_a_causal_model_is_blind_to_what_follows(is_causal):
    model = TextModel(TextSize(num_layers=1, num_heads=2, width=8, num_positions=6, num_tokens=11, is_causal=is_causal))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, -1] = 7
    same_before = torch.equal(model(tokens)[0, :-1], model(changed)[0, :-1])
    assert same_before == is_causal


def test_llama_attends_by_distance():
    """A rotation by position leaves the product of query and key a function of their distance."""
    stack = LlamaStack(width=16, num_heads=2, num_layers=1, num_positions=8)
    query, key = torch.randn(8), torch.randn(8)
    q_TD, k_TD = (rotated(v.expand(8, 8), stack.cos_TD, stack.sin_TD) for v in (query, key))
    products = q_TD @ k_TD.T
    torch.testing.assert_close(products[5, 3], products[7, 5])
    assert not torch.isclose(products[5, 3], products[5, 4])


def test_vision_models_take_images():
    images = torch.randn(2, 3, 32, 32)
    size = ViTSize(num_layers=1, num_heads=2, width=8, num_pixels=32, num_patch_pixels=16, num_classes=5)
    assert ViT(size)(images).shape == (2, 5)
    assert ResNet((1, 1), width=4, num_classes=5)(images).shape == (2, 5)
