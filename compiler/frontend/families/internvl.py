"""InternVL 3 in the layout of transformers: the encoder InternViT, a connector that joins neighbouring patches and projects them by two
matrices, and the decoder of Qwen2, Qwen3 or Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation, text_fields
from compiler.frontend.cutting import GRID
from compiler.frontend.families import llama, qwen2, qwen3
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer
from compiler.frontend.towers import check_tokens, read_tower
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.graph.atoms import Var

DECODERS = {"qwen2": qwen2.read, "qwen3": qwen3.read, "llama": llama.read}
ENCODER: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
UNREAD = ("use_mean_pooling", "use_mask_token", "layer_scale_init_value", "projection_dropout", "dropout", "drop_path_rate", "shared")
IMAGE_TOKEN = "image_token_id"


def read(fields: Fields) -> ModelConfig:
    vision = _read_vision(fields)
    text = text_fields(fields, {"model_type": "qwen2"})
    if (decoder := DECODERS.get(text.text("model_type"))) is None:
        raise text.error("model_type", f"one of {', '.join(DECODERS)}")
    config = decoder(text)
    check_tokens(fields, vision, config.vocab_size, (IMAGE_TOKEN,))
    return replace(config, family="internvl", vision=vision, head_norms=text.text("model_type") == "qwen3")


def layer(at: Layer, x: Var) -> Var:
    return (qwen3 if at.step.config.head_norms else llama).layer(at, x)


def _read_vision(fields: Fields) -> Vision:
    inner = fields.fields("vision_config", ENCODER)
    inner.skip(*UNREAD)
    inner.values = {**inner.values, **{name: _edge(inner, name) for name in ("image_size", "patch_size")}}
    inner.require(use_qk_norm=False, use_absolute_position_embeddings=True, norm_type="layer_norm")
    ratio = fields.number("downsample_ratio", 0.5)
    if not (merge := round(1 / ratio)) or merge * ratio != 1:
        raise fields.error("downsample_ratio", "1 divided by an integer")
    fields.require(vision_feature_layer=-1, vision_feature_select_strategy="default")
    return read_tower(
        fields,
        Tower.INTERN,
        ENCODER,
        connector=Connector.PERCEPTRON,
        merge=merge,
        image_token=fields.integer(IMAGE_TOKEN, 151_667, minimum=0),
        cutting=GRID,
        last_norm=not inner.flag("use_mean_pooling", True),
        qkv_bias=inner.flag("attention_bias", False),
        connector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        connector_norm=True,
        around=("<img>", "</img>"),
    )


def _edge(fields: Fields, name: str) -> int:
    """Return the edge of a square. The field is a number, or a list of two numbers. Raise ConfigError if these differ or are not
    positive."""
    value = fields.raw(name)
    edge = value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value
    if type(edge) is not int or edge < 1:
        raise fields.error(name, "a positive number, or two equal ones")
    return edge


FAMILY = DecoderFamily(("internvl",), read, layer)
