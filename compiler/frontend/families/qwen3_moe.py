"""Qwen3 with mixtures of experts; some layers may be dense."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import qwen3
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import head_norm_attention, pre_norm
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.mixture import ExpertNames, read_mixture

NAMES = ExpertNames()


def read(fields: Fields) -> ModelConfig:
    config = qwen3.read(fields)
    fields.require("as in all models", use_qk_norm=True, use_sliding_window=False)
    return replace(config, mixture=replace(read_mixture(fields, "num_experts", "moe_intermediate_size"), dense_layers=read_dense(fields)))


def read_dense(fields: Fields) -> frozenset[int]:
    """Return the dense layers: those in `mlp_only_layers`, and those whose number, counted from 1, is not a multiple of
    `decoder_sparse_step`. Raise ConfigError if `mlp_only_layers` is no list of integers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.raw("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise fields.error("mlp_only_layers", "a list of the numbers of layers")
    layers = range(fields.integer("num_hidden_layers", maximum=10_000))
    return frozenset(number for number in layers if (number + 1) % step or number in dense)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add two facts that converters omit: the weights of the chosen experts are normalised, and a layer without a router is dense."""
    config["norm_topk_prob"] = True
    count = config.get("num_hidden_layers")
    layers = range(count if type(count) is int else 0)
    config["mlp_only_layers"] = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" not in tensors]


layer = pre_norm(head_norm_attention, mixture(NAMES))
FAMILY = DecoderFamily(("qwen3_moe",), read, layer, gguf=Gguf("qwen3moe", complete=complete), experts=NAMES)
