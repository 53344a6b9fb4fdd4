"""The parts that families of encoders compose their layers from. Names of weights are those of the checkpoint, relative to the layer."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import ACTIVATIONS
from compiler.frontend.layers.nn import Net
from compiler.ir.dims import DimVar
from compiler.ir.graph.atoms import Var
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import TANH


@dataclass(slots=True)
class Texts:
    """The inputs of an encoder."""

    tokens: Var
    positions: Var
    text_ids: Var
    starts: Var
    segments: Var | None = None  # of tokens, where a model tells the texts of a pair apart

    @property
    def params(self) -> tuple[Var, ...]:
        told = () if self.segments is None else (self.segments,)
        return (self.tokens, self.positions, self.text_ids, self.starts, *told)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    net: Net
    config: ModelConfig
    texts: Texts
    t: DimVar
    bias: tuple[Var, ...]  # of attention by distance, or nothing
    prefix: str  # of the layer's weights

    def name(self, suffix: str) -> str:
        return self.prefix + suffix


@dataclass(frozen=True, slots=True)
class Head:
    """Where the weights of a classification head are."""

    net: Net
    config: ModelConfig
    prefix: str  # of the encoder's own weights

    @property
    def num_classes(self) -> int:
        assert self.config.classes is not None
        return len(self.config.classes.names)


def classify(head: Head, x: Var, dense: str, out: str) -> Var:
    """Two projections with a hyperbolic tangent between them. Both names are whole."""
    net, size = head.net, head.config.hidden_size
    hidden = net.call(TANH, net.linear(x, dense, size, size, bias=True))
    return net.linear(hidden, out, size, head.num_classes, bias=True)


def norm(layer: EncoderLayer, x: Var, name: str) -> Var:
    return layer.net.layer_norm(x, layer.name(name), layer.config.hidden_size, layer.config.norm_eps)


def project(layer: EncoderLayer, x: Var, name: str) -> Var:
    """Heads of queries, keys or values: [tokens, heads, head_dim]."""
    c = layer.config
    flat = layer.net.linear(x, layer.name(name), c.hidden_size, c.hidden_size, bias=True)
    return layer.net.reshape(flat, layer.t, c.num_heads, c.head_dim)


def attend(layer: EncoderLayer, q: Var, k: Var, v: Var, out: str) -> Var:
    """Attention within each text, projected."""
    net, c, texts = layer.net, layer.config, layer.texts
    mixed = net.call(RAGGED_ATTENTION, q, k, v, texts.text_ids, texts.starts, *layer.bias, scale=c.attention_scale)
    return net.linear(net.reshape(mixed, layer.t, c.hidden_size), layer.name(out), c.hidden_size, c.hidden_size, bias=True)


def mlp(layer: EncoderLayer, x: Var) -> Var:
    net, c = layer.net, layer.config
    wide = net.linear(x, layer.name("intermediate.dense"), c.hidden_size, c.intermediate_size, bias=True)
    return net.linear(net.call(ACTIVATIONS[c.activation], wide), layer.name("output.dense"), c.intermediate_size, c.hidden_size, bias=True)
