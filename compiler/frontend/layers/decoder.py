"""The parts that families of decoders compose their layers from. Names of weights are those of the checkpoint, relative to the layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.frontend.config import Activation, ModelConfig
from compiler.frontend.layers.nn import Net
from compiler.frontend.rope import Rope
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, Var
from compiler.ops.attention.kv_cache import KV_APPEND
from compiler.ops.attention.paged import PAGED_ATTENTION
from compiler.ops.elementwise import DIVIDE, GELU, GELU_TANH, MULTIPLY, RELU, SILU, TANH
from compiler.ops.embedding import ROPE, ROPE_ANGLES

ACTIVATIONS = {Activation.SILU: SILU, Activation.GELU: GELU, Activation.GELU_TANH: GELU_TANH, Activation.RELU: RELU}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(slots=True)
class Batch:
    """The inputs of a step."""

    tokens: Var
    positions: Var
    slots: Var
    seq_ids: Var
    page_tables: Var
    logit_rows: Var
    hidden_rows: Var | None
    cache: Var
    scales: Var | None  # of an 8-bit cache

    @property
    def params(self) -> tuple[Var, ...]:
        rows = (self.logit_rows, self.hidden_rows)
        params = (self.tokens, self.positions, self.slots, self.seq_ids, self.page_tables, *rows, self.cache, self.scales)
        return tuple(param for param in params if param is not None)


@dataclass(slots=True)
class Step:
    """A step under construction. `cache` and `scales` are what the last append left."""

    net: Net
    config: ModelConfig
    batch: Batch
    prefix: str  # of the decoder's weights
    t: DimVar
    max_context: int
    cache: Atom
    scales: tuple[Atom, ...]
    angles: dict[Rope, tuple[Var, Var]] = field(default_factory=dict[Rope, tuple[Var, Var]])

    def angles_of(self, rope: Rope) -> tuple[Var, Var]:
        """Cosines and sines of this step's positions, computed once for all layers with the same rope."""
        if rope not in self.angles:
            frequencies, scale = rope.frequencies(self.max_context)
            both = self.net.call(ROPE_ANGLES, self.batch.positions, Constant(frequencies), scale=scale)
            self.angles[rope] = self.net.field(both, 0), self.net.field(both, 1)
        return self.angles[rope]


@dataclass(frozen=True, slots=True)
class Layer:
    step: Step
    number: int

    def name(self, suffix: str) -> str:
        return f"{self.step.prefix}layers.{self.number}.{suffix}"


# --- around the layers -------------------------------------------------------------------------------------------------


def embed(step: Step) -> Var:
    c = step.config
    return step.net.embedding(f"{step.prefix}embed_tokens", step.batch.tokens, c.vocab_size, c.hidden_size)


def scaled_embed(step: Step) -> Var:
    return step.net.scale(embed(step), step.config.hidden_size**0.5)


def logits(step: Step, x: Var) -> Var:
    c = step.config
    head = f"{step.prefix}embed_tokens" if c.tie_word_embeddings else "lm_head"
    return step.net.head(x, head, c.hidden_size, c.vocab_size)


def capped_logits(step: Step, x: Var) -> Var:
    """Logits bounded by `logit_softcap`, where the configuration has one."""
    found, cap = logits(step, x), step.config.logit_softcap
    if cap is None:
        return found
    limit = ScalarValue(cap, "f32")
    return step.net.call(MULTIPLY, step.net.call(TANH, step.net.call(DIVIDE, found, limit)), limit)


# --- norms -------------------------------------------------------------------------------------------------------------


def norm(layer: Layer, x: Var, name: str) -> Var:
    c = layer.step.config
    return layer.step.net.rms_norm(x, layer.name(name), c.hidden_size, c.norm_eps, offset=c.norm_offset)


def head_norm(layer: Layer, x: Var, name: str) -> Var:
    """A norm of each single head of `x[tokens, heads, head_dim]`."""
    c = layer.step.config
    return layer.step.net.rms_norm(x, layer.name(name), c.head_dim, c.norm_eps, offset=c.norm_offset)


def projection_norm(layer: Layer, x: Var, name: str, num_heads: int) -> Var:
    """One norm over all heads of `x[tokens, heads, head_dim]` together."""
    step, c = layer.step, layer.step.config
    size = num_heads * c.head_dim
    flat = step.net.rms_norm(step.net.reshape(x, step.t, size), layer.name(name), size, c.norm_eps, offset=c.norm_offset)
    return step.net.reshape(flat, step.t, num_heads, c.head_dim)


# --- attention ---------------------------------------------------------------------------------------------------------


def project_qkv(layer: Layer, h: Var, names: tuple[str, ...] = QKV) -> tuple[Var, Var, Var]:
    """Queries, keys and values, each [tokens, heads, head_dim]. One name stands for a stacked projection."""
    net, c = layer.step.net, layer.step.config
    heads, kv_heads, size = c.num_heads, c.num_kv_heads, c.head_dim
    ends = heads, heads + kv_heads, heads + 2 * kv_heads
    sizes = [heads * size, kv_heads * size, kv_heads * size] if len(names) == 3 else [ends[2] * size]
    stacked = net.linear(h, [layer.name(n) for n in names], c.hidden_size, sizes, bias=c.qkv_bias)
    qkv = net.reshape(stacked, layer.step.t, ends[2], size)
    return net.slice(qkv, 1, 0, ends[0]), net.slice(qkv, 1, ends[0], ends[1]), net.slice(qkv, 1, ends[1], ends[2])


def rotate(layer: Layer, x: Var) -> Var:
    rope = layer.step.config.rope_of_layer(layer.number)
    return x if rope is None else layer.step.net.call(ROPE, x, *layer.step.angles_of(rope))


def attend(layer: Layer, q: Var, k: Var, v: Var, out: str = "self_attn.o_proj") -> Var:
    """Append keys and values to the cache, attend to it, and project."""
    step, c, net = layer.step, layer.step.config, layer.step.net
    batch, index = step.batch, ScalarValue(Dim.of(layer.number))
    appended = net.call(KV_APPEND, step.cache, k, v, batch.slots, index, *step.scales)
    if step.scales:
        step.cache, step.scales = net.field(appended, 0), (net.field(appended, 1),)
    else:
        step.cache = appended
    mixed = net.call(
        PAGED_ATTENTION,
        q,
        step.cache,
        batch.page_tables,
        batch.seq_ids,
        batch.positions,
        index,
        *step.scales,
        scale=c.attention_scale,
        window=c.windows[layer.number] or 0,
        softcap=c.attention_softcap or 0.0,
    )
    size = c.num_heads * c.head_dim
    return net.linear(net.reshape(mixed, step.t, size), layer.name(out), size, c.hidden_size, bias=c.output_bias)


def attention(layer: Layer, h: Var, names: tuple[str, ...] = QKV) -> Var:
    """Rotary attention without norms of its own."""
    q, k, v = project_qkv(layer, h, names)
    return attend(layer, rotate(layer, q), rotate(layer, k), v)


def head_norm_attention(layer: Layer, h: Var) -> Var:
    """Rotary attention with norms of single query and key heads."""
    q, k, v = project_qkv(layer, h)
    q, k = head_norm(layer, q, "self_attn.q_norm"), head_norm(layer, k, "self_attn.k_norm")
    return attend(layer, rotate(layer, q), rotate(layer, k), v)


# --- feed-forward ------------------------------------------------------------------------------------------------------


def gated_mlp(layer: Layer, h: Var, names: tuple[str, ...] = GATE_UP) -> Var:
    """`down(activation(gate(h)) * up(h))`. One name stands for a stacked projection."""
    net, c = layer.step.net, layer.step.config
    ffn = c.intermediate_size
    if len(names) == 2:
        gate, up = (net.linear(h, layer.name(n), c.hidden_size, ffn, bias=c.mlp_bias) for n in names)
    else:
        both = net.linear(h, layer.name(names[0]), c.hidden_size, 2 * ffn, bias=c.mlp_bias)
        gate, up = net.slice(both, 1, 0, ffn), net.slice(both, 1, ffn, 2 * ffn)
    gated = net.call(MULTIPLY, net.call(ACTIVATIONS[c.activation], gate), up)
    return net.linear(gated, layer.name("mlp.down_proj"), ffn, c.hidden_size, bias=c.mlp_bias)
