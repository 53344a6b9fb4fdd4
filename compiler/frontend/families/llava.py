"""LLaVA 1.5, Pixtral, and other models in the same layout: an encoder of images (CLIP, SigLIP or Pixtral), two matrices that project each
patch, and the decoder of Llama, Mistral or Qwen2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation, text_fields
from compiler.frontend.cutting import BICUBIC, CAPPED, CENTRE, STRETCHED
from compiler.frontend.families import llama, mistral, qwen2
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.towers import CLIP, SIGLIP, check_tokens, read_pixtral, read_tower
from compiler.frontend.vision import Connector, Tower, Vision

DECODERS = {"llama": llama.read, "mistral": mistral.read, "qwen2": qwen2.read}
# Files omit fields that equal the defaults of transformers, which OF_DECODERS lists for each decoder.
# SIZES are the sizes of a Llama with 7 billion weights.
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
OF_DECODERS = {
    "llama": SIZES,
    "mistral": {**SIZES, "intermediate_size": 14_336, "num_key_value_heads": 8},
    "qwen2": {**SIZES, "vocab_size": 151_936, "intermediate_size": 22_016},
}
SIGLIP_CUTTING = replace(STRETCHED, filter=BICUBIC)
ENCODERS = {"clip_vision_model": (Tower.CLIP, CLIP, CENTRE), "siglip_vision_model": (Tower.SIGLIP, SIGLIP, SIGLIP_CUTTING)}
# The encoder of LLaVA 1.5, which transformers assumes for a model without vision_config.
OF_AUTHORS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
SELECTIONS = {Tower.CLIP: "default", Tower.SIGLIP: "full"}  # CLIP's class token is left out; SigLIP has none
IMAGE_TOKENS = ("image_token_index", "image_token_id")  # older and newer name of the field for the id of the image token


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields)
    kind = Fields(fields.raw("text_config", {}), "text_config").text("model_type", "llama")
    text = text_fields(fields, {"model_type": "llama", **OF_DECODERS.get(kind, {})})
    if (decoder := DECODERS.get(text.text("model_type"))) is None:
        raise text.error("model_type", f"one of {', '.join(DECODERS)}")
    config = decoder(text)
    check_tokens(fields, vision, config.vocab_size, IMAGE_TOKENS)
    return replace(config, family="llava", vision=vision)


def _read_vision(fields: Fields) -> Vision:
    """Return the configuration of the encoder, without the layers after `vision_feature_layer`. Raise ConfigError if the encoder is neither
    Pixtral nor one of ENCODERS, if `vision_feature_select_strategy` does not fit the encoder, or if the encoder has no such layer."""
    inner = fields.fields("vision_config", {"model_type": "clip_vision_model"} if "vision_config" in fields else OF_AUTHORS)
    if (kind := inner.text("model_type", "clip_vision_model")) == "pixtral":
        if fields.text("vision_feature_select_strategy", "full") != "full":
            raise fields.error("vision_feature_select_strategy", "'full' for pixtral")
        return read_pixtral(fields, merge=1, cutting=CAPPED, **_connector(fields))
    if (found := ENCODERS.get(kind)) is None:
        raise inner.error("model_type", f"one of {', '.join((*ENCODERS, 'pixtral'))}")
    tower, defaults, cutting = found
    inner.fill(**defaults)
    selection = fields.text("vision_feature_select_strategy", "default")
    if selection != SELECTIONS[tower]:
        raise fields.error("vision_feature_select_strategy", f"{SELECTIONS[tower]!r} for {tower}")
    num_layers, layer = inner.integer("num_hidden_layers", maximum=1000), fields.raw("vision_feature_layer", -2)
    if type(layer) is not int or not -num_layers <= layer <= num_layers or layer == 0:
        raise fields.error("vision_feature_layer", f"the number of a layer, 1 to {num_layers}, or from the end, -1 to -{num_layers}")
    return read_tower(
        fields,
        tower,
        defaults,
        num_left=num_layers - layer if layer > 0 else -1 - layer,
        connector=Connector.PERCEPTRON,
        merge=1,
        cutting=cutting,
        last_norm=False,
        **_connector(fields),
    )


def _connector(fields: Fields) -> dict[str, Any]:
    """Return the fields of Vision for the image token and the connector, by name."""
    return {
        "image_token": fields.integer(IMAGE_TOKENS[0], fields.integer(IMAGE_TOKENS[1], 32_000, minimum=0), minimum=0),
        "connector_activation": read_activation(fields, "projector_hidden_act", "gelu"),
        "connector_bias": fields.flag("multimodal_projector_bias", True),
    }


FAMILY = DecoderFamily(("llava",), read, llama.layer)
