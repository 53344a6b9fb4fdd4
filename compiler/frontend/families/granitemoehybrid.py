"""Granite 4: Mamba-2 in most layers, attention in all other layers, with or without a rope. The feed-forward branch is an MLP, and may add
the output of experts."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import Activation, ModelConfig, read_kinds
from compiler.frontend.families import granite
from compiler.frontend.families.granitemoe import EXPERTS, NAMES
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, attention, gated_mlp, pre_norm
from compiler.frontend.layers.mamba import mamba
from compiler.frontend.mixture import Mixture, read_mixture
from compiler.frontend.recurrence import Recurrence, read_mamba
from compiler.ir.graph.atoms import Var

MAMBA = ("mamba", "linear_attention")  # the older and the newer name of a Mamba-2 layer
KINDS = (*MAMBA, "attention", "full_attention")


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2)
    config = granite.read(fields)
    if fields.text("normalization_function", "rmsnorm") != "rmsnorm":
        raise fields.error("normalization_function", "rmsnorm")
    if (position := fields.text("position_embedding_type", "nope")) not in ("nope", "rope"):
        raise fields.error("position_embedding_type", "nope or rope")
    if config.activation is not Activation.SILU:
        raise fields.error("hidden_act", "silu")
    fields.skip("init_method")
    return replace(
        config,
        rope=config.rope if position == "rope" else None,
        intermediate_size=fields.integer("shared_intermediate_size", 1024),  # the field intermediate_size is the size of an expert
        mixture=_read_mixture(fields),
        recurrence=_read_recurrence(fields, config.num_layers, config.hidden_size),
    )


def _read_mixture(fields: Fields) -> Mixture | None:
    if fields.integer("num_local_experts", minimum=0) == 0:
        fields.skip("num_experts_per_tok")
        return None
    return read_mixture(fields, "num_local_experts", "intermediate_size", normalized=True)


def _read_recurrence(fields: Fields, num_layers: int, hidden_size: int) -> Recurrence | None:
    kinds = read_kinds(fields, ["mamba"] * num_layers, KINDS)
    layers = [layer for layer, kind in enumerate(kinds) if kind in MAMBA]
    if len(layers) == num_layers:
        raise fields.error("layer_types", "at least one attention layer")
    found = read_mamba(fields, layers, fields.integer("mamba_expand", 2) * hidden_size)
    return found if layers else None


def layer(at: Layer, x: Var) -> Var:
    return pre_norm(at, x, _mix, _feed)


def _mix(at: Layer, h: Var) -> Var:
    return mamba(at, h, "mamba") if at.number in at.step.config.stateful else attention(at, h)


def _feed(at: Layer, h: Var) -> Var:
    shared = gated_mlp(at, h, ("shared_mlp.input_linear",), "shared_mlp.output_linear")
    return shared if at.step.config.mixture is None else at.step.net.add(EXPERTS(at, h), shared)


FAMILY = DecoderFamily(("granitemoehybrid",), read, layer, experts=NAMES)
