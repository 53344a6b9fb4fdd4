"""Falcon-H1: attention and Mamba-2 in parallel in each layer, then a gated MLP. Constant factors multiply the embeddings, the keys, the
logits, and inputs, outputs and intermediate results of attention, Mamba-2 and the MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import BranchFactors, ModelConfig, require_silu
from compiler.frontend.errors import ConfigError
from compiler.frontend.families import llama
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import MAMBA_FIELDS, has_tensor, inner_size, mamba_names, mamba_restored
from compiler.frontend.layers.decoder import Layer, activated, attention, norm, scaled
from compiler.frontend.layers.mamba import mamba
from compiler.frontend.recurrence import Recurrence, read_mamba
from compiler.ir.graph.atoms import Var
from compiler.ops.elementwise import MULTIPLY


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5)
    config = llama.read(fields)
    require_silu(fields, config)
    fields.require("as in all models of the family", mamba_use_mlp=True)
    fields.skip("num_logits_to_keep", "mlp_expansion_factor")
    return replace(
        config,
        attention_scale=config.attention_scale * fields.number("key_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        attending=frozenset(range(config.num_layers)),
        recurrence=_read_recurrence(fields, config),
        factors=_read_factors(fields),
    )


def _read_recurrence(fields: Fields, config: ModelConfig) -> Recurrence:
    expanded = fields.integer("mamba_expand", 2) * config.hidden_size
    # null stands for the size computed from mamba_expand, and an absent field for 1024
    inner_size = fields.integer("mamba_d_ssm", expanded if "mamba_d_ssm" in fields.values else 1024)
    gate, values, keys, queries, steps = fields.numbers("ssm_multipliers", 5) if "ssm_multipliers" in fields else (1.0,) * 5
    return replace(
        read_mamba(fields, range(config.num_layers), inner_size),
        output_bias=fields.flag("projectors_bias", False),
        has_norm=fields.flag("mamba_rms_norm", False),
        gated_behind_norm=fields.flag("mamba_norm_before_gate", True),
        factors=(gate, values, keys, queries, steps),
    )


def _read_factors(fields: Fields) -> BranchFactors:
    mlp_gate, mlp_out = fields.numbers("mlp_multipliers", 2) if "mlp_multipliers" in fields else (1.0, 1.0)
    return BranchFactors(
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        state_in=fields.number("ssm_in_multiplier", 1.0),
        state_out=fields.number("ssm_out_multiplier", 1.0),
        mlp_gate=mlp_gate,
        mlp_out=mlp_out,
    )


def layer(at: Layer, x: Var) -> Var:
    step, net, by = at.step, at.step.net, at.step.config.factors
    assert by is not None, step.config
    h = norm(at, x, "input_layernorm")
    mixed = scaled(step, mamba(at, scaled(step, h, by.state_in), "mamba"), by.state_out)
    attended = scaled(step, attention(at, scaled(step, h, by.attention_in)), by.attention_out)
    x = net.add(x, net.add(mixed, attended))
    return net.add(x, scaled(step, _feed(at, norm(at, x, "pre_ff_layernorm"), by), by.mlp_out))


def _feed(at: Layer, h: Var, by: BranchFactors) -> Var:
    net, c = at.step.net, at.step.config
    gate, up = (
        net.linear(h, at.name(f"feed_forward.{part}_proj"), c.hidden_size, c.intermediate_size, bias=c.mlp_bias) for part in ("gate", "up")
    )
    wide = net.call(MULTIPLY, activated(at, scaled(at.step, gate, by.mlp_gate)), up)
    return net.linear(wide, at.name("feed_forward.down_proj"), c.intermediate_size, c.hidden_size, bias=c.mlp_bias)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the size of Mamba-2, and whether it has a norm and biases. All factors keep the default 1, because converters multiply the
    weights by the model's factors. Raise ConfigError if the file has no `output.weight`."""
    if config["tie_word_embeddings"]:
        raise ConfigError("output.weight is missing: the embeddings are multiplied by another factor than the head, expected both")
    config["mamba_d_ssm"] = inner_size(metadata, 1)
    config["mamba_d_head"] = "auto"
    config["mamba_rms_norm"] = has_tensor("ssm_norm.weight", config, tensors)
    config["mamba_norm_before_gate"] = False
    config["mamba_conv_bias"] = has_tensor("ssm_conv1d.bias", config, tensors)
    config["mamba_proj_bias"] = has_tensor("ssm_in.bias", config, tensors)
    config["projectors_bias"] = has_tensor("ssm_out.bias", config, tensors)


GGUF = Gguf(
    "falcon-h1",
    MAMBA_FIELDS,
    {
        **mamba_names("mamba"),
        # Converters name this tensor `ffn_norm`, without `.weight` at the end.
        "ffn_norm": "pre_ff_layernorm.weight",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    biases={"attention_bias": "attn_output", "mlp_bias": "ffn_down"},
    restored=mamba_restored("mamba"),
    complete=complete,
)
FAMILY = DecoderFamily(("falcon_h1",), read, layer, last_norm="final_layernorm", gguf=GGUF)
