"""The gated delta rule: linear attention whose state predicts each value, and is corrected by the error of the prediction."""

from __future__ import annotations

import numpy as np

from compiler.frontend.layers.decoder import Layer
from compiler.frontend.layers.nn import Net
from compiler.frontend.layers.states import activated_heads, convolution, forgetting, scan, step_sizes
from compiler.ir.graph.atoms import Constant, Var
from compiler.ops.elementwise import MULTIPLY, SIGMOID, SILU
from compiler.ops.manipulate import CONCAT
from compiler.ops.normalize import RMS_NORM

EPS = 1e-6  # epsilon of the normalisation of queries and keys


def gated_delta(layer: Layer, mixed: Var, z: Var, b: Var, a: Var) -> Var:
    """Apply a convolution, the gated delta rule, a norm, a gate and the output projection. `mixed[tokens, channels]` has queries, keys and
    values. `z[tokens, values]` gates the result. `b[tokens, heads]` controls how strongly a token corrects the state, and `a[tokens,
    heads]` how fast the state decays."""
    step, net, r = layer.step, layer.step.net, layer.step.config.recurrence
    assert r is not None, step.config
    mixed = convolution(layer, mixed, "linear_attn.conv1d", r.channels, r.taps)
    q, k = (activated_heads(layer, mixed, begin, r.num_keys, r.key_size) for begin in (0, r.keys))
    v = activated_heads(layer, mixed, 2 * r.keys, r.num_heads, r.size)
    q, k = _of_length(net, q, r.key_size, r.key_size**-0.5), _of_length(net, k, r.key_size, 1.0)
    if r.tiled:
        q, k = (net.call(CONCAT, *[x] * (r.num_heads // r.num_keys), axis=1) for x in (q, k))
    decay = forgetting(layer, step_sizes(layer, a, "linear_attn.dt_bias", r), "linear_attn.A_log", r)
    out = scan(layer, q, k, v, decay, net.call(SIGMOID, b))
    normed = net.rms_norm(out, layer.name("linear_attn.norm.weight").removesuffix(".weight"), r.size, step.config.norm_eps)
    gated = net.call(MULTIPLY, net.reshape(normed, step.t, r.values), net.call(SILU, z))
    return net.linear(gated, layer.name("linear_attn.out_proj"), r.values, step.config.hidden_size)


def _of_length(net: Net, x: Var, size: int, length: float) -> Var:
    """Scale vectors to the length `length`. RMS_NORM divides by the root of a mean, not of a sum; its weight and epsilon are scaled
    accordingly."""
    weight = Constant(np.full(size, length * size**-0.5, np.float32))
    return net.call(RMS_NORM, x, weight, eps=EPS / size)
