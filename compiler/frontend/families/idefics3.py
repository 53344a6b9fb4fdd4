"""Idefics3 and SmolVLM: a SigLIP encoder of images, a connector that joins neighbouring patches to one row, and the decoder of Llama."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.cutting import TILES
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.towers import SIGLIP, check_tokens, read_tower
from compiler.frontend.vision import Connector, Tower, Vision

# fields of the decoder that concern training or the connectors of other models
UNREAD = ("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler")
ENCODER = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
IMAGE_TOKEN = "image_token_id"


def read(fields: Fields) -> ModelConfig:
    model_type = fields.text("model_type")
    vision = _read_vision(fields)
    text = text_fields(fields, {"model_type": "llama", "rms_norm_eps": 1e-5})
    if text.text("model_type") != "llama":
        raise text.error("model_type", "llama")
    text.skip(*UNREAD)
    text.require(qk_layer_norms=False)
    config = llama.read(text)
    check_tokens(fields, vision, config.vocab_size, (IMAGE_TOKEN,))
    return replace(config, family=model_type, vision=vision)


def _read_vision(fields: Fields) -> Vision:
    merge = fields.integer("scale_factor", 2)
    image_token = fields.integer(IMAGE_TOKEN, minimum=0)
    vision = read_tower(fields, Tower.SIGLIP, ENCODER, connector=Connector.JOINED, merge=merge, image_token=image_token, cutting=TILES)
    if vision.crop_size % vision.patch_size:
        raise fields.fields("vision_config").error("image_size", f"a multiple of patch_size ({vision.patch_size})")
    return vision


FAMILY = DecoderFamily(("idefics3", "smolvlm"), read, llama.layer)
