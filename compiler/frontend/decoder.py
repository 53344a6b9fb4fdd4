"""The causal decoder that most families are variations of, and its one entry point.

    step(tokens[t], positions[t], slots[t], seq_ids[t], page_tables[s, p], logit_rows[r], cache) -> logits[r, vocabulary]

`t` tokens of `s` sequences, prefill and decode mixed. A family's file turns its configuration into a `Decoder`: what varies is data here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from compiler.frontend.nn import Net
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph import Atom, Constant, ScalarValue, Var
from compiler.ir.module import IRModule
from compiler.ir.op import OpDef
from compiler.ir.types import tensor
from compiler.ops.attention import KV_APPEND, PAGE, PAGED_ATTENTION
from compiler.ops.elementwise import DIVIDE, MULTIPLY, SILU, TANH
from compiler.ops.embedding import EMBEDDING, ROPE, ROPE_ANGLES

ENTRY = "step"


@dataclass(frozen=True, slots=True)
class Rope:
    """`inv_freq` holds every scaling; `scale` multiplies cosine and sine. Elements beyond 2 * len(inv_freq) are not turned."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer has of its own."""

    window: int = 0  # 0: attends to everything before it
    rope: int = 0  # which of the decoder's rotary embeddings


@dataclass(frozen=True, slots=True)
class Names:
    """Where a layer's weights are in the checkpoint, behind `model.layers.N.`. Several names: stacked in this order."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    before_attention: str = "input_layernorm"
    after_attention: str | None = None  # a norm on the branch itself, before it is added
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    tied: bool
    names: Names = field(default_factory=Names)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0  # added to the weight of every norm
    embedding_scale: float = 1.0
    activation: OpDef = SILU
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    prefix: str = "model."
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Declared ranges of the step's variables: what memory is planned for."""

    max_tokens: int
    max_seqs: int
    max_context: int

    @property
    def max_pages(self) -> int:
        return -(-self.max_context // PAGE)


def build_step(decoder: Decoder, dtypes: dict[str, DType], bounds: StepBounds, cache_dtype: DType) -> IRModule:
    net = Net(dtypes)
    t, s = DimVar("t", 0, bounds.max_tokens), DimVar("s", 0, bounds.max_seqs)
    p, r = DimVar("p", 0, bounds.max_pages), DimVar("r", 0, bounds.max_tokens)
    pages = DimVar("pages", 1)
    kv_shape = (len(decoder.layers), 2, pages, decoder.num_kv_heads, PAGE * decoder.head_dim)
    i32 = DType.I32
    batch = _Batch(
        tokens=Var("tokens", tensor((t,), i32)),
        positions=Var("positions", tensor((t,), i32)),
        slots=Var("slots", tensor((t,), i32)),
        seq_ids=Var("seq_ids", tensor((t,), i32)),
        page_tables=Var("page_tables", tensor((s, p), i32)),
        logit_rows=Var("logit_rows", tensor((r,), i32)),
        cache=Var("cache", tensor(kv_shape, cache_dtype)),
    )
    with net.function(ENTRY, batch.params, pure=False):
        net.builder.returns(_Step(net, decoder, batch, t).logits())
    return net.builder.finish()


@dataclass(slots=True)
class _Batch:
    tokens: Var
    positions: Var
    slots: Var
    seq_ids: Var
    page_tables: Var
    logit_rows: Var
    cache: Var

    @property
    def params(self) -> tuple[Var, ...]:
        return (self.tokens, self.positions, self.slots, self.seq_ids, self.page_tables, self.logit_rows, self.cache)


class _Step:
    def __init__(self, net: Net, decoder: Decoder, batch: _Batch, t: DimVar) -> None:
        self.net = net
        self.decoder = decoder
        self.batch = batch
        self.t = t
        self.cache: Atom = batch.cache

    def logits(self) -> Var:
        net, d = self.net, self.decoder
        x = net.embedding(f"{d.prefix}embed_tokens", self.batch.tokens, d.vocab_size, d.hidden_size)
        if d.embedding_scale != 1.0:
            x = net.scale(x, d.embedding_scale)
        angles = [self.angles(rope) for rope in d.ropes]
        for number, layer in enumerate(d.layers):
            x = self.layer(x, number, layer, angles[layer.rope])
        x = net.call(EMBEDDING, x, self.batch.logit_rows)  # the rows that are asked for
        x = self.norm(x, f"{d.prefix}norm")
        head = f"{d.prefix}embed_tokens" if d.tied else d.head
        return self.capped(net.linear(x, head, d.hidden_size, d.vocab_size), d.logit_softcap)

    def angles(self, rope: Rope) -> tuple[Var, Var]:
        net = self.net
        table = Constant(np.asarray(rope.inv_freq, np.float32))
        both = net.call(ROPE_ANGLES, self.batch.positions, table, scale=rope.scale)
        return net.field(both, 0), net.field(both, 1)

    def layer(self, x: Var, number: int, layer: Layer, angles: tuple[Var, Var]) -> Var:
        d, names = self.decoder, self.decoder.names
        at = f"{d.prefix}layers.{number}."
        attended = self.attention(self.norm(x, at + names.before_attention), at, number, layer, angles)
        if names.after_attention is not None:
            attended = self.norm(attended, at + names.after_attention)
        x = self.net.add(x, attended)
        fed = self.mlp(self.norm(x, at + names.before_mlp), at)
        if names.after_mlp is not None:
            fed = self.norm(fed, at + names.after_mlp)
        return self.net.add(x, fed)

    def attention(self, h: Var, at: str, number: int, layer: Layer, angles: tuple[Var, Var]) -> Var:
        net, d, batch = self.net, self.decoder, self.batch
        heads, kv_heads, size = d.num_heads, d.num_kv_heads, d.head_dim
        names = tuple(at + n for n in d.names.qkv)
        sizes = [heads * size, kv_heads * size, kv_heads * size] if len(names) == 3 else [(heads + 2 * kv_heads) * size]
        qkv = net.reshape(net.linear(h, names, d.hidden_size, sizes, bias=d.qkv_bias), self.t, heads + 2 * kv_heads, size)
        q = self.turned(net.slice(qkv, 1, 0, heads), at, d.names.query_norm, angles)
        k = self.turned(net.slice(qkv, 1, heads, heads + kv_heads), at, d.names.key_norm, angles)
        v = net.slice(qkv, 1, heads + kv_heads, heads + 2 * kv_heads)
        index = ScalarValue(Dim.of(number))
        self.cache = net.call(KV_APPEND, self.cache, k, v, batch.slots, index)
        mixed = net.call(
            PAGED_ATTENTION,
            q,
            self.cache,
            batch.page_tables,
            batch.seq_ids,
            batch.positions,
            index,
            scale=d.attention_scale,
            window=layer.window,
            softcap=d.attention_softcap,
        )
        flat = net.reshape(mixed, self.t, heads * size)
        return net.linear(flat, at + d.names.out, heads * size, d.hidden_size, bias=d.out_bias)

    def turned(self, x: Var, at: str, norm: str | None, angles: tuple[Var, Var]) -> Var:
        d = self.decoder
        if norm is not None:
            x = self.net.rms_norm(x, at + norm, d.head_dim, d.norm_eps, offset=d.norm_offset)
        return self.net.call(ROPE, x, *angles)

    def mlp(self, h: Var, at: str) -> Var:
        net, d = self.net, self.decoder
        names = d.names.gate_up
        if len(names) == 2:
            gate, up = (net.linear(h, at + n, d.hidden_size, d.ffn_size, bias=d.mlp_bias) for n in names)
        else:
            both = net.linear(h, at + names[0], d.hidden_size, 2 * d.ffn_size, bias=d.mlp_bias)
            gate, up = net.slice(both, 1, 0, d.ffn_size), net.slice(both, 1, d.ffn_size, 2 * d.ffn_size)
        gated = net.call(MULTIPLY, net.call(d.activation, gate), up)
        return net.linear(gated, at + d.names.down, d.ffn_size, d.hidden_size, bias=d.mlp_bias)

    def norm(self, x: Var, name: str) -> Var:
        d = self.decoder
        return self.net.rms_norm(x, name, d.hidden_size, d.norm_eps, offset=d.norm_offset)

    def capped(self, x: Var, cap: float) -> Var:
        if not cap:
            return x
        limit = ScalarValue(cap, "f32")
        return self.net.call(MULTIPLY, self.net.call(TANH, self.net.call(DIVIDE, x, limit)), limit)
