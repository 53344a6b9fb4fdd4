"""Granite 4: Mamba-2 in most layers, attention in all other layers, with or without a rope. Every layer has an MLP. In models with experts,
the output of the experts is added to the output of the MLP."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_kinds, require_silu
from compiler.frontend.families import granite, granitemoe, llama
from compiler.frontend.families.granitemoe import EXPERTS, NAMES
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import MAMBA_FIELDS, has_tensor, inner_size, mamba_names, mamba_restored, read_attending
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
    fields.require(normalization_function="rmsnorm")
    if (position := fields.text("position_embedding_type", "nope")) not in ("nope", "rope"):
        raise fields.error("position_embedding_type", "nope or rope")
    require_silu(fields, config)
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
    """Return the layers with Mamba-2 and the sizes of Mamba-2, or None if no layer has Mamba-2. Raise ConfigError if no layer has
    attention."""
    kinds = read_kinds(fields, ["mamba"] * num_layers, KINDS)
    layers = [layer for layer, kind in enumerate(kinds) if kind in MAMBA]
    if len(layers) == num_layers:
        raise fields.error("layer_types", "at least one attention layer")
    found = read_mamba(fields, layers, fields.integer("mamba_expand", 2) * hidden_size)
    return found if layers else None


def _mix(at: Layer, h: Var) -> Var:
    return mamba(at, h, "mamba") if at.number in at.step.config.stateful else attention(at, h)


def _feed(at: Layer, h: Var) -> Var:
    names = ("shared_mlp.gate_proj", "shared_mlp.up_proj") if at.step.config.apart else ("shared_mlp.input_linear",)
    shared = gated_mlp(at, h, names, "shared_mlp.output_linear")
    return shared if at.step.config.mixture is None else at.step.net.add(EXPERTS(at, h), shared)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the kind of each layer, whether there is a rope, and the sizes and biases of Mamba-2."""
    config["position_embedding_type"] = "rope" if metadata.get("rope.scaling.finetuned", True) is True else "nope"
    if (attending := read_attending(config)) is not None:
        config["layer_types"] = ["attention" if attends else "mamba" for attends in attending]
    config.setdefault("num_local_experts", 0)
    config["mamba_d_head"] = "auto"
    config["mamba_expand"] = inner_size(metadata, config.get("hidden_size")) or 0
    config["mamba_conv_bias"] = has_tensor("ssm_conv1d.bias", config, tensors)
    config["mamba_proj_bias"] = has_tensor("ssm_in.bias", config, tensors)


def adapt(config: ModelConfig, tensors: Container[str]) -> ModelConfig:
    """Record that GGUF files store the gate and up projections of the MLP as separate tensors."""
    return replace(config, apart=True)


GGUF = Gguf(
    "granitehybrid",
    {**granitemoe.GGUF_FIELDS, **MAMBA_FIELDS, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    {
        **mamba_names("mamba"),
        # In models with experts, the names of the MLP end in _shexp.
        **{f"ffn_gate{end}": "shared_mlp.gate_proj" for end in ("", "_shexp")},
        **{f"ffn_up{end}": "shared_mlp.up_proj" for end in ("", "_shexp")},
        **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
    },
    biases=llama.GGUF.biases,
    pairs_interleaved=True,
    restored=mamba_restored("mamba"),
    complete=complete,
    adapt=adapt,
)
FAMILY = DecoderFamily(("granitemoehybrid",), read, pre_norm(_mix, _feed), gguf=GGUF, experts=NAMES)
