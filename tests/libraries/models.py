"""Tiny random transformers models: class, configuration and training samples of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, CLASSES, WIDTH = 40, 8, 3, 16

Sample = dict[str, Tensor]


def text(generator: torch.Generator) -> Sample:
    """A sample for a decoder or a masked encoder: the loss covers every token."""
    tokens = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def text_to_text(generator: torch.Generator) -> Sample:
    return {name: torch.randint(4, VOCABULARY, (LENGTH,), generator=generator) for name in ("input_ids", "labels")}


def replaced_tokens(generator: torch.Generator) -> Sample:
    sample = text(generator)
    return sample | {"labels": torch.randint(2, (LENGTH,), generator=generator)}


def image(generator: torch.Generator) -> Sample:
    return {
        "pixel_values": torch.randn(3, 32, 32, generator=generator),
        "labels": torch.randint(CLASSES, (), generator=generator),
    }


def image_and_text(generator: torch.Generator) -> Sample:
    sample = text(generator)
    del sample["labels"]
    return sample | {"pixel_values": torch.randn(3, 32, 32, generator=generator)}


def spectrogram_to_text(generator: torch.Generator) -> Sample:
    labels = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_features": torch.randn(8, 16, generator=generator), "labels": labels}


def sound_to_text(generator: torch.Generator) -> Sample:
    labels = torch.randint(4, VOCABULARY, (4,), generator=generator)
    return {"input_values": torch.randn(400, generator=generator), "labels": labels}


@dataclass(frozen=True)
class Tiny:
    """A model with random weights.

    Arguments:
        cls: name of its class in transformers.
        sample: makes one sample of its data, without the batch's dimension.
        config: settings that differ from the configuration's defaults. Dropout keeps its default.
        options: further arguments of its `forward`.
        has_unused: whether its loss leaves some trainable parameters unused, which DDP has to know.
    """

    cls: str
    sample: Callable[[torch.Generator], Sample]
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    has_unused: bool = False

    def make(self, **options: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, self.cls)
        return cls(cls.config_class(**(self.config | options)))


_text = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_layers = _text | {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
_grouped = _layers | {"num_key_value_heads": 1, "head_dim": 8}
_patches = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
_vision = {name: _layers[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")} | {
    "num_attention_heads": 2,
    **_patches,
}
_pyramid = {"num_labels": CLASSES, "hidden_sizes": [8, 16, 24], "depths": [1, 2, 1]}
_sequences = _text | {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "decoder_start_token_id": 1,
}
_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

DECODERS = {
    "GPT-2": Tiny("GPT2LMHeadModel", text, _text | {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "Llama": Tiny("LlamaForCausalLM", text, _grouped),
    "Qwen3": Tiny("Qwen3ForCausalLM", text, _grouped | {"tie_word_embeddings": True}),
    "Mixtral": Tiny("MixtralForCausalLM", text, _grouped | {"num_local_experts": 4, "output_router_logits": True}),
    "Qwen2-MoE": Tiny("Qwen2MoeForCausalLM", text, _grouped | _experts | {"shared_expert_intermediate_size": 8}),
    "DeepSeek-V3": Tiny(
        "DeepseekV3ForCausalLM",
        text,
        _layers
        | {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 2}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    "Gemma 3": Tiny("Gemma3ForCausalLM", text, _grouped | {"sliding_window": 4}),
    "Phi": Tiny("PhiForCausalLM", text, _layers),
    "OPT": Tiny("OPTForCausalLM", text, _layers | {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": 8}),
    "BLOOM": Tiny("BloomForCausalLM", text, _text | {"hidden_size": WIDTH, "n_layer": 2, "n_head": 2}),
    "Falcon": Tiny("FalconForCausalLM", text, _layers),
    "GPT-NeoX": Tiny("GPTNeoXForCausalLM", text, _layers),
    "Mamba": Tiny("MambaForCausalLM", text, _layers | {"state_size": 4, "time_step_rank": 2}),
    "RWKV": Tiny("RwkvForCausalLM", text, _layers | {"attention_hidden_size": WIDTH, "rescale_every": 1}),
}
ENCODERS = {
    "BERT": Tiny("BertForMaskedLM", text, _layers),
    "RoBERTa": Tiny("RobertaForMaskedLM", text, _layers),
    "DistilBERT": Tiny(
        "DistilBertForMaskedLM", text, _text | {"dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 2, "n_heads": 2}
    ),
    "ELECTRA": Tiny("ElectraForPreTraining", replaced_tokens, _layers | {"embedding_size": 8}),
    "DeBERTa-v2": Tiny(
        "DebertaV2ForMaskedLM",
        text,
        _layers | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
    ),
    "ALBERT": Tiny("AlbertForMaskedLM", text, _layers | {"embedding_size": 8, "num_hidden_layers": 3}),
}
ENCODERS_AND_DECODERS = {
    "T5": Tiny(
        "T5ForConditionalGeneration",
        text_to_text,
        _text
        | {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0},
    ),
    "BART": Tiny("BartForConditionalGeneration", text_to_text, _sequences | {"max_position_embeddings": 16}),
    "Whisper": Tiny(
        "WhisperForConditionalGeneration",
        spectrogram_to_text,
        _sequences | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
    ),
}
VISION = {
    "ViT": Tiny("ViTForImageClassification", image, _vision),
    "DINOv2": Tiny("Dinov2ForImageClassification", image, _vision, has_unused=True),  # its mask token
    "ConvNeXt": Tiny("ConvNextForImageClassification", image, _pyramid | {"num_stages": 3, "patch_size": 4}),
    "ResNet": Tiny("ResNetForImageClassification", image, _pyramid | {"embedding_size": 8}),
    "Swin": Tiny(
        "SwinForImageClassification",
        image,
        {"image_size": 32, "patch_size": 2, "window_size": 2, "num_labels": CLASSES}
        | {"embed_dim": 8, "depths": [1, 2, 1], "num_heads": [1, 2, 4]},
    ),
    "SegFormer": Tiny(
        "SegformerForImageClassification",
        image,
        _pyramid
        | {"num_encoder_blocks": 3, "num_attention_heads": [1, 2, 2], "sr_ratios": [4, 2, 1]}
        | {"patch_sizes": [7, 3, 3], "strides": [4, 2, 2], "mlp_ratios": [2, 2, 2]},
    ),
    "CLIP": Tiny(
        "CLIPModel",
        image_and_text,
        {"text_config": _layers, "vision_config": _vision, "projection_dim": 8},
        options={"return_loss": True},
    ),
}
AUDIO = {
    "Wav2Vec2": Tiny(
        "Wav2Vec2ForCTC",
        sound_to_text,
        _layers
        | {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2}
        | {"ctc_zero_infinity": True, "layerdrop": 0.0},
        has_unused=True,  # the embedding of masked positions, when the mask is empty
    ),
}
MODELS = DECODERS | ENCODERS | ENCODERS_AND_DECODERS | VISION | AUDIO
