"""Llama 4 (Scout, Maverick): most layers have rotary positions and attend within chunks; all other layers attend to all earlier tokens,
without RoPE. Mixtures of experts, each with a shared expert, may alternate with plain MLPs. An image is placed on a canvas, which is cut
into crops of one size."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import (
    ModelConfig,
    QueryGrowth,
    read_decoder,
    read_kinds,
    rotating_neighbours,
    rotating_whole_heads,
    text_fields,
)
from compiler.frontend.cutting import CANVAS
from compiler.frontend.errors import ConfigError
from compiler.frontend.families.smollm3 import read_unrotated
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attend, gated_mlp, grow, pre_norm, project_qkv, rotate
from compiler.frontend.layers.mixture import experts
from compiler.frontend.mixture import ExpertNames, Mixture, Scoring, read_mixture
from compiler.frontend.towers import check_tokens, read_tower
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.graph.atoms import Var
from runtime.cache_groups import PAGE_SIZE

NAMES = ExpertNames(
    "feed_forward.router",
    "feed_forward.experts.*.gate_proj",
    "feed_forward.experts.*.up_proj",
    "feed_forward.experts.*.down_proj",
    shared="feed_forward.shared_expert",
    stacked=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    halves=True,
    inputs_first=True,
)
GATE_UP, DOWN = ("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj"
CHUNKED = "chunked_attention"
DEFAULTS = {
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}


ENCODER: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 7680,
}
ENCODER_NORM_EPS = 1e-5
IMAGE_TOKENS = ("image_token_index", "image_token_id")  # fields that may name the image token; the first takes precedence


def read(fields: Fields) -> ModelConfig:
    if fields.text("model_type") != "llama4":
        return _read_text(fields)
    vision = _read_vision(fields) if fields.raw("vision_config") else None
    config = _read_text(text_fields(fields, {"model_type": "llama4_text"}))
    if vision is not None:
        check_tokens(fields, vision, config.vocab_size, IMAGE_TOKENS)
    return replace(config, vision=vision)


def _read_vision(fields: Fields) -> Vision:
    inner = fields.fields("vision_config", ENCODER)
    inner.skip("vision_feature_layer", "vision_feature_select_strategy")  # all models have the values that transformers assumes
    inner.require_equal("norm_eps", ENCODER_NORM_EPS, "norms in transformers, which ignores the field")
    inner.require(multi_modal_projector_bias=False)
    if inner.text("hidden_act") != "gelu":
        raise inner.error("hidden_act", "gelu")
    ratio = inner.number("pixel_shuffle_ratio")
    if not (merge := round(1 / ratio)) or merge * ratio != 1:
        raise inner.error("pixel_shuffle_ratio", "1 divided by an integer")
    joined, size = inner.integer("hidden_size") * merge**2, inner.integer("projector_output_dim")
    inner.require_equal("intermediate_size", joined, "hidden_size of the joined patches, which the projector reads")
    for name in ("projector_input_dim", "vision_output_dim"):
        inner.require_equal(name, size, "projector_output_dim")
    return read_tower(
        fields,
        Tower.LLAMA4,
        ENCODER,
        rotates=True,
        norm_eps=ENCODER_NORM_EPS,
        connector=Connector.ADAPTER,
        connector_size=size,
        merge=merge,
        image_token=fields.integer(IMAGE_TOKENS[0], fields.integer(IMAGE_TOKENS[1], 200_092, minimum=0), minimum=0),
        cutting=CANVAS,
        marker="<|image|>",
        around=("<|image_start|>", "<|image_end|>"),
        is_optional=True,
    )


def _read_text(fields: Fields) -> ModelConfig:
    fields.fill(**DEFAULTS)
    fields.skip("for_llm_compressor")  # says how experts are stored, which the names of the tensors show
    dense_size = fields.integer("intermediate_size_mlp")
    config = read_decoder(fields, eps=1e-5, default_head_dim=128, intermediate_size=dense_size, bias="attention_bias")
    config = rotating_neighbours(rotating_whole_heads(config))
    unrotated = read_unrotated(fields, config.num_layers)
    return replace(
        config,
        head_norms=fields.flag("use_qk_norm", True),
        unrotated=unrotated,
        windows=_read_chunks(fields, config.num_layers, unrotated),
        chunked=True,
        query_growth=_read_growth(fields),
        mixture=_read_mixture(fields, config.num_layers),
    )


def _read_chunks(fields: Fields, num_layers: int, unrotated: frozenset[int]) -> tuple[int | None, ...]:
    """Return the chunk size of each layer with chunks, and None for the other layers. Raise ConfigError if the size is no multiple of
    PAGE_SIZE, or if it is null although `layer_types` has layers with chunks."""
    size = fields.integer("attention_chunk_size", None if "attention_chunk_size" in fields.values else 8192)
    if size is not None and size % PAGE_SIZE:
        raise fields.error("attention_chunk_size", f"a multiple of {PAGE_SIZE}, the tokens of a page of keys")
    rule = ["full_attention" if size is None or layer in unrotated else CHUNKED for layer in range(num_layers)]
    kinds = read_kinds(fields, rule, (CHUNKED, "full_attention"))
    if size is None and CHUNKED in kinds:
        raise fields.error("attention_chunk_size", f"a number of tokens, as layer_types has {CHUNKED}")
    return tuple(size if kind == CHUNKED else None for kind in kinds)


def _read_growth(fields: Fields) -> QueryGrowth | None:
    """Return how queries in layers without RoPE grow with their positions, or None if the flag `attn_temperature_tuning` is false. Some
    files have an integer in place of the flag; 0 stands for false. Raise ConfigError if the field is neither a flag nor an integer."""
    is_on = fields.raw("attn_temperature_tuning", True)
    if type(is_on) not in (bool, int):
        raise fields.error("attn_temperature_tuning", "true or false")
    growth = QueryGrowth(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), ahead=1)
    return growth if is_on else None


def _read_mixture(fields: Fields, num_layers: int) -> Mixture:
    """Return the mixture. The layers with experts are those in the field `moe_layers`, or else every `interleave_moe_layer_step`-th layer.
    Raise ConfigError if a token has more than one expert, or if `moe_layers` is no list of layers."""
    found = read_mixture(fields, "num_local_experts", "intermediate_size", normalized=False)
    if found.num_chosen != 1:
        raise fields.error("num_experts_per_tok", "1, as in all models of the family")
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.raw("moe_layers", list(range(step - 1, num_layers, step)))
    if not isinstance(sparse, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in sparse):
        raise fields.error("moe_layers", f"a list of layers from 0 to {num_layers - 1}")
    dense = frozenset(range(num_layers)) - frozenset(sparse)
    return replace(found, scoring=Scoring.SIGMOID, scales_inputs=True, shared_size=found.size, dense_layers=dense)


def _attention(at: Layer, h: Var) -> Var:
    """Attend. In layers with RoPE, queries and keys may get a norm without weights after the rotation. In other layers, queries may grow
    with their positions."""
    c, (q, k, v) = at.step.config, project_qkv(at, h)
    if at.number in c.unrotated:
        return attend(at, grow(at, q), k, v)
    q, k = rotate(at, q), rotate(at, k)
    if c.head_norms:
        q, k = (at.step.net.unit_norm(x, c.head_dim, c.norm_eps) for x in (q, k))
    return attend(at, q, k, v)


def _feed(at: Layer, h: Var) -> Var:
    found = at.step.config.mixture
    assert found is not None, at.step.config
    return gated_mlp(at, h, GATE_UP, DOWN) if at.number in found.dense_layers else experts(at, h, found, NAMES)


WITHOUT_NORMS = 128  # number of experts of Maverick, the model whose queries and keys have no norm


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add whether queries and keys have a norm. Files do not state this fact; llama.cpp derives it from the number of experts. Other fields
    that files do not state have their defaults in all published models. Raise ConfigError if the file says that no layer has chunks."""
    if metadata.get("attention.sliding_window") == 0:
        raise ConfigError("attention.sliding_window of a GGUF file of Llama 4 is 0, expected chunks; load the safetensors files instead")
    config["use_qk_norm"] = config.get("num_local_experts") != WITHOUT_NORMS


GGUF = Gguf(
    "llama4",
    {
        "expert_count": "num_local_experts",
        "feed_forward_length": "intermediate_size_mlp",
        "expert_feed_forward_length": "intermediate_size",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    {
        "ffn_gate": GATE_UP[0],
        "ffn_up": GATE_UP[1],
        "ffn_down": DOWN,
    },
    biases={"attention_bias": "attn_output"},
    complete=complete,
)
FAMILY = DecoderFamily(("llama4_text", "llama4"), read, pre_norm(_attention, _feed), experts=NAMES, gguf=GGUF)
