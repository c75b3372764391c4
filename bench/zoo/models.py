"""Architectures of `transformers`, tiny and with random weights: nothing is downloaded.

An `Entry` is data: the class of the model, what its configuration has beside the tiny default, and the kind of its inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Tensor]
Kind = Literal[
    "tokens", "causal", "token_pairs", "pixels", "image_and_text", "waveform", "spectrogram"
]  # fmt: skip
"""What a model reads. "causal": tokens, and labels, so that the loss is part of the model."""

NUM_TOKENS: Final = 16
NUM_IN_BATCH: Final = 2
VOCABULARY: Final = 96
IMAGE: Final = 32
"""Height and width, in pixels."""

_TINY: Final = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "image_size": IMAGE,
        "patch_size": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
)
_HEADS_OF_8: Final = MappingProxyType({"head_dim": 8})
_SEQ2SEQ: Final = MappingProxyType(
    {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
)  # fmt: skip
_T5: Final = MappingProxyType(
    {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
)
_SPEECH: Final = MappingProxyType(
    {
        "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    }
)  # fmt: skip
_STAGES: Final = MappingProxyType({"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_labels": 4})
_EXPERTS: Final = MappingProxyType(
    {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
)
_DETECTOR: Final = MappingProxyType(
    {"num_queries": 5, "num_labels": 4, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One architecture."""

    name: str
    model: str
    """The class in `transformers`."""
    inputs: Kind
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What differs from the tiny default."""
    tiny: bool = True
    """Does it start from the tiny default? Not so where one of its names means something else there."""


def _entry(name: str, model: str, inputs: Kind, *parts: Mapping[str, Any], tiny: bool = True, **config: Any) -> Entry:
    merged = {key: value for part in parts for key, value in part.items()}
    return Entry(name=name, model=model, inputs=inputs, config=MappingProxyType(merged | config), tiny=tiny)


ENTRIES: Final = (
    # ---- decoders
    _entry("gpt2", "GPT2LMHeadModel", "causal"),
    _entry("llama", "LlamaForCausalLM", "causal"),
    _entry("mistral", "MistralForCausalLM", "causal", _HEADS_OF_8, sliding_window=8),
    _entry("qwen2", "Qwen2ForCausalLM", "causal"),
    _entry("qwen3", "Qwen3ForCausalLM", "causal", _HEADS_OF_8),
    _entry("gemma", "GemmaForCausalLM", "causal", _HEADS_OF_8),
    _entry("gemma2", "Gemma2ForCausalLM", "causal", _HEADS_OF_8, sliding_window=8),
    _entry("gemma3", "Gemma3ForCausalLM", "causal", _HEADS_OF_8, sliding_window=8),
    _entry("phi", "PhiForCausalLM", "causal"),
    _entry("phi3", "Phi3ForCausalLM", "causal"),
    _entry("mixtral", "MixtralForCausalLM", "causal", _EXPERTS),
    _entry("qwen2-moe", "Qwen2MoeForCausalLM", "causal", _EXPERTS, shared_expert_intermediate_size=32),
    _entry("opt", "OPTForCausalLM", "causal", ffn_dim=64, word_embed_proj_dim=32),
    _entry("gpt-neox", "GPTNeoXForCausalLM", "causal"),
    _entry("gpt-neo", "GPTNeoForCausalLM", "causal", attention_types=[[["global", "local"], 1]], window_size=8, num_layers=2),
    _entry("gptj", "GPTJForCausalLM", "causal", rotary_dim=4),
    _entry("falcon", "FalconForCausalLM", "causal"),
    _entry("bloom", "BloomForCausalLM", "causal"),
    _entry("mpt", "MptForCausalLM", "causal", d_model=32, n_heads=4, n_layers=2, max_seq_len=64, expansion_ratio=2),
    _entry("olmo2", "Olmo2ForCausalLM", "causal"),
    _entry("stablelm", "StableLmForCausalLM", "causal"),
    _entry("starcoder2", "Starcoder2ForCausalLM", "causal"),
    _entry("cohere", "CohereForCausalLM", "causal"),
    _entry("granite", "GraniteForCausalLM", "causal"),
    _entry("mamba", "MambaForCausalLM", "causal", state_size=8),
    _entry("mamba2", "Mamba2ForCausalLM", "causal", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    _entry("rwkv", "RwkvForCausalLM", "causal", attention_hidden_size=32),
    # ---- encoders of text
    _entry("bert", "BertForMaskedLM", "tokens"),
    _entry("roberta", "RobertaForMaskedLM", "tokens"),
    _entry("distilbert", "DistilBertForMaskedLM", "tokens", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    _entry("deberta", "DebertaForMaskedLM", "tokens", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _entry("deberta-v2", "DebertaV2ForMaskedLM", "tokens", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _entry("albert", "AlbertForMaskedLM", "tokens", embedding_size=16),
    _entry("electra", "ElectraForMaskedLM", "tokens", embedding_size=16),
    _entry("mpnet", "MPNetForMaskedLM", "tokens"),
    _entry("modernbert", "ModernBertForMaskedLM", "tokens", local_attention=8, cls_token_id=1, sep_token_id=2),
    _entry("longformer", "LongformerForMaskedLM", "tokens", attention_window=8),
    _entry("big-bird", "BigBirdForMaskedLM", "tokens", attention_type="block_sparse", block_size=2, num_random_blocks=1),
    _entry("xlnet", "XLNetLMHeadModel", "tokens", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64,
           tiny=False),
    _entry("fnet", "FNetForMaskedLM", "tokens"),
    _entry("funnel", "FunnelForMaskedLM", "tokens", vocab_size=VOCABULARY, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8,
           d_inner=64, tiny=False),
    _entry("perceiver", "PerceiverForMaskedLM", "tokens", num_latents=8, d_latents=16, d_model=32, num_blocks=1,
           num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
           qk_channels=16, v_channels=16),
    # ---- encoders and decoders
    _entry("t5", "T5ForConditionalGeneration", "token_pairs", _T5),
    _entry("bart", "BartForConditionalGeneration", "token_pairs", _SEQ2SEQ),
    _entry("pegasus", "PegasusForConditionalGeneration", "token_pairs", _SEQ2SEQ),
    # ---- images
    _entry("vit", "ViTForImageClassification", "pixels"),
    _entry("deit", "DeiTForImageClassification", "pixels"),
    _entry("beit", "BeitForImageClassification", "pixels"),
    _entry("dinov2", "Dinov2ForImageClassification", "pixels"),
    _entry("swin", "SwinForImageClassification", "pixels", image_size=IMAGE, patch_size=4, embed_dim=8, depths=[1, 2],
           num_heads=[2, 4], window_size=4, tiny=False),
    _entry("convnext", "ConvNextForImageClassification", "pixels", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1],
           patch_size=4),
    _entry("resnet", "ResNetForImageClassification", "pixels", _STAGES, layer_type="basic"),
    _entry("regnet", "RegNetForImageClassification", "pixels", _STAGES, layer_type="x", groups_width=4,
           tiny=False),
    _entry("mobilenet-v2", "MobileNetV2ForImageClassification", "pixels", depth_multiplier=0.25, output_stride=8),
    _entry("efficientnet", "EfficientNetForImageClassification", "pixels", width_coefficient=0.25, depth_coefficient=0.25,
           hidden_dim=320),
    _entry("poolformer", "PoolFormerForImageClassification", "pixels", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
           tiny=False),
    _entry("segformer", "SegformerForSemanticSegmentation", "pixels", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
           hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
           decoder_hidden_size=16),
    _entry("detr", "DetrForObjectDetection", "pixels", _SEQ2SEQ, _DETECTOR),
    _entry("yolos", "YolosForObjectDetection", "pixels", image_size=[IMAGE, IMAGE], num_detection_tokens=5),
    # ---- speech
    _entry("whisper", "WhisperForConditionalGeneration", "spectrogram", _SEQ2SEQ, num_mel_bins=8, max_source_positions=16,
           max_target_positions=32),
    _entry("wav2vec2", "Wav2Vec2ForCTC", "waveform", _SPEECH),
    _entry("hubert", "HubertForCTC", "waveform", _SPEECH),
    # ---- images and text
    _entry("clip", "CLIPModel", "image_and_text", projection_dim=16, tiny=False),
    _entry("siglip", "SiglipModel", "image_and_text", tiny=False),
)  # fmt: skip
BY_NAME: Final[Mapping[str, Entry]] = MappingProxyType({entry.name: entry for entry in ENTRIES})


def missing() -> str | None:
    """Why the zoo cannot run here; None if it can."""
    return None if importlib.util.find_spec("transformers") else "transformers is not installed: pip install transformers"


def make(entry: Entry, seed: int) -> nn.Module:
    """The model in training mode, without anything random in it: no dropout, no skipped layers, no masked spans."""
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, entry.model)
    config = _config(model_class.config_class, entry)
    torch.manual_seed(seed)
    return model_class(config).train()


def _config(config_class: Any, entry: Entry) -> Any:
    known = dict(_TINY) if entry.tiny else {}
    if entry.name in ("clip", "siglip"):
        parts = {key: value for key, value in _TINY.items() if key not in ("use_cache",)}
        known |= {"text_config": parts | {"projection_size": 32}, "vision_config": parts}
    if entry.name == "detr":
        backbone = importlib.import_module("transformers").ResNetConfig
        known["backbone_config"] = backbone(**_STAGES, layer_type="basic", num_channels=3, out_features=["stage2"])
    config = config_class(**{**known, **entry.config})
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        _make_deterministic(part)
    return config


def _make_deterministic(config: Any) -> None:
    for name, value in vars(config).items() if config is not None else ():
        is_rate = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))
        if is_rate and ("drop" in name or name.startswith("mask_") and name.endswith("_prob")):
            setattr(config, name, 0.0)


def inputs(entry: Entry, seed: int) -> Inputs:
    """Random inputs, of the same shapes for every seed."""
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(3, VOCABULARY, (NUM_IN_BATCH, NUM_TOKENS), generator=generator)

    def floats(*shape: int) -> Tensor:
        return torch.randn(NUM_IN_BATCH, *shape, generator=generator)

    match entry.inputs:
        case "tokens":
            return {"input_ids": tokens(), "attention_mask": torch.ones(NUM_IN_BATCH, NUM_TOKENS, dtype=torch.long)}
        case "causal":
            return {"input_ids": (ids := tokens()), "labels": ids}
        case "token_pairs":
            return {"input_ids": tokens(), "labels": tokens()}
        case "pixels":
            return {"pixel_values": floats(3, IMAGE, IMAGE)}
        case "image_and_text":
            return {"input_ids": tokens(), "pixel_values": floats(3, IMAGE, IMAGE)}
        case "waveform":
            return {"input_values": floats(400)}
        case "spectrogram":
            return {"input_features": floats(8, 32), "labels": tokens()}
    raise AssertionError(entry.inputs)
