"""Layers that keep a state per sequence in the place of keys and values."""

from __future__ import annotations

from compiler.frontend.layers.decoder import Layer
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Var
from compiler.ir.types import TensorType
from compiler.ops.states import CAUSAL_CONV, INPUT_TAILS, STATE_READ, STATE_WRITE


def read_state(layer: Layer) -> Var:
    """The state with which each sequence begins this step, [sequences, size]."""
    states, index = layer.state
    (held,) = layer.step.appended.get(states, states.held)
    return layer.step.net.call(STATE_READ, held, states.sources, index)


def keep_state(layer: Layer, values: Var) -> None:
    """Keep the states behind the saved tokens, [saved, size]."""
    states, index = layer.state
    (held,) = layer.step.appended.get(states, states.held)
    layer.step.appended[states] = (layer.step.net.call(STATE_WRITE, held, values, states.pages, index),)


def short_convolution(layer: Layer, x: Var, weight: str) -> Var:
    """A causal convolution of each of the elements of `x[tokens, size]` with its own taps."""
    step, net, size = layer.step, layer.step.net, layer.step.config.hidden_size
    batch, convolution = step.batch, step.config.convolution
    assert convolution is not None, step.config
    taps, states = convolution.taps, layer.state[0]
    before = net.reshape(read_state(layer), _length(states.sources), taps - 1, size)
    tails = net.call(INPUT_TAILS, x, before, batch.seq_ids, batch.starts, batch.saved)
    keep_state(layer, net.reshape(tails, _length(states.pages), (taps - 1) * size))
    kernel = net.as_f32(net.reshape(net.weight(layer.name(weight), size, 1, taps), size, taps))
    return net.call(CAUSAL_CONV, x, kernel, before, batch.seq_ids, batch.starts)


def _length(x: Var) -> Dim:
    assert isinstance(x.type, TensorType) and x.type.shape is not None, x
    return x.type.shape[0]
