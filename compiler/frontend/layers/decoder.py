"""The parts from which families of decoders compose their layers. Names of weights are those of the checkpoint, relative to the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from compiler.frontend.classes import Classes
from compiler.frontend.config import Activation, Heads, ModelConfig, Norm
from compiler.frontend.layers.chunks import Places, in_chunks, spans
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.frontend.layers.xielu import xielu
from compiler.frontend.reranker import Verdict
from compiler.frontend.rope import Rope
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, ShapeValue, Var
from compiler.ir.types import TensorType
from compiler.ops.attention.kv_cache import KEY_APPEND, KV_APPEND, PAGE
from compiler.ops.attention.paged import PAGED_ATTENTION
from compiler.ops.elementwise import ADD, CAST, DIVIDE, FLOOR_DIVIDE, GELU, GELU_TANH, LOG, MULTIPLY, RELU, SIGMOID, SILU, SUBTRACT, TANH
from compiler.ops.embedding import EMBEDDING, ROPE, ROPE_ANGLES
from compiler.ops.index import SCATTER, TAKE
from compiler.ops.manipulate import BROADCAST_TO, EXPAND_DIMS
from compiler.ops.normalize import SOFTMAX
from compiler.ops.reduce import SUM
from runtime.cache_groups import HeardGroup, KVGroup, StateGroup

ACTIVATIONS = {Activation.SILU: SILU, Activation.GELU: GELU, Activation.GELU_TANH: GELU_TANH, Activation.RELU: RELU}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
SINKS = "self_attn.sinks"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
CLASS_HEAD = "score"  # name of the classification head, which does not have the prefix of the decoder's weights


@dataclass(slots=True)
class Batch:
    """The inputs of a step."""

    tokens: Var  # in the program of a later stage: the residual stream that the stage before passes on
    positions: Var
    seq_ids: Var
    logit_rows: Var | None  # None: the program has no head
    hidden_rows: Var | None  # in the program `both`: indices of tokens whose hidden states, or attention to audio, it returns; else None
    caches: tuple[KVCache, ...]
    states: tuple[StateCache, ...]
    heard: HeardCache | None
    seen: SeenRows | None
    starts: Var  # `starts` and `saved` are used only in models with states: see compiler/ops/states.py
    saved: Var

    @property
    def params(self) -> tuple[Var, ...]:
        """The inputs in the order of `runtime.step_arguments`."""
        rows = (row for row in (self.logit_rows, self.hidden_rows) if row is not None)
        slots, tables = (cache.slots for cache in self.caches), (cache.page_tables for cache in self.caches)
        states = (self.starts, self.saved, *(var for state in self.states for var in (state.sources, state.pages))) if self.states else ()
        heard = () if self.heard is None else (self.heard,)
        held = (var for cache in (*self.caches, *self.states, *heard) for var in cache.held)
        pages = (cache.pages for cache in heard)
        seen = () if self.seen is None else self.seen.params
        return self.tokens, self.positions, *slots, self.seq_ids, *tables, *states, *pages, *rows, *seen, *held


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """The inputs of a step for one cache group of keys and values."""

    group: KVGroup
    slots: Var  # for each token, the slot in the cache to which its keys and values are written
    page_tables: Var
    held: tuple[Var, ...]  # the pages, and for 8-bit pages the scales


@dataclass(frozen=True, slots=True, eq=False)
class StateCache:
    """The inputs of a step for one group of states."""

    group: StateGroup
    sources: Var  # for each sequence, the page with the state from which it continues
    pages: Var  # page to which the state after each saved token is written
    held: tuple[Var, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HeardCache:
    """The inputs of a step for the keys and values of audio."""

    group: HeardGroup
    pages: Var  # the single page of each sequence
    held: tuple[Var, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SeenRows:
    """The inputs of a step for tokens of images and audio. In a step without such tokens, all arrays except `axes` are empty."""

    at: Var  # indices of these tokens in the step
    rows: Var  # the rows that replace their embeddings: see `compiler/frontend/seeing.py` and `compiler/frontend/listening.py`
    lasts: Var | None  # for each of these tokens, the last position of its image, if attention within images has both directions
    axes: Var | None  # [tokens, 3]: the coordinates of all tokens of the step, if RoPE rotates by three coordinates

    @property
    def params(self) -> tuple[Var, ...]:
        return self.at, self.rows, *(var for var in (self.lasts, self.axes) if var is not None)


Cache = KVCache | StateCache


@dataclass(slots=True)
class Step:
    """A step under construction."""

    net: Net
    config: ModelConfig
    batch: Batch
    prefix: str  # prefix of the names of the decoder's weights
    embedding: str  # name of the token embedding
    t: DimVar
    max_context: int
    # for each cache: its variables after the latest write in this step
    appended: dict[Cache, tuple[Atom, ...]] = field(default_factory=dict["Cache", tuple[Atom, ...]])
    layer_inputs: Var | None = None  # [tokens, layers, size]: see LayerInputs
    angles: dict[Rope, tuple[Var, Var]] = field(default_factory=dict[Rope, tuple[Var, Var]])
    # per cache and window: the operands of attention, if they differ from the real sequences and positions
    places: dict[tuple[Cache, int], Places] = field(default_factory=dict["tuple[Cache, int]", Places])
    heard: Places | None = None  # operands of attention to audio: see `heard_places`
    attended: list[Var] = field(default_factory=list[Var])  # one variable per aligned head, [hidden rows, frames]: see `attention_to_audio`

    def angles_of(self, rope: Rope) -> tuple[Var, Var]:
        """Return the cosines and sines of this step's positions, or those of the coordinates of its tokens if the step has `axes`. Compute
        them once for all layers with the same rope."""
        if rope not in self.angles:
            frequencies, scale = rope.frequencies(self.max_context)
            axes = None if self.batch.seen is None else self.batch.seen.axes
            both = self.net.call(ROPE_ANGLES, self.batch.positions if axes is None else axes, Constant(frequencies), scale=scale)
            cosines, sines = (self.net.field(both, part) for part in range(2))
            self.angles[rope] = (cosines, sines) if axes is None else (self._along(cosines, rope), self._along(sines, rope))
        return self.angles[rope]

    def _along(self, tables: Var, rope: Rope) -> Var:
        """Return [tokens, pairs] from `tables[tokens, 3, pairs]`: for each pair of dimensions, the entry of the axis by whose coordinate
        RoPE rotates the pair."""
        num_pairs = len(rope.axes)
        columns = np.array(rope.axes, np.int32) * num_pairs + np.arange(num_pairs, dtype=np.int32)
        return self.net.call(TAKE, self.net.reshape(tables, self.t, 3 * num_pairs), Constant(columns), axis=1)

    @property
    def sees_back(self) -> bool:
        """Whether the tokens of an image attend to later tokens in layers with a window, but attention in all other layers is causal."""
        return self.config.vision is not None and self.config.vision.windows_only

    def places_of(self, cache: KVCache, window: int) -> Places:
        """Return the operands of attention to a cache that describe this step: see `chunks.py`. `window` is the number of tokens of the
        layer's window or chunk, or 0 if the layer has neither."""
        whole, seen = Places(self.batch.seq_ids, self.batch.positions, cache.page_tables), self.batch.seen
        if seen is not None and seen.lasts is not None and not (self.sees_back and not window):
            if (cache, window) not in self.places:
                self.places[cache, window] = replace(whole, positions=spans(self.net, whole.positions, seen.at, seen.lasts, window))
        elif not (self.config.chunked and 0 < window < self.max_context):
            return whole
        elif (cache, window) not in self.places:
            assert isinstance(self.t.upper, int), self.t
            self.places[cache, window] = in_chunks(self.net, whole, window, self.t.upper, self.max_context)
        return self.places[cache, window]

    def heard_places(self) -> Places:
        """Return the operands of attention to audio that describe this step. Every token attends to all frames of its sequence."""
        if self.heard is None:
            net, cache = self.net, self.batch.heard
            assert cache is not None
            count, last = cache.group.num_parts, cache.group.num_frames - 1
            parts = Constant(np.arange(count, dtype=np.int32)[None])
            firsts = net.call(MULTIPLY, net.call(EXPAND_DIMS, cache.pages, axes=1), ScalarValue(Dim.of(count), "i32"))
            ends = net.call(MULTIPLY, self.batch.positions, ScalarValue(Dim.of(0), "i32"))
            self.heard = Places(self.batch.seq_ids, net.add(ends, ScalarValue(Dim.of(last), "i32")), net.add(firsts, parts))
        return self.heard


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a step under construction."""

    step: Step
    number: int

    def name(self, suffix: str) -> str:
        return f"{self.step.prefix}layers.{self.number}.{suffix}"

    @property
    def cache(self) -> tuple[KVCache, ScalarValue]:
        """The cache from which the layer reads keys and values, and the index in that cache of the layer that wrote them."""
        source = self.step.config.kv_source(self.number)
        cache = next(cache for cache in self.step.batch.caches if source in cache.group.layers)
        return cache, ScalarValue(Dim.of(cache.group.layers.index(source)))

    @property
    def heads(self) -> Heads:
        return self.step.config.heads_of_layer(self.number)

    @property
    def state(self) -> tuple[StateCache, ScalarValue]:
        """The states of the layer's group, and the index of the layer in the group."""
        states = next(states for states in self.step.batch.states if self.number in states.group.layers)
        return states, ScalarValue(Dim.of(states.group.layers.index(self.number)))


# --- before and after the layers ---------------------------------------------------------------------------------------


def embed(step: Step) -> Var:
    """Return the token embeddings, scaled by the configuration's factor. If the step reads rows of images or audio, these rows replace the
    embeddings of their tokens."""
    c, net, seen = step.config, step.net, step.batch.seen
    x = scaled(step, net.embedding(step.embedding, step.batch.tokens, c.vocab_size, c.hidden_size), c.embedding_scale)
    return x if seen is None else _put(step, seen, x, _depth(step, seen, 0))


def deepened(step: Step, x: Var, number: int) -> Var:
    """Return `x`, the residual stream after layer `number`. If the encoder of images has rows for this layer, add these rows at the tokens
    of images and audio."""
    seen, vision = step.batch.seen, step.config.vision
    if seen is None or vision is None or number >= len(vision.deep_layers):
        return x
    return _put(step, seen, x, step.net.add(step.net.call(EMBEDDING, x, seen.at), _depth(step, seen, 1 + number)))


def _depth(step: Step, seen: SeenRows, number: int) -> Var:
    """Return the part of the rows that belongs to depth `number`, [tokens of images and audio, size]. The part of depth 0 replaces
    embeddings, and the part of depth n is added after layer n - 1."""
    size, vision = step.config.hidden_size, step.config.vision
    is_only = vision is None or vision.num_depths == 1
    return seen.rows if is_only else step.net.slice(seen.rows, 1, number * size, (number + 1) * size)


def _put(step: Step, seen: SeenRows, x: Var, rows: Var) -> Var:
    """Return the residual stream `x` with `rows` in the places of the tokens of images and audio."""
    everywhere = ShapeValue((_extent(seen.rows, 0), Dim.of(step.config.hidden_size)))
    places = step.net.call(BROADCAST_TO, step.net.call(EXPAND_DIMS, seen.at, axes=1), everywhere)
    return step.net.call(SCATTER, x, places, rows, axis=0)


def logits(step: Step, x: Var) -> Var:
    """Compute the logits, with the scale of the configuration, and with its soft cap if it has one."""
    c, net, name, own = step.config, step.net, _head(step), own_head(step.prefix)
    found = net.head(x, name, c.hidden_size, c.vocab_size, bias=c.head_bias and name == own)
    if c.head_bias and name != own:  # a tied head has the weights of the embedding, but its own bias
        found = net.add(found, net.vector(f"{own}.bias", c.vocab_size))
    found = scaled(step, found, c.logit_scale)
    if c.logit_softcap is None:
        return found
    limit = ScalarValue(c.logit_softcap, "f32")
    return net.call(MULTIPLY, net.call(TANH, net.call(DIVIDE, found, limit)), limit)


def classified(step: Step, x: Var, classes: Classes) -> Var:
    """Compute one number per row and class, [rows, classes], by the classification head or from the logits of two tokens."""
    if step.config.verdict is not None:
        return _judged(step, x, step.config.verdict)
    return step.net.linear(x, CLASS_HEAD, step.config.hidden_size, len(classes.names), format=WeightFormat(32))


def _judged(step: Step, x: Var, verdict: Verdict) -> Var:
    """Compute the logit of the token `yes` minus the logit of the token `no`, [rows, 1], as the product of `x` and the difference of the
    rows of the head for the two tokens."""
    c, net = step.config, step.net
    table = net.weight(f"{_head(step)}.weight", c.vocab_size, c.hidden_size)
    yes, no = (net.as_f32(net.slice(table, 0, token, token + 1)) for token in (verdict.yes, verdict.no))
    return net.product(x, net.call(SUBTRACT, yes, no), format=WeightFormat(32))


def _head(step: Step) -> str:
    """Return the name of the head: that of the token embedding if both are tied."""
    return step.embedding if step.config.tie_word_embeddings else own_head(step.prefix)


def own_head(prefix: str) -> str:
    """Return the name of the head of a model whose embeddings are not tied. `prefix` begins the names of the decoder's weights."""
    return "language_model.lm_head" if prefix.startswith("language_model.") else "lm_head"


def scaled(step: Step, x: Var, factor: float) -> Var:
    return x if factor == 1.0 else step.net.scale(x, factor)


# --- layers of two branches --------------------------------------------------------------------------------------------

Branch = Callable[["Layer", Var], Var]  # computes a term that a layer adds to the residual stream, or the whole layer


def pre_norm(attention: Branch, feed: Branch, norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")) -> Branch:
    """Return a layer that has a norm before attention and one before `feed`."""

    def layer(at: Layer, x: Var) -> Var:
        x = residual(at, x, attention(at, norm(at, x, norms[0])))
        return residual(at, x, feed(at, norm(at, x, norms[1])))

    return layer


def post_norm(attention: Branch) -> Branch:
    """Return a layer that has a norm after attention and one after a gated MLP."""

    def layer(at: Layer, x: Var) -> Var:
        x = residual(at, x, norm(at, attention(at, x), "post_attention_layernorm"))
        return residual(at, x, norm(at, gated_mlp(at, x), "post_feedforward_layernorm"))

    return layer


def sandwiched(attention: Branch, feed: Branch, norms: tuple[str, str, str, str]) -> Branch:
    """Return a layer that has a norm before and after attention, and before and after `feed`. `norms` has their names in the order of
    application."""

    def layer(at: Layer, x: Var) -> Var:
        x = residual(at, x, norm(at, attention(at, norm(at, x, norms[0])), norms[1]))
        return residual(at, x, norm(at, feed(at, norm(at, x, norms[2])), norms[3]))

    return layer


def parallel(attention: Branch, feed: Branch) -> Branch:
    """Return a layer in which attention and `feed` read the same norm of the residual stream."""

    def layer(at: Layer, x: Var) -> Var:
        h = norm(at, x, "input_layernorm")
        return residual(at, residual(at, x, attention(at, h)), feed(at, h))

    return layer


def residual(layer: Layer, x: Var, branch: Var) -> Var:
    """Add the result of a branch, times the configuration's factor, to the residual stream."""
    return layer.step.net.add(x, scaled(layer.step, branch, layer.step.config.residual_scale))


# --- norms -------------------------------------------------------------------------------------------------------------


def norm(layer: Layer, x: Var, name: str) -> Var:
    return stream_norm(layer.step, x, layer.name(name))


def stream_norm(step: Step, x: Var, name: str) -> Var:
    """Normalize the residual stream by the configuration's kind of norm. The full names of the norm's weights begin with `name`."""
    c = step.config
    if c.norm is Norm.RMS:
        return step.net.rms_norm(x, name, c.hidden_size, c.norm_eps, offset=c.norm_offset)
    return step.net.layer_norm(x, name, c.hidden_size, c.norm_eps, offset=c.norm_offset, bias=c.norm is Norm.LAYER)


def head_norm(layer: Layer, x: Var, name: str) -> Var:
    """Apply an RMS norm to each head of `x[tokens, heads, head_dim]` separately. All heads have the same weights."""
    c = layer.step.config
    return layer.step.net.rms_norm(x, layer.name(name), layer.heads.size, c.norm_eps, offset=c.norm_offset)


def projection_norm(layer: Layer, x: Var, name: str, num_heads: int) -> Var:
    """Apply one RMS norm to all heads of `x[tokens, heads, head_dim]` together."""
    step, c = layer.step, layer.step.config
    size = num_heads * layer.heads.size
    flat = step.net.rms_norm(step.net.reshape(x, step.t, size), layer.name(name), size, c.norm_eps, offset=c.norm_offset)
    return step.net.reshape(flat, step.t, num_heads, layer.heads.size)


# --- attention ---------------------------------------------------------------------------------------------------------


def project_qkv(layer: Layer, h: Var, names: tuple[str, ...] = QKV) -> tuple[Var, Var, Var]:
    """Return queries [tokens, heads, head_dim], and keys and values [tokens, kv heads, head_dim]. If `names` is a single name, it is the
    name of a stacked projection."""
    net, c = layer.step.net, layer.step.config
    heads, kv_heads, size = c.num_heads, layer.heads.num_kv, layer.heads.size
    ends = heads, heads + kv_heads, heads + 2 * kv_heads
    sizes = [heads * size, kv_heads * size, kv_heads * size] if len(names) == 3 else [ends[2] * size]
    stacked = net.linear(h, [layer.name(n) for n in names], c.hidden_size, sizes, bias=c.qkv_bias)
    qkv = net.reshape(stacked, layer.step.t, ends[2], size)
    return net.slice(qkv, 1, 0, ends[0]), net.slice(qkv, 1, ends[0], ends[1]), net.slice(qkv, 1, ends[1], ends[2])


def rotate(layer: Layer, x: Var) -> Var:
    """Apply the layer's RoPE to `x[tokens, heads, head_dim]`, or return `x` if the layer has no RoPE."""
    rope = layer.step.config.rope_of_layer(layer.number)
    return x if rope is None else layer.step.net.call(ROPE, x, *layer.step.angles_of(rope), interleaved=rope.interleaved)


def attend(layer: Layer, q: Var, k: Var, v: Var, out: str = OUT, *, gate: Var | None = None) -> Var:
    """Append keys and values to the cache, attend to the cache, and project the result. If `gate[tokens, heads * head_dim]` is given, its
    sigmoid scales each element of the attention's result before the projection."""
    append(layer, k, v)
    return attend_kept(layer, q, out, gate=gate)


def append(layer: Layer, k: Var, v: Var | None = None) -> None:
    """Append keys and values to the cache. If each value is the beginning of its key, append only keys; `v` is then None."""
    step, net = layer.step, layer.step.net
    cache, index = layer.cache
    pages, *scales = step.appended.get(cache, cache.held)
    if v is None:
        appended = net.call(KEY_APPEND, pages, k, cache.slots, index, *scales)
    else:
        appended = net.call(KV_APPEND, pages, k, v, cache.slots, index, *scales)
    step.appended[cache] = (net.field(appended, 0), net.field(appended, 1)) if scales else (appended,)


def attend_kept(layer: Layer, q: Var, out: str = OUT, *, gate: Var | None = None) -> Var:
    """Attend to the cached keys and values of this layer, or of the layer whose keys and values it reads, and project the result. For
    `gate`, see `attend`."""
    step, c, net = layer.step, layer.step.config, layer.step.net
    size = c.num_heads * layer.heads.size
    mixed = net.reshape(mix(layer, q), step.t, size)
    if gate is not None:
        mixed = net.call(MULTIPLY, mixed, net.call(SIGMOID, gate))
    return net.output_linear(mixed, layer.name(out), size, c.hidden_size, bias=c.output_bias)


def mix(layer: Layer, q: Var) -> Var:
    """Attend to the cache. Return each head's weighted sum of values: [tokens, heads, size of a value]."""
    step, c, net = layer.step, layer.step.config, layer.step.net
    (cache, index), window = layer.cache, c.windows[layer.number] or 0
    places = step.places_of(cache, window)
    pages, *scales = step.appended[cache]
    sinks = [net.vector(layer.name(SINKS), c.num_heads)] if c.sinks else []
    return net.call(
        PAGED_ATTENTION,
        q,
        pages,
        places.page_tables,
        places.seq_ids,
        places.positions,
        index,
        *scales,
        *sinks,
        scale=c.attention_scale,
        window=0 if places.has_first_positions else window,
        softcap=c.attention_softcap or 0.0,
        value_size=layer.heads.value_size or 0,
        exact=not net.rounds,
    )


def attention_to_audio(step: Step, cache: HeardCache, rows: Var, q: Var, number: int, head: int) -> Var:
    """Return the attention weights of the tokens `rows` over all frames, [rows, frames], in head `head` of layer `number`. `q` has the
    queries of all tokens."""
    net, group, count = step.net, cache.group, cache.group.num_parts
    held, *scales = cache.held
    parts, heads, h, i32 = _extent(held, 2), group.num_kv_heads, _extent(rows, 0), "i32"
    pages = net.call(TAKE, cache.pages, net.call(TAKE, step.batch.seq_ids, rows, axis=0), axis=0)
    firsts = net.call(MULTIPLY, net.call(EXPAND_DIMS, pages, axes=1), ScalarValue(Dim.of(count), i32))
    places = net.add(firsts, Constant(np.arange(count, dtype=np.int32)[None]))  # [rows, parts]
    first = ScalarValue(parts * (2 * group.layers.index(number)), i32)
    places = net.add(net.call(MULTIPLY, net.add(places, first), ScalarValue(Dim.of(heads), i32)), ScalarValue(Dim.of(head), i32))
    flat = net.reshape(held, parts * (2 * len(group.layers) * heads), PAGE * group.head_dim)
    keys = net.reshape(net.as_f32(net.call(TAKE, flat, places, axis=0)), h, count, group.head_dim, PAGE)
    for scale in scales:
        factors = net.call(TAKE, net.reshape(scale, parts * (2 * len(group.layers) * heads), PAGE), places, axis=0)
        keys = net.call(MULTIPLY, keys, net.reshape(factors, h, count, 1, PAGE))
    queries = net.reshape(net.slice(net.call(TAKE, q, rows, axis=0), 1, head, head + 1), h, 1, group.head_dim, 1)
    scores = net.reshape(net.call(SUM, net.call(MULTIPLY, keys, queries), axes=[2]), h, count * PAGE)
    return net.call(SOFTMAX, net.scale(net.slice(scores, 1, 0, group.num_frames), step.config.attention_scale))


def _extent(x: Var, axis: int) -> Dim:
    assert isinstance(x.type, TensorType) and x.type.shape is not None, x
    return x.type.shape[axis]


def hear(layer: Layer, q: Var, out: str) -> Var:
    """Attend to the audio of each sequence, and project. In the program `both`, record the attention of aligned heads in
    `step.attended`."""
    step, c, net = layer.step, layer.step.config, layer.step.net
    cache, places = step.batch.heard, step.heard_places()
    assert cache is not None
    index = ScalarValue(Dim.of(cache.group.layers.index(layer.number)))
    at = places.page_tables, places.seq_ids, places.positions, index
    held, *scales = cache.held
    mixed = net.call(PAGED_ATTENTION, q, held, *at, *scales, scale=c.attention_scale, exact=not net.rounds)
    if c.hearing is not None and step.batch.hidden_rows is not None:
        heads = (head for number, head in c.hearing.aligned if number == layer.number)
        step.attended += [attention_to_audio(step, cache, step.batch.hidden_rows, q, layer.number, head) for head in heads]
    size = c.num_heads * c.head_dim
    return net.linear(net.reshape(mixed, step.t, size), layer.name(out), size, c.hidden_size, bias=c.output_bias)


def attention(layer: Layer, h: Var, names: tuple[str, ...] = QKV, out: str = OUT) -> Var:
    """Attend with rotary positions if the layer has them, without norms of queries and keys. Queries grow with their positions if the
    configuration has a `query_growth`."""
    q, k, v = project_qkv(layer, h, names)
    return attend(layer, grow(layer, rotate(layer, q)), rotate(layer, k), v, out)


def grow(layer: Layer, q: Var) -> Var:
    """Scale the queries by their positions if the configuration has a `query_growth`."""
    growth, step, net = layer.step.config.query_growth, layer.step, layer.step.net
    if growth is None:
        return q
    positions = net.add(step.batch.positions, ScalarValue(growth.ahead, "i32")) if growth.ahead else step.batch.positions
    contexts = net.call(FLOOR_DIVIDE, positions, ScalarValue(growth.original_context, "i32"))
    logs = net.call(LOG, net.call(ADD, net.call(CAST, contexts, dtype="f32"), ScalarValue(1.0, "f32")))
    factor = net.call(ADD, net.scale(logs, growth.beta), ScalarValue(1.0, "f32"))
    return net.call(MULTIPLY, q, net.reshape(factor, step.t, 1, 1))


def head_norm_attention(layer: Layer, h: Var) -> Var:
    """Attend with rotary positions, after a norm of each query and key head."""
    q, k, v = project_qkv(layer, h)
    q, k = head_norm(layer, q, "self_attn.q_norm"), head_norm(layer, k, "self_attn.k_norm")
    return attend(layer, rotate(layer, q), rotate(layer, k), v)


def layer_norm_attention(layer: Layer, h: Var, norms: tuple[str, str]) -> Var:
    """Attend with rotary positions. If the model has norms of heads, each query and key head has a layer norm with weights of its own."""
    net, c = layer.step.net, layer.step.config
    q, k, v = project_qkv(layer, h)
    if c.head_norms:
        q = net.layer_norm_by_head(q, layer.name(norms[0]), c.num_heads, c.head_dim, c.norm_eps)
        k = net.layer_norm_by_head(k, layer.name(norms[1]), c.num_kv_heads, c.head_dim, c.norm_eps)
    return attend(layer, rotate(layer, q), rotate(layer, k), v)


# --- feed-forward ------------------------------------------------------------------------------------------------------


def gated_mlp(layer: Layer, h: Var, names: tuple[str, ...] = GATE_UP, down: str = DOWN, size: int | None = None) -> Var:
    """Compute `down(activation(gate(h)) * up(h))`. If `names` is a single name, it is the name of a stacked projection. `size` overrides
    the intermediate size of the configuration."""
    net, c = layer.step.net, layer.step.config
    ffn = size or c.intermediate_size_of(layer.number)
    if len(names) == 2:
        gate, up = (net.linear(h, layer.name(n), c.hidden_size, ffn, bias=c.mlp_bias) for n in names)
    else:
        both = net.linear(h, layer.name(names[0]), c.hidden_size, 2 * ffn, bias=c.mlp_bias)
        gate, up = net.slice(both, 1, 0, ffn), net.slice(both, 1, ffn, 2 * ffn)
    gated = net.call(MULTIPLY, activated(layer, gate), up)
    return net.output_linear(gated, layer.name(down), ffn, c.hidden_size, bias=c.mlp_bias)


def mlp(layer: Layer, h: Var, up: str = "mlp.up_proj", down: str = DOWN, size: int | None = None) -> Var:
    """Compute `down(activation(up(h)))`. `size` overrides the intermediate size of the configuration."""
    net, c = layer.step.net, layer.step.config
    ffn = size or c.intermediate_size_of(layer.number)
    wide = net.linear(h, layer.name(up), c.hidden_size, ffn, bias=c.mlp_bias)
    return net.output_linear(activated(layer, wide), layer.name(down), ffn, c.hidden_size, bias=c.mlp_bias)


def activated(layer: Layer, x: Var) -> Var:
    """Apply the activation of the layer's MLP to each element."""
    net, kind = layer.step.net, layer.step.config.activation
    if kind is Activation.RELU2:
        positive = net.call(RELU, x)
        return net.call(MULTIPLY, positive, positive)
    return xielu(net, x, layer.name("mlp.act_fn")) if kind is Activation.XIELU else plain_activation(net, kind, x)


def plain_activation(net: Net, kind: Activation, x: Var) -> Var:
    """Apply the activation `kind` to each element. RELU2 and XIELU are not supported: only `activated` applies them."""
    if kind is Activation.QUICK_GELU:
        return net.call(MULTIPLY, x, net.call(SIGMOID, net.scale(x, 1.702)))
    return net.call(ACTIVATIONS[kind], x)
