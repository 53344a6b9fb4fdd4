"""Idefics3 and SmolVLM: a SigLIP encoder of images, a connector that joins neighbouring patches to one row, and the decoder of Llama."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, Vision, read_activation, text_fields
from compiler.frontend.cutting import DEFAULT_CUTTING
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

# fields of the decoder that say nothing about Llama: of other connectors, and of training
UNREAD = ("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler")


def read(fields: Fields) -> ModelConfig:
    model_type = fields.text("model_type")
    vision = _read_vision(fields)
    text = text_fields(fields, {"model_type": "llama", "rms_norm_eps": 1e-5})
    if text.text("model_type") != "llama":
        raise text.error("model_type", "llama")
    text.skip(*UNREAD)
    if text.flag("qk_layer_norms", False):
        raise text.error("qk_layer_norms", "false")
    config = llama.read(text)
    if vision.image_token >= config.vocab_size:
        raise fields.error("image_token_id", f"a token of the vocabulary, below {config.vocab_size}")
    return replace(config, family=model_type, vision=vision)


def _read_vision(fields: Fields) -> Vision:
    shuffle, image_token = fields.integer("scale_factor", 2), fields.integer("image_token_id", minimum=0)
    vision = fields.fields("vision_config")
    vision.skip("model_type", "max_image_size", "size", "tie_word_embeddings", "use_base_siglip")
    size, heads = vision.integer("hidden_size", 1152), vision.integer("num_attention_heads", 16)
    crop_size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 32)
    if size % heads:
        raise vision.error("num_attention_heads", f"a divisor of hidden_size ({size})")
    if crop_size % (patch_size * shuffle):
        raise vision.error("image_size", f"a multiple of patch_size ({patch_size}) and scale_factor ({shuffle}) together")
    if vision.integer("num_channels", 3) != 3:
        raise vision.error("num_channels", "3")
    return Vision(
        crop_size=crop_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=vision.integer("num_hidden_layers", 12, maximum=1000),
        num_heads=heads,
        activation=read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        shuffle=shuffle,
        image_token=image_token,
        cutting=DEFAULT_CUTTING,
    )


FAMILY = DecoderFamily(("idefics3", "smolvlm"), read, llama.layer)
