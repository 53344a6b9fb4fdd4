"""The causal decoder that most families are variations of, and its entry point.

    step(tokens[t], positions[t], slots[t], seq_ids[t], page_tables[s, p], logit_rows[r], cache, scales?) -> logits[r, vocabulary]
    hidden(...the same...) -> hidden[r, size]    of models that only embed: what the last norm gives, and no head
    both(..., logit_rows[r], hidden_rows[h], ...) -> (logits[r, vocabulary], hidden[h, size])

`t` tokens of `s` sequences, prefill and decode mixed. What varies between families is data: the numbers in `ModelConfig`, the names and
optional parts in `Wiring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compiler.frontend.config import Activation, ModelConfig
from compiler.frontend.nn import DEFAULT_FORMAT, Net, WeightFormat, prefix_of
from compiler.frontend.rope import Rope
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph import Atom, Constant, MakeTuple, ScalarValue, Var
from compiler.ir.module import IRModule
from compiler.ir.types import tensor
from compiler.ops.attention import KV_APPEND, PAGE, PAGED_ATTENTION
from compiler.ops.elementwise import DIVIDE, GELU, GELU_TANH, MULTIPLY, RELU, SILU, TANH
from compiler.ops.embedding import EMBEDDING, ROPE, ROPE_ANGLES

ENTRY, HIDDEN, BOTH = "step", "hidden", "both"
UNUSED = (
    *("*rotary_emb.inv_freq", "lm_head.weight", "language_model.lm_head.weight"),  # computed, and beside tied embeddings
    *("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"),  # what reads images
)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Where a family's weights are in the checkpoint, behind `model.layers.N.`, and with that which of them it has. Several names stand
    for layers over the same input, whose outputs stand side by side in this order."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    before_attention: str = "input_layernorm"
    after_attention: str | None = None  # a norm on the branch itself, before it is added
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    query_norm: str | None = None  # norms of single heads
    key_norm: str | None = None
    prefix: str = "model."
    head: str = "lm_head"


ACTIVATIONS = {Activation.SILU: SILU, Activation.GELU: GELU, Activation.GELU_TANH: GELU_TANH, Activation.RELU: RELU}


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Declared ranges of the step's variables: what memory is planned for."""

    max_tokens: int
    max_seqs: int
    max_context: int

    @property
    def max_pages(self) -> int:
        return -(-self.max_context // PAGE)


def build_step(
    config: ModelConfig,
    wiring: Wiring,
    dtypes: Mapping[str, DType],
    bounds: StepBounds,
    cache_dtype: DType,
    format: WeightFormat = DEFAULT_FORMAT,
    *,
    entry: str = ENTRY,
) -> IRModule:
    net = Net(dtypes, format)
    wiring = replace(wiring, prefix=_prefix(dtypes, wiring.prefix))
    t, s = DimVar("t", 0, bounds.max_tokens), DimVar("s", 0, bounds.max_seqs)
    p, r, h = DimVar("p", 0, bounds.max_pages), DimVar("r", 0, bounds.max_seqs), DimVar("h", 0, bounds.max_seqs)
    pages = DimVar("pages", 1)
    kv_shape = (config.num_layers, 2, pages, config.num_kv_heads, PAGE * config.head_dim)
    i32 = DType.I32
    batch = _Batch(
        tokens=Var("tokens", tensor((t,), i32)),
        positions=Var("positions", tensor((t,), i32)),
        slots=Var("slots", tensor((t,), i32)),
        seq_ids=Var("seq_ids", tensor((t,), i32)),
        page_tables=Var("page_tables", tensor((s, p), i32)),
        logit_rows=Var("logit_rows", tensor((r,), i32)),
        hidden_rows=Var("hidden_rows", tensor((h,), i32)) if entry == BOTH else None,
        cache=Var("cache", tensor(kv_shape, cache_dtype)),
        scales=Var("scales", tensor((*kv_shape[:4], PAGE), DType.F32)) if cache_dtype is DType.I8 else None,
    )
    step = _Step(net, config, wiring, batch, t, bounds.max_context)
    with net.function(entry, batch.params, pure=False):
        net.builder.returns(step.result(entry))
    return net.builder.finish()


def _prefix(dtypes: Mapping[str, DType], own: str) -> str:
    """Within a model that reads images, too, the decoder has one more."""
    return next(filter(None, (prefix_of(dtypes, prefix) for prefix in (f"language_model.{own}", f"{own}language_model.", own))), "")


@dataclass(slots=True)
class _Batch:
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


class _Step:
    def __init__(self, net: Net, config: ModelConfig, wiring: Wiring, batch: _Batch, t: DimVar, max_context: int) -> None:
        self.net = net
        self.config = config
        self.wiring = wiring
        self.batch = batch
        self.t = t
        self.max_context = max_context
        self.cache: Atom = batch.cache
        self.scales: tuple[Atom, ...] = () if batch.scales is None else (batch.scales,)
        self.angles: dict[Rope, tuple[Var, Var]] = {}

    def result(self, entry: str) -> Var:
        batch, x = self.batch, self.layers()
        if entry == HIDDEN:
            return self.hidden(x, batch.logit_rows)
        logits = self.logits(self.hidden(x, batch.logit_rows))
        if batch.hidden_rows is None:
            return logits
        return self.net.builder.emit(MakeTuple((logits, self.hidden(x, batch.hidden_rows))))

    def layers(self) -> Var:
        net, c, w = self.net, self.config, self.wiring
        x = net.embedding(f"{w.prefix}embed_tokens", self.batch.tokens, c.vocab_size, c.hidden_size)
        if c.embedding_scale != 1.0:
            x = net.scale(x, c.embedding_scale)
        for number in range(c.num_layers):
            x = self.layer(x, number)
        return x

    def hidden(self, x: Var, rows: Var) -> Var:
        """The rows that are asked for, as the last norm gives them."""
        return self.norm(self.net.call(EMBEDDING, x, rows), f"{self.wiring.prefix}norm")

    def logits(self, x: Var) -> Var:
        c, w = self.config, self.wiring
        head = f"{w.prefix}embed_tokens" if c.tie_word_embeddings else w.head
        return self.capped(self.net.head(x, head, c.hidden_size, c.vocab_size), c.logit_softcap)

    def layer(self, x: Var, number: int) -> Var:
        w = self.wiring
        at = f"{w.prefix}layers.{number}."
        attended = self.attention(self.norm(x, at + w.before_attention), at, number)
        if w.after_attention is not None:
            attended = self.norm(attended, at + w.after_attention)
        x = self.net.add(x, attended)
        fed = self.mlp(self.norm(x, at + w.before_mlp), at)
        if w.after_mlp is not None:
            fed = self.norm(fed, at + w.after_mlp)
        return self.net.add(x, fed)

    def attention(self, h: Var, at: str, number: int) -> Var:
        net, c, w, batch = self.net, self.config, self.wiring, self.batch
        heads, kv_heads, size = c.num_heads, c.num_kv_heads, c.head_dim
        all_heads = heads + 2 * kv_heads
        sizes = [heads * size, kv_heads * size, kv_heads * size] if len(w.qkv) == 3 else [all_heads * size]
        stacked = net.linear(h, [at + n for n in w.qkv], c.hidden_size, sizes, bias=c.qkv_bias)
        qkv = net.reshape(stacked, self.t, all_heads, size)
        q = self.turned(net.slice(qkv, 1, 0, heads), at, w.query_norm, number)
        k = self.turned(net.slice(qkv, 1, heads, heads + kv_heads), at, w.key_norm, number)
        v = net.slice(qkv, 1, heads + kv_heads, all_heads)
        index = ScalarValue(Dim.of(number))
        appended = net.call(KV_APPEND, self.cache, k, v, batch.slots, index, *self.scales)
        if self.scales:
            self.cache, self.scales = net.field(appended, 0), (net.field(appended, 1),)
        else:
            self.cache = appended
        mixed = net.call(
            PAGED_ATTENTION,
            q,
            self.cache,
            batch.page_tables,
            batch.seq_ids,
            batch.positions,
            index,
            *self.scales,
            scale=c.attention_scale,
            window=c.windows[number] or 0,
            softcap=c.attention_softcap or 0.0,
        )
        return net.linear(net.reshape(mixed, self.t, heads * size), at + w.out, heads * size, c.hidden_size, bias=c.output_bias)

    def turned(self, x: Var, at: str, norm: str | None, number: int) -> Var:
        c = self.config
        if norm is not None:
            x = self.net.rms_norm(x, at + norm, c.head_dim, c.norm_eps, offset=c.norm_offset)
        rope = c.rope_of_layer(number)
        return x if rope is None else self.net.call(ROPE, x, *self.angles_of(rope))

    def angles_of(self, rope: Rope) -> tuple[Var, Var]:
        """Cosines and sines of this step's positions: once for all layers that turn alike."""
        if rope not in self.angles:
            frequencies, scale = rope.frequencies(self.max_context)
            both = self.net.call(ROPE_ANGLES, self.batch.positions, Constant(frequencies), scale=scale)
            self.angles[rope] = self.net.field(both, 0), self.net.field(both, 1)
        return self.angles[rope]

    def mlp(self, h: Var, at: str) -> Var:
        net, c, w = self.net, self.config, self.wiring
        ffn = c.intermediate_size
        if len(w.gate_up) == 2:
            gate, up = (net.linear(h, at + n, c.hidden_size, ffn, bias=c.mlp_bias) for n in w.gate_up)
        else:
            both = net.linear(h, at + w.gate_up[0], c.hidden_size, 2 * ffn, bias=c.mlp_bias)
            gate, up = net.slice(both, 1, 0, ffn), net.slice(both, 1, ffn, 2 * ffn)
        gated = net.call(MULTIPLY, net.call(ACTIVATIONS[c.activation], gate), up)
        return net.linear(gated, at + w.down, ffn, c.hidden_size, bias=c.mlp_bias)

    def norm(self, x: Var, name: str) -> Var:
        c = self.config
        return self.net.rms_norm(x, name, c.hidden_size, c.norm_eps, offset=c.norm_offset)

    def capped(self, x: Var, cap: float | None) -> Var:
        if not cap:
            return x
        limit = ScalarValue(cap, "f32")
        return self.net.call(MULTIPLY, self.net.call(TANH, self.net.call(DIVIDE, x, limit)), limit)
