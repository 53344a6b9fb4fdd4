"""CLIP: an encoder of texts, in which a token attends to itself and to earlier tokens, and an encoder of images. The vectors of texts and
of images are in one space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_encoder
from compiler.frontend.cutting import CENTRE
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import EncoderLayer, Stem, attend, mlp, norm, project
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.frontend.towers import CLIP, read_tower
from compiler.frontend.vision import NO_TOKEN, Connector, Cutting, Tower, Vision
from compiler.ir.graph.atoms import Var

TEXT: Mapping[str, Any] = {
    "model_type": "clip_text_model",
    "vocab_size": 49_408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
# Fields that change no vector: sizes that the file also states elsewhere, and the initial value of a scale that only training uses.
UNREAD = ("projection_dim", "projection_size", "logit_scale_init_value")


def read(fields: Fields) -> ModelConfig:
    text = fields.fields("text_config", TEXT, _former(fields, "text_config_dict", TEXT))
    fields.fields("vision_config", CLIP, _former(fields, "vision_config_dict", CLIP))
    vision = read_whole(fields, Tower.CLIP, CLIP, Connector.CLASS, CENTRE)
    config = read_text(fields, text, fields.integer("projection_dim", 512), vision)
    assert config.encoder is not None
    return replace(config, encoder=replace(config.encoder, looks_back=True))


def _former(fields: Fields, name: str, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the object `name`, which only older files have, and `defaults` for the fields that this object lacks. Return {}
    if the object is missing or empty. The result overrides the fields of `text_config` or `vision_config`."""
    given = Fields(fields.raw(name, {}), f"{name} of {fields.where}").values
    return {**defaults, **given} if given else {}


def read_whole(fields: Fields, tower: Tower, defaults: Mapping[str, Any], connector: Connector, cutting: Cutting) -> Vision:
    """Return the configuration of an image encoder that gives one vector per crop. Its `merge` is the number of patches along an edge of a
    crop."""
    inner = fields.fields("vision_config", defaults)
    merge = max(1, inner.integer("image_size") // inner.integer("patch_size"))
    return read_tower(fields, tower, defaults, connector=connector, merge=merge, image_token=NO_TOKEN, cutting=cutting)


def read_text(fields: Fields, text: Fields, size: int, vision: Vision) -> ModelConfig:
    """Return the configuration of a model whose encoders of texts and images give vectors with `size` elements. `text` has the fields of
    the encoder of texts, and `vision` is the configuration of the encoder of images."""
    fields.skip(*UNREAD)
    text.skip(*UNREAD)
    config, embedding = read_encoder(text, position_offset=0, num_segments=0), EmbeddingConfig(Pooling.LAST, True, is_stated=True)
    return replace(config, family=fields.text("model_type"), vision=vision, embedding=replace(embedding, projected_size=size))


def embed(at: Stem) -> Var:
    c, name = at.config, f"{at.prefix}embeddings."
    assert c.encoder is not None
    x = at.net.embedding(f"{name}token_embedding", at.texts.tokens, c.vocab_size, c.hidden_size)
    return at.net.add(x, at.net.embedding(f"{name}position_embedding", at.texts.positions, c.encoder.num_positions, c.hidden_size))


def layer(at: EncoderLayer, x: Var) -> Var:
    h = norm(at, x, "layer_norm1")
    q, k, v = (project(at, h, f"self_attn.{part}_proj") for part in "qkv")
    x = at.net.add(x, attend(at, q, k, v, "self_attn.out_proj"))
    return at.net.add(x, mlp(at, norm(at, x, "layer_norm2"), "mlp.fc1", "mlp.fc2"))


def joined(at: Stem, x: Var) -> Var:
    """Project the vectors of texts to the space that they share with the vectors of images."""
    return at.net.linear(x, "text_projection", at.config.hidden_size, at.config.embedding.size_of(at.config.hidden_size))


FAMILY = EncoderFamily(
    ("clip",), read, layer, None, prefix="text_model.", embed=embed, layers="encoder.layers", last_norm="final_layer_norm", join=joined
)
