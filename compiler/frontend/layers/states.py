"""The parts of layers that keep a recurrent state per sequence: convolutions and scans."""

from __future__ import annotations

from compiler.frontend.layers.decoder import Layer
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.frontend.recurrence import Recurrence
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.types import TensorType
from compiler.ops.elementwise import ABS, ADD, EXP, LOG, MULTIPLY, NEGATIVE, RELU, SILU
from compiler.ops.scan import STATE_SCAN
from compiler.ops.states import CAUSAL_CONV, CONV_TAPS, INPUT_TAILS, STATE_READ, STATE_WRITE

GATE_FORMAT = WeightFormat(32)  # f32, since an error in the decay of a state grows with every token
INPUTS, MATRICES = 0, 1  # the parts of a state: see `compiler/frontend/cache_groups.py`


def convolution(layer: Layer, x: Var, name: str, size: int, taps: int, *, bias: bool = False) -> Var:
    """Apply a causal convolution to `x[tokens, size]`. For each token after which the state is saved, write the last inputs up to this
    token to the state. Each channel has separate taps. `bias` says whether the checkpoint has a bias."""
    net, batch, (states, index) = layer.step.net, layer.step.batch, layer.state
    held = _held(layer)[INPUTS]
    before = net.reshape(net.call(STATE_READ, held, states.sources, index), _length(states.sources), taps - 1, size)
    tails = net.call(INPUT_TAILS, x, before, batch.seq_ids, batch.starts, batch.saved)
    values = net.reshape(tails, _length(states.pages), (taps - 1) * size)
    _keep(layer, INPUTS, net.call(STATE_WRITE, held, values, states.pages, index))
    weight = net.call(CONV_TAPS, net.weight(layer.name(f"{name}.weight"), size, 1, taps))
    mixed = net.call(CAUSAL_CONV, x, weight, before, batch.seq_ids, batch.starts)
    return net.add(mixed, net.vector(layer.name(f"{name}.bias"), size)) if bias else mixed


def scan(layer: Layer, q: Var, k: Var, v: Var, decay: Var, *beta: Var) -> Var:
    """Scan `v[tokens, heads, size]` with the layer's state matrices; see `compiler/ops/scan.py`."""
    net, batch, (states, index) = layer.step.net, layer.step.batch, layer.state
    lists = states.sources, batch.starts, batch.saved, states.pages
    both = net.call(STATE_SCAN, _held(layer)[MATRICES], q, k, v, decay, *lists, index, *beta)
    _keep(layer, MATRICES, net.field(both, 1))
    return net.field(both, 0)


def activated_heads(layer: Layer, mixed: Var, begin: int, count: int, size: int) -> Var:
    """Apply SiLU to `count` heads of this size that begin at column `begin`: [tokens, count, size]. The compiler fuses a slice with a SiLU
    of its own, but would not fuse slices with one SiLU of all columns."""
    net = layer.step.net
    return net.reshape(net.call(SILU, net.slice(mixed, 1, begin, begin + count * size)), layer.step.t, count, size)


def step_sizes(layer: Layer, x: Var, bias: str, r: Recurrence) -> Var:
    """Return the step size of each head, [tokens, heads]: `softplus(x + bias)`."""
    net = layer.step.net
    return softplus(net, net.add(x, net.vector(layer.name(bias), r.num_heads)))


def forgetting(layer: Layer, steps: Var, rate: str, r: Recurrence) -> Var:
    """Return the factors by which the states of heads decay at each token, [tokens, heads]: `exp(-exp(rate) * steps)`."""
    net = layer.step.net
    rates = net.call(NEGATIVE, net.call(EXP, net.vector(layer.name(rate), r.num_heads)))
    return net.call(EXP, net.call(MULTIPLY, rates, steps))


def softplus(net: Net, x: Var) -> Var:
    """Compute `log(1 + exp(x))` without overflow."""
    tail = net.call(LOG, net.call(ADD, net.call(EXP, net.call(NEGATIVE, net.call(ABS, x))), ScalarValue(1.0, "f32")))
    return net.add(net.call(RELU, x), tail)


def _held(layer: Layer) -> tuple[Atom, ...]:
    states, _ = layer.state
    return layer.step.appended.get(states, states.held)


def _keep(layer: Layer, part: int, kept: Var) -> None:
    """Record the new value of one part of the state, which the next layer of the group updates."""
    held = _held(layer)
    layer.step.appended[layer.state[0]] = *held[:part], kept, *held[part + 1 :]


def _length(x: Var) -> Dim:
    assert isinstance(x.type, TensorType) and x.type.shape is not None, x
    return x.type.shape[0]
