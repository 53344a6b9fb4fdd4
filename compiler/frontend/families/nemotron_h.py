"""Nemotron-H and Nemotron 3: each layer is one of these: Mamba-2, attention without a rope, an MLP, or experts with a shared expert.

transformers imposes a lower bound (`time_step_min`) on Mamba-2's step sizes when it computes a prompt, but not when it generates. The
models were trained without this bound, so it is not applied here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation, read_decoder
from compiler.frontend.families import glm4_moe
from compiler.frontend.families.glm4_moe import read_shared_mixture
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import are_integers, has_tensor, inner_size, mamba_names, mamba_restored, read_attending
from compiler.frontend.layers.decoder import Layer, attend, mlp, norm, project_qkv, residual
from compiler.frontend.layers.mamba import mamba
from compiler.frontend.layers.mixture import experts
from compiler.frontend.mixture import ExpertNames, Mixture
from compiler.frontend.recurrence import Recurrence, require_free_steps
from compiler.ir.graph.atoms import Var

NAMES = ExpertNames(
    "mixer.gate", None, "mixer.experts.*.up_proj", "mixer.experts.*.down_proj", correction="mixer.gate.e_score_correction_bias"
)
QKV = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")
UP, DOWN = "mixer.up_proj", "mixer.down_proj"
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # letter in hybrid_override_pattern -> kind of layer
RENAMED = {"linear_attention": "mamba", "full_attention": "attention"}  # names of kinds since transformers 5 -> names in this module


def read(fields: Fields) -> ModelConfig:
    head_dim = fields.integer("attention_head_dim", 128)  # former name of head_dim
    fields.fill(intermediate_size=21504, num_key_value_heads=8, head_dim=head_dim, max_position_embeddings=4096)
    kinds = _read_kinds(fields)
    if fields.integer("num_hidden_layers", len(kinds)) != len(kinds):
        raise fields.error("num_hidden_layers", f"{len(kinds)}, the length of the list of layer kinds")
    fields.fill(num_hidden_layers=len(kinds))
    config = read_decoder(fields, eps=1e-5, eps_field="layer_norm_epsilon")
    for field, expected in (("attention_bias", "false"), ("sliding_window", "null"), ("residual_in_fp32", "false")):
        if fields.raw(field):
            raise fields.error(field, f"{expected}, as in all models")
    # Fields about training, kernels and multi-token prediction, and fields in place of which other fields are read.
    fields.skip("hidden_act", "rescale_prenorm_residual", "use_mamba_kernels", "moe_shared_expert_overlap", "norm_eps", "expand")
    fields.skip("rms_norm_eps", "num_query_groups", "time_step_rank")
    fields.skip("num_logits_to_keep", "num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    return replace(
        config,
        activation=read_activation(fields, "mlp_hidden_act", "relu2", in_decoder=True),
        rope=None,
        attending=_of_kind(kinds, "attention"),
        mlp_bias=fields.flag("mlp_bias", False),
        recurrence=_read_recurrence(fields, _of_kind(kinds, "mamba")),
        mixture=_read_mixture(fields, _of_kind(kinds, "mlp")) if "moe" in kinds else _without_mixture(fields),
    )


def _read_kinds(fields: Fields) -> Sequence[str]:
    """Return the kind of each layer, read from a list of names or a string of letters. Raise ConfigError for an unknown kind, or if no
    layer has attention."""
    named = next((name for name in ("layers_block_type", "layer_types") if name in fields), None)
    field = named or "hybrid_override_pattern"
    if named is None and not set(fields.text(field)) <= KINDS.keys():
        raise fields.error(field, f"letters among {' '.join(KINDS)}")
    found = [KINDS[letter] for letter in fields.text(field)] if named is None else fields.raw(field)
    if not isinstance(found, list) or not {*KINDS.values(), *RENAMED}.issuperset(found):
        raise fields.error(field, f"a list of {', '.join(KINDS.values())}")
    fields.skip("hybrid_override_pattern")  # a list of names takes precedence over this string
    kinds = [RENAMED.get(kind, kind) for kind in found]
    if "attention" not in kinds:
        raise fields.error(field, "at least one attention layer")
    return kinds


def _of_kind(kinds: Sequence[str], wanted: str) -> frozenset[int]:
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == wanted)


def _read_recurrence(fields: Fields, layers: frozenset[int]) -> Recurrence | None:
    """Return the sizes of Mamba-2, which `layers` have, or None if there are no such layers. Raise ConfigError if the groups do not divide
    the heads, or if a field has an unsupported value."""
    require_free_steps(fields)
    fields.require(mamba_hidden_act="silu", mamba_ssm_cache_dtype="float32")
    # States are computed token by token instead of in chunks, and step sizes are not bounded.
    fields.skip("chunk_size", "time_step_min", "time_step_max", "time_step_floor")
    heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if heads % groups:
        raise fields.error("n_groups", f"a divisor of mamba_num_heads ({heads})")
    bias = fields.flag("use_bias", False)
    found = Recurrence(
        layers=layers,
        taps=fields.integer("conv_kernel", 4, minimum=2, maximum=64),
        num_keys=groups,
        num_heads=heads,
        key_size=fields.integer("ssm_state_size", 128, maximum=1024),
        size=fields.integer("mamba_head_dim", 64, maximum=1024),
        convolution_bias=fields.flag("use_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
    )
    return found if layers else None


def _without_mixture(fields: Fields) -> None:
    """Mark the fields of experts as read, because the model has no experts."""
    fields.skip("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "moe_shared_expert_intermediate_size")
    fields.skip("n_group", "topk_group", "n_shared_experts", "routed_scaling_factor", "moe_latent_size")


def _read_mixture(fields: Fields, dense: frozenset[int]) -> Mixture:
    fields.fill(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688, norm_topk_prob=True)
    found = read_shared_mixture(fields)
    shared_size, outer_size = fields.integer("moe_shared_expert_intermediate_size", 7688), fields.integer("moe_latent_size", None)
    return replace(found, shared_size=shared_size, outer_size=outer_size, dense_layers=dense)


def layer(at: Layer, x: Var) -> Var:
    return residual(at, x, _branch(at, norm(at, x, "norm")))


def _branch(at: Layer, h: Var) -> Var:
    """Return the output of the only operation of the layer."""
    c = at.step.config
    if at.number in c.stateful:
        return mamba(at, h, "mixer")
    if at.number in c.keeping:
        return attend(at, *project_qkv(at, h, QKV), "mixer.o_proj")
    return mlp(at, h, UP, DOWN) if c.mixture is None or at.number in c.mixture.dense_layers else _mix(at, h)


def _mix(at: Layer, h: Var) -> Var:
    """Apply the experts and the shared expert. If the mixture has an `outer_size`, the routed experts work on a projection of `h` to this
    size, and their output is projected back. The router and the shared expert read `h` itself."""
    net, c, m = at.step.net, at.step.config, at.step.config.mixture
    assert m is not None, c
    shared = mlp(at, h, "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", m.shared_size)
    if m.outer_size is None:
        return net.add(experts(at, h, m, NAMES), shared)
    x = net.linear(h, at.name("mixer.fc1_latent_proj"), c.hidden_size, m.outer_size, bias=c.mlp_bias)
    found = net.linear(experts(at, x, m, NAMES, routed=h), at.name("mixer.fc2_latent_proj"), m.outer_size, c.hidden_size, bias=c.mlp_bias)
    return net.add(found, shared)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the kind of each layer, the intermediate size of the MLPs, the size of a head of Mamba-2, and which projections have biases."""
    count, widths = config.get("num_hidden_layers"), config.get("intermediate_size")
    attending = read_attending(config) or []
    kinds = ["attention" if attends else _kind(layer, tensors) for layer, attends in enumerate(attending)]
    config["layers_block_type"] = kinds
    if are_integers(widths) and type(count) is int and len(widths) >= len(kinds):
        # Files state one width per layer. In layers with experts, this is the width of an expert.
        config["intermediate_size"] = int(max((width for width, kind in zip(widths, kinds, strict=False) if kind == "mlp"), default=1))
    config.pop("partial_rotary_factor", None)  # there is no rope
    if (size := inner_size(metadata, config.get("mamba_num_heads"))) is not None:
        config["mamba_head_dim"] = size
    config["use_bias"] = has_tensor("ssm_in.bias", config, tensors)
    config["use_conv_bias"] = has_tensor("ssm_conv1d.bias", config, tensors)
    config["mlp_bias"] = has_tensor("ffn_up.bias", config, tensors)


def _kind(layer: int, tensors: Container[str]) -> str:
    """Return the kind of a layer without attention."""
    if f"blk.{layer}.ssm_in.weight" in tensors:
        return "mamba"
    return "moe" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "mlp"


GGUF = Gguf(
    "nemotron_h",
    {
        **glm4_moe.GGUF_FIELDS,
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
    },
    {
        **mamba_names("mixer"),
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": UP,
        "ffn_down": DOWN,
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    {"token_embd": "model.embeddings"},
    with_experts="nemotron_h_moe",
    pairs_interleaved=True,
    restored=mamba_restored("mixer"),
    complete=complete,
)
FAMILY = DecoderFamily(("nemotron_h",), read, layer, embedding="embeddings", last_norm="norm_f", gguf=GGUF, experts=NAMES)
