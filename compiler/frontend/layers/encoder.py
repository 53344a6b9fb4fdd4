"""The parts from which families of encoders compose their layers. Names of weights are those of the checkpoint, relative to the layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiler.frontend.config import ModelConfig, Norm
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net
from compiler.frontend.rope import Rope
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, Var
from compiler.ir.op import OpDef
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import ADD, MULTIPLY, TANH
from compiler.ops.embedding import ROPE, ROPE_ANGLES
from compiler.ops.manipulate import CONCAT


@dataclass(slots=True)
class Texts:
    """The inputs of an encoder."""

    tokens: Var
    positions: Var  # position of each token in its text
    text_ids: Var  # index of each token's text
    starts: Var  # index of the first token of each text, followed by the number of tokens
    segments: Var | None = None  # segment of each token; None: the model does not distinguish the texts of a pair
    # `angles` has the cosines and sines per rope, computed once for all layers.
    angles: dict[Rope, tuple[Var, Var]] = field(default_factory=dict[Rope, tuple[Var, Var]])

    @property
    def params(self) -> tuple[Var, ...]:
        told = () if self.segments is None else (self.segments,)
        return (self.tokens, self.positions, self.text_ids, self.starts, *told)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """A layer of an encoder under construction."""

    net: Net
    config: ModelConfig
    texts: Texts
    t: DimVar
    bias: tuple[Atom, ...]  # bias on attention scores, which depends on the distance of two tokens; empty: no bias
    prefix: str  # prefix of the names of the layer's weights
    number: int

    def name(self, suffix: str) -> str:
        return self.prefix + suffix


@dataclass(frozen=True, slots=True)
class Stem:
    """The builder, configuration and texts from which an encoder computes the input of its first layer."""

    net: Net
    config: ModelConfig
    texts: Texts
    prefix: str  # prefix of the names of all weights


@dataclass(frozen=True, slots=True)
class Head:
    """The builder and configuration of a classification head."""

    net: Net
    config: ModelConfig
    prefix: str  # prefix of the names of the encoder's weights, which the names of the head's own weights lack

    @property
    def num_classes(self) -> int:
        assert self.config.classes is not None
        return len(self.config.classes.names)


def embedded(stem: Stem, tokens: str = "word_embeddings", norm: str = "embeddings.LayerNorm") -> Var:
    """Add the token embeddings and, if the model has them, position and segment embeddings. Then apply a norm."""
    net, c, texts, at = stem.net, stem.config, stem.texts, f"{stem.prefix}embeddings."
    assert c.encoder is not None
    size = c.encoder.embedding_size or c.hidden_size
    x = net.embedding(f"{at}{tokens}", texts.tokens, c.vocab_size, size)
    if c.encoder.num_positions:
        places: Atom = texts.positions
        if c.encoder.position_offset:
            places = net.call(ADD, places, ScalarValue(Dim.of(c.encoder.position_offset), "i32"))
        x = net.add(x, net.embedding(f"{at}position_embeddings", places, c.encoder.num_positions, size))
    if c.encoder.num_segments:
        x = net.add(x, _segments(stem, f"{at}token_type_embeddings", size))
    return stem_norm(stem, x, norm, size)


def _segments(stem: Stem, name: str, size: int) -> Var:
    """Return the embedding of each token's segment, [tokens, size]. Without the input `segments`, all tokens are in the first segment:
    return its embedding, [1, size]."""
    net, encoder = stem.net, stem.config.encoder
    assert encoder is not None
    if stem.texts.segments is not None:
        return net.embedding(name, stem.texts.segments, encoder.num_segments, size)
    return net.as_f32(net.slice(net.weight(f"{name}.weight", encoder.num_segments, size), 0, 0, 1))


def stem_norm(stem: Stem, x: Var, name: str, size: int | None = None) -> Var:
    return _normed(stem.net, stem.config, x, stem.prefix + name, size or stem.config.hidden_size)


def classify(head: Head, x: Var, dense: str, out: str, activation: OpDef = TANH) -> Var:
    """Apply the projections `dense` and `out`, with an activation between them. Both names are full names of weights."""
    net, size = head.net, head.config.hidden_size
    hidden = net.call(activation, net.linear(x, dense, size, size, bias=True))
    return net.linear(hidden, out, size, head.num_classes, bias=True)


def norm(layer: EncoderLayer, x: Var, name: str) -> Var:
    return _normed(layer.net, layer.config, x, layer.name(name), layer.config.hidden_size)


def _normed(net: Net, c: ModelConfig, x: Var, name: str, size: int) -> Var:
    if c.norm is Norm.RMS:
        return net.rms_norm(x, name, size, c.norm_eps, offset=c.norm_offset)
    return net.layer_norm(x, name, size, c.norm_eps, bias=c.norm is not Norm.LAYER_WITHOUT_BIAS)


def head_norm(layer: EncoderLayer, x: Var, name: str) -> Var:
    """Apply an RMS norm to each head of `x[tokens, heads, head_dim]` separately. All heads have the same weights."""
    c = layer.config
    return layer.net.rms_norm(x, layer.name(name), c.head_dim, c.norm_eps, offset=c.norm_offset)


def project(layer: EncoderLayer, x: Var, name: str, heads: int | None = None) -> Var:
    """Project to heads of queries, keys or values: [tokens, heads, head_dim]. The number `heads` defaults to the number of query heads."""
    c, heads = layer.config, heads or layer.config.num_heads
    flat = layer.net.linear(x, layer.name(name), c.hidden_size, heads * c.head_dim, bias=c.qkv_bias)
    return layer.net.reshape(flat, layer.t, heads, c.head_dim)


def project_stacked(layer: EncoderLayer, x: Var, name: str) -> tuple[Var, Var, Var]:
    """Return queries, keys and values from one stacked projection."""
    net, c = layer.net, layer.config
    heads = project(layer, x, name, 3 * c.num_heads)
    q, k, v = (net.slice(heads, 1, part * c.num_heads, (part + 1) * c.num_heads) for part in range(3))
    return q, k, v


def rotate(layer: EncoderLayer, x: Var) -> Var:
    """Apply the layer's RoPE to `x[tokens, heads, head_dim]`, or return `x` if the layer has no RoPE."""
    rope, net, texts = layer.config.rope_of_layer(layer.number), layer.net, layer.texts
    if rope is None:
        return x
    if rope not in texts.angles:
        frequencies, scale = rope.frequencies(layer.config.max_context)
        both = net.call(ROPE_ANGLES, texts.positions, Constant(frequencies), scale=scale)
        texts.angles[rope] = net.field(both, 0), net.field(both, 1)
    return net.call(ROPE, x, *texts.angles[rope], interleaved=rope.interleaved)


def attend(layer: EncoderLayer, q: Var, k: Var, v: Var, out: str) -> Var:
    """Attend within each text, with the layer's bias on scores if it has one, and project the result."""
    net, c, texts, size = layer.net, layer.config, layer.texts, layer.config.num_heads * layer.config.head_dim
    k, v = (_for_each_query(layer, heads) for heads in (k, v))
    mixed = net.call(RAGGED_ATTENTION, q, k, v, texts.text_ids, texts.starts, *layer.bias, scale=c.attention_scale)
    return net.linear(net.reshape(mixed, layer.t, size), layer.name(out), size, c.hidden_size, bias=c.output_bias)


def _for_each_query(layer: EncoderLayer, heads: Var) -> Var:
    """Return one key or value head per query head: copy a head that several query heads share."""
    net, c = layer.net, layer.config
    if c.num_kv_heads == c.num_heads:
        return heads
    single = [net.slice(heads, 1, number, number + 1) for number in range(c.num_kv_heads)]
    return net.call(CONCAT, *(head for head in single for _ in range(c.num_heads // c.num_kv_heads)), axis=1)


def mlp(layer: EncoderLayer, x: Var, up: str = "intermediate.dense", down: str = "output.dense") -> Var:
    """Compute `down(activation(up(x)))`. Both layers have a bias."""
    net, c = layer.net, layer.config
    wide = net.linear(x, layer.name(up), c.hidden_size, c.intermediate_size, bias=True)
    return net.linear(plain_activation(net, c.activation, wide), layer.name(down), c.intermediate_size, c.hidden_size, bias=True)


def gated_mlp(layer: EncoderLayer, x: Var, gate: str, up: str, down: str) -> Var:
    """Compute `down(activation(gate(x)) * up(x))`."""
    net, c = layer.net, layer.config
    wide, scaled = (net.linear(x, layer.name(name), c.hidden_size, c.intermediate_size, bias=c.mlp_bias) for name in (gate, up))
    gated = net.call(MULTIPLY, plain_activation(net, c.activation, wide), scaled)
    return net.linear(gated, layer.name(down), c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
