"""Multi-head latent attention: keys and values of all heads are projections of one latent vector per token. Pages store this vector and a
rotated part of the key, which all heads share.

No head's key is ever computed. Each head's query is multiplied by the transpose of the head's key matrix, and then scored against the
latent vectors themselves. The weighted sum of the latent vectors is multiplied by the head's value matrix. The cache has one key per token:
the latent vector, and then the part that is rotated by position. The value is the latent vector, the beginning of the key.
"""

from __future__ import annotations

import numpy as np

from compiler.frontend.config import Latent
from compiler.frontend.layers.decoder import OUT, Layer, append, mix, rotate
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, ShapeValue, Var
from compiler.ir.types import TensorType
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, PERMUTE_DIMS

EPS = 1e-6  # epsilon of the norms of latent vectors; the configuration's norm_eps does not apply to them


def latent_attention(layer: Layer, h: Var) -> Var:
    """Append the latent vectors and the rotated parts of keys to the cache, attend to the cache, and project."""
    step, net, c, m = layer.step, layer.step.net, layer.step.config, layer.step.config.latent
    assert m is not None, c
    joint = net.linear(h, layer.name("self_attn.kv_a_proj_with_mqa"), c.hidden_size, m.kept_size, bias=c.qkv_bias)
    latent = net.rms_norm(net.slice(joint, 1, 0, m.rank), layer.name("self_attn.kv_a_layernorm"), m.rank, EPS)
    turned = rotate(layer, net.reshape(net.slice(joint, 1, m.rank, m.kept_size), step.t, 1, m.rotated_size))
    kept = net.call(CONCAT, net.reshape(latent, step.t, 1, m.rank), turned, axis=2)
    append(layer, kept)

    of_keys, of_values = _matrices(layer, m)
    q = _queries(layer, h, m)
    asked = _by_head(layer, net.slice(q, 2, 0, m.plain_size), of_keys)
    turned = rotate(layer, net.slice(q, 2, m.plain_size, m.plain_size + m.rotated_size))
    found = mix(layer, net.call(CONCAT, asked, turned, axis=2))
    values = _by_head(layer, found, of_values)
    size = c.num_heads * m.value_size
    return net.linear(net.reshape(values, step.t, size), layer.name(OUT), size, c.hidden_size, bias=c.output_bias)


def _matrices(layer: Layer, m: Latent) -> tuple[Var, Var]:
    """Return the transposed key matrices of all heads, [heads, rank, plain size], and the value matrices, [heads, value size, rank]."""
    net, heads, size = layer.step.net, layer.step.config.num_heads, m.plain_size + m.value_size
    if layer.step.config.apart:
        of_keys = net.weight(layer.name("self_attn.k_b_proj.weight"), heads, m.rank, m.plain_size)
        return of_keys, net.weight(layer.name("self_attn.v_b_proj.weight"), heads, m.value_size, m.rank)
    both = net.reshape(net.weight(layer.name("self_attn.kv_b_proj.weight"), heads * size, m.rank), heads, size, m.rank)
    of_keys = net.call(PERMUTE_DIMS, net.slice(both, 1, 0, m.plain_size), axes=[0, 2, 1])
    return of_keys, net.slice(both, 1, m.plain_size, size)


def _queries(layer: Layer, h: Var, m: Latent) -> Var:
    """Return the queries, [tokens, heads, plain size + rotated size]. The parts to be rotated are not rotated yet."""
    net, c = layer.step.net, layer.step.config
    each = m.plain_size + m.rotated_size
    if m.query_rank is None:
        q = net.linear(h, layer.name("self_attn.q_proj"), c.hidden_size, c.num_heads * each)
    else:
        narrow = net.linear(h, layer.name("self_attn.q_a_proj"), c.hidden_size, m.query_rank, bias=c.qkv_bias)
        normed = net.rms_norm(narrow, layer.name("self_attn.q_a_layernorm"), m.query_rank, EPS)
        q = net.linear(normed, layer.name("self_attn.q_b_proj"), m.query_rank, c.num_heads * each)
    return net.reshape(q, layer.step.t, c.num_heads, each)


def _by_head(layer: Layer, x: Var, w: Var) -> Var:
    """Multiply `x[tokens, heads, inputs]` by the matrix of each head, `w[heads, outputs, inputs]`. Return [tokens, heads, outputs]. Within
    the product, rows are sorted by head."""
    net, t = layer.step.net, layer.step.t
    assert isinstance(w.type, TensorType) and w.type.shape is not None, w
    heads, outputs, inputs = (dim.const for dim in w.type.shape)
    rows = net.reshape(net.call(PERMUTE_DIMS, x, axes=[1, 0, 2]), t * heads, inputs)
    numbers = Constant(np.arange(heads, dtype=np.int32)[:, None])
    choice = net.reshape(net.call(BROADCAST_TO, numbers, ShapeValue((Dim.of(heads), Dim.of(t)))), t * heads)
    found = net.reshape(net.chosen_product(rows, w, choice), heads, t, outputs)
    return net.call(PERMUTE_DIMS, found, axes=[1, 0, 2])
