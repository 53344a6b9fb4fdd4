"""Qwen3-Next: the gated delta rule in three of four layers, gated attention in every fourth layer, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import ModelConfig, read_decoder, read_kinds, require_silu
from compiler.frontend.families import qwen3_moe
from compiler.frontend.families.qwen3_moe import read_dense
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import inner_size, rates, taps
from compiler.frontend.layers.decoder import OUT, QKV, Branch, Layer, attend, head_norm, pre_norm, rotate
from compiler.frontend.layers.delta import gated_delta
from compiler.frontend.layers.mixture import mixture
from compiler.frontend.layers.states import GATE_FORMAT
from compiler.frontend.mixture import ExpertNames, Mixture, read_mixture
from compiler.frontend.recurrence import Recurrence
from compiler.ir.graph.atoms import Var

NAMES = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
KINDS = ("linear_attention", "full_attention")


def read(fields: Fields) -> ModelConfig:
    fields.fill(intermediate_size=5632, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, norm_topk_prob=True)
    fields.fill(shared_expert_intermediate_size=512)
    return replace(read_hybrid(fields), mixture=replace(read_experts(fields), dense_layers=read_dense(fields)))


def read_hybrid(fields: Fields) -> ModelConfig:
    """Read the whole configuration except the fields of the experts."""
    fields.fill(head_dim=256, max_position_embeddings=32768, partial_rotary_factor=0.25, num_key_value_heads=2)
    config = read_decoder(fields, bias="attention_bias")
    require_silu(fields, config)
    fields.require("because attention is gated in all models of the family", attn_output_gate=True)
    fields.require("the type in which states are stored", mamba_ssm_dtype="float32")
    fields.skip("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # fields of multi-token prediction
    return replace(config, norm_offset=1.0, recurrence=_read_recurrence(fields, config.num_layers))


def read_experts(fields: Fields) -> Mixture:
    """Read the experts and the shared expert."""
    found = read_mixture(fields, "num_experts", "moe_intermediate_size")
    return replace(found, shared_size=fields.integer("shared_expert_intermediate_size"))


def _read_recurrence(fields: Fields, num_layers: int) -> Recurrence:
    keys, heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if heads % keys:
        raise fields.error("linear_num_key_heads", f"a divisor of linear_num_value_heads ({heads})")
    return Recurrence(
        layers=_read_layers(fields, num_layers),
        taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=64),
        num_keys=keys,
        num_heads=heads,
        key_size=fields.integer("linear_key_head_dim", 128, maximum=1024),
        size=fields.integer("linear_value_head_dim", 128, maximum=1024),
    )


def _read_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers that keep a state: those that `layer_types` calls linear_attention or, without this field, all except every
    `full_attention_interval`-th. Raise ConfigError if all layers keep a state."""
    every = fields.integer("full_attention_interval", 4)
    kinds = read_kinds(fields, [KINDS[(layer + 1) % every == 0] for layer in range(num_layers)], KINDS)
    found = frozenset(layer for layer, kind in enumerate(kinds) if kind == KINDS[0])
    if len(found) == num_layers:
        raise fields.error("layer_types", "at least one layer of type full_attention")
    return found


def mixed(delta: Branch) -> Branch:
    """Return a branch that applies `delta` in layers with a state, and gated attention in all other layers."""
    return lambda at, h: delta(at, h) if at.number in at.step.config.stateful else gated_attention(at, h)


def gated_attention(at: Layer, h: Var) -> Var:
    """Attend, multiply the result by the sigmoid of a gate, and project. The query projection has, for each head, the rows of the query,
    then those of the gate."""
    net, t, c = at.step.net, at.step.t, at.step.config
    heads, kv_heads, size = c.num_heads, c.num_kv_heads, c.head_dim
    sizes = [2 * heads * size, kv_heads * size, kv_heads * size]
    wide = net.linear(h, [at.name(name) for name in QKV], c.hidden_size, sizes, bias=c.qkv_bias)
    both = net.reshape(net.slice(wide, 1, 0, sizes[0]), t, heads, 2 * size)
    q, gate = net.slice(both, 2, 0, size), net.slice(both, 2, size, 2 * size)
    k, v = (net.reshape(net.slice(wide, 1, end - sizes[1], end), t, kv_heads, size) for end in (sum(sizes[:2]), sum(sizes)))
    q, k = head_norm(at, q, "self_attn.q_norm"), head_norm(at, k, "self_attn.k_norm")
    return attend(at, rotate(at, q), rotate(at, k), v, OUT, gate=net.reshape(gate, t, heads * size))


def _stacked_delta(at: Layer, h: Var) -> Var:
    """Apply the gated delta rule with stacked projections. Safetensors files group the rows by key head. A group has the head's query, its
    key, and the values and gates of the value heads that share the key. Newer GGUF files (`apart`) have one matrix with the queries, then
    the keys, then the values of all heads, and another matrix with the gates. All files group the rows of `b` and `a` by key head."""
    net, c, r = at.step.net, at.step.config, at.step.config.recurrence
    assert r is not None, c
    each = r.num_heads // r.num_keys
    if c.apart:
        wide = net.linear(h, [at.name(f"linear_attn.in_proj_{part}") for part in ("qkv", "z")], c.hidden_size, [r.channels, r.values])
    else:
        parts = _parted(at, "linear_attn.in_proj_qkvz.weight", (r.key_size, r.key_size, each * r.size, each * r.size))
        wide = net.product(h, net.stacked(parts))
    b, a = (net.product(h, part, format=GATE_FORMAT) for part in _parted(at, "linear_attn.in_proj_ba.weight", (each, each)))
    return gated_delta(at, net.slice(wide, 1, 0, r.channels), net.slice(wide, 1, r.channels, r.channels + r.values), b, a)


def _parted(at: Layer, name: str, sizes: tuple[int, ...]) -> list[Var]:
    """Split a weight whose rows are grouped by key head into one weight per kind of row. Each group has `sizes[i]` rows of kind `i`."""
    net, c, r = at.step.net, at.step.config, at.step.config.recurrence
    assert r is not None, c
    by_head = net.reshape(net.weight(at.name(name), r.num_keys * sum(sizes), c.hidden_size), r.num_keys, sum(sizes), c.hidden_size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        net.reshape(net.slice(by_head, 1, end - size, end), r.num_keys * size, c.hidden_size) for size, end in zip(sizes, ends, strict=True)
    ]


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the fields that `qwen3_moe.complete` adds, the size of a value head, and the kinds of layers, if the metadata states them."""
    qwen3_moe.complete(config, metadata, tensors)
    if (size := inner_size(metadata, config.get("linear_num_value_heads"))) is not None:
        config["linear_value_head_dim"] = size
    if (flags := metadata.get("attention.recurrent_layers")) is not None and (count := config.get("num_hidden_layers")) is not None:
        config["layer_types"] = [KINDS[not keeps_state] for keeps_state in flags[:count]]


def adapt(config: ModelConfig, tensors: Container[str]) -> ModelConfig:
    """Record in `apart` whether the gates have a matrix of their own. The first converters left the projections stacked as in safetensors
    files."""
    assert config.recurrence is not None, config
    first = min(config.recurrence.layers, default=0)
    return replace(config, apart=f"blk.{first}.ssm_in.weight" not in tensors)


GGUF_FIELDS = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
GGUF_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GGUF_RESTORED = {"linear_attn.A_log": rates, "linear_attn.conv1d.weight": taps}
SHARED_FIELDS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SHARED_RESTORED = {"mlp.shared_expert_gate.weight": lambda gate: gate.reshape(1, -1)}
GGUF = Gguf(
    "qwen3next",
    {**GGUF_FIELDS, **SHARED_FIELDS},
    {**GGUF_LAYER_NAMES, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    norm_offset=1.0,
    restored={**GGUF_RESTORED, **SHARED_RESTORED},
    complete=complete,
    adapt=adapt,
)
FAMILY = DecoderFamily(("qwen3_next",), read, pre_norm(mixed(_stacked_delta), mixture(NAMES)), gguf=GGUF, experts=NAMES)
