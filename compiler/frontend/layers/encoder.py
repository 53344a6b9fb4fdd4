"""The parts that families of encoders compose their layers from. Names of weights are those of the checkpoint, relative to the layer."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import ACTIVATIONS
from compiler.frontend.layers.nn import Net
from compiler.ir.dims import DimVar
from compiler.ir.graph.atoms import Var
from compiler.ops.attention.ragged import RAGGED_ATTENTION


@dataclass(slots=True)
class Texts:
    """The inputs of an encoder."""

    tokens: Var
    positions: Var
    text_ids: Var
    starts: Var

    @property
    def params(self) -> tuple[Var, ...]:
        return (self.tokens, self.positions, self.text_ids, self.starts)


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
