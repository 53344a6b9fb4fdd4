"""SigLIP, and SigLIP 2 for images of one size: an encoder of texts, all of which are padded to one length, and an encoder of images. The
vectors of texts and of images are in one space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.cutting import BICUBIC, STRETCHED
from compiler.frontend.families.clip import embed, layer, read_text, read_whole
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import Stem
from compiler.frontend.towers import SIGLIP
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.graph.atoms import Var

TEXT: Mapping[str, Any] = {
    "model_type": "siglip_text_model",
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def read(fields: Fields) -> ModelConfig:
    require_head(fields.fields("vision_config", SIGLIP))
    vision = read_whole(fields, Tower.SIGLIP, SIGLIP, Connector.PROBE, replace(STRETCHED, filter=BICUBIC))
    return read_padded(fields, TEXT, vision)


def require_head(inner: Fields) -> None:
    inner.require("because the head makes the vector of an image", vision_use_head=True)


def read_padded(fields: Fields, defaults: Mapping[str, Any], vision: Vision) -> ModelConfig:
    """Return the configuration of a model with the encoder of images `vision`, and with an encoder of texts that are padded to the length
    of its position table. `defaults` are the default fields of `text_config`. Raise ConfigError if the vectors of texts and images differ
    in size."""
    text = fields.fields("text_config", defaults)
    size = text.integer("projection_size", text.integer("hidden_size"))
    if size != vision.hidden_size:
        raise text.error("projection_size", f"{vision.hidden_size}, the hidden_size of vision_config")
    config = read_text(fields, text, size, vision)
    assert config.encoder is not None
    return replace(config, encoder=replace(config.encoder, is_padded=True))


def joined(at: Stem, x: Var) -> Var:
    """Project the vectors of texts to the space that they share with the vectors of images."""
    size = at.config.embedding.size_of(at.config.hidden_size)
    return at.net.linear(x, f"{at.prefix}head", at.config.hidden_size, size, bias=True)


FAMILY = EncoderFamily(
    ("siglip",), read, layer, None, prefix="text_model.", embed=embed, layers="encoder.layers", last_norm="final_layer_norm", join=joined
)
