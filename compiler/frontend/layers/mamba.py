"""Mamba-2: a scan whose step sizes depend on the token, with a gated output."""

from __future__ import annotations

import numpy as np

from compiler.frontend.layers.decoder import Layer
from compiler.frontend.layers.states import GATE_FORMAT, activated_heads, convolution, forgetting, scan, step_sizes
from compiler.frontend.recurrence import Recurrence
from compiler.ir.graph.atoms import Constant, Var
from compiler.ops.elementwise import MULTIPLY, SILU


def mamba(layer: Layer, h: Var, name: str) -> Var:
    """Apply Mamba-2 with its projections to `h[tokens, hidden size]`. `name` is the name of the Mamba-2 module within the layer."""
    step, net, r = layer.step, layer.step.net, layer.step.config.recurrence
    assert r is not None, step.config
    gate, mixed, raw = _project(layer, h, f"{name}.in_proj", r)
    y = net.reshape(_scanned(layer, mixed, raw, name, r), step.t, r.values)
    if r.has_norm and r.gated_behind_norm:
        y = _grouped_norm(layer, y, f"{name}.norm", r)
    y = net.call(MULTIPLY, y, net.call(SILU, gate))
    if r.has_norm and not r.gated_behind_norm:
        y = _grouped_norm(layer, y, f"{name}.norm", r)
    return net.linear(y, layer.name(f"{name}.out_proj"), r.values, step.config.hidden_size, bias=r.output_bias)


def _project(layer: Layer, h: Var, name: str, r: Recurrence) -> tuple[Var, Var, Var]:
    """Return the gate, the input of the convolution, and the raw step sizes. Checkpoints store the three projections in one matrix."""
    net, size = layer.step.net, layer.step.config.hidden_size
    wide, rows = r.values + r.channels, r.values + r.channels + r.num_heads
    w = net.weight(layer.name(f"{name}.weight"), rows, size)
    bias = net.vector(layer.name(f"{name}.bias"), rows) if r.input_bias else None
    first, last = (None, None) if bias is None else (net.slice(bias, 0, 0, wide), net.slice(bias, 0, wide, rows))
    both = net.product(h, net.slice(w, 0, 0, wide), first)
    raw = net.product(h, net.slice(w, 0, wide, rows), last, format=GATE_FORMAT)
    if r.factors is not None:
        sizes = r.values, r.values, r.keys, r.keys
        both = net.call(MULTIPLY, both, Constant(np.repeat(np.array(r.factors[:4], np.float32), sizes)))
        raw = net.scale(raw, r.factors[4])
    return net.slice(both, 1, 0, r.values), net.slice(both, 1, r.values, wide), raw


def _scanned(layer: Layer, mixed: Var, raw: Var, name: str, r: Recurrence) -> Var:
    """Apply the convolution and the scan to values, keys (B) and queries (C), and add the skip connection (D)."""
    net = layer.step.net
    mixed = convolution(layer, mixed, f"{name}.conv1d", r.channels, r.taps, bias=r.convolution_bias)
    v = activated_heads(layer, mixed, 0, r.num_heads, r.size)
    k, q = (activated_heads(layer, mixed, begin, r.num_keys, r.key_size) for begin in (r.values, r.values + r.keys))
    steps = step_sizes(layer, raw, f"{name}.dt_bias", r)
    decay = forgetting(layer, steps, f"{name}.A_log", r)
    found = scan(layer, q, k, net.call(MULTIPLY, v, net.reshape(steps, layer.step.t, r.num_heads, 1)), decay)
    skipped = net.call(MULTIPLY, v, net.reshape(net.vector(layer.name(f"{name}.D"), r.num_heads), r.num_heads, 1))
    return net.add(found, skipped)


def _grouped_norm(layer: Layer, x: Var, name: str, r: Recurrence) -> Var:
    """Apply an RMS norm to each group of heads that share a key. Each element has its own weight."""
    net, t, size = layer.step.net, layer.step.t, r.values // r.num_keys
    weight = net.vector(layer.name(f"{name}.weight"), r.values)
    normed = net.unit_norm(net.reshape(x, t, r.num_keys, size), size, layer.step.config.norm_eps)
    return net.call(MULTIPLY, net.reshape(normed, t, r.values), weight)
