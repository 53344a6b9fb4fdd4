"""Attention: one node of the loop level until a schedule takes its place."""

from __future__ import annotations

from compiler.ir.fields import Holds, holds, node
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar


@node
class Paged:
    """Keys and values in the pages of a cache; the layout is that of ops/attention/kv_cache.py."""

    cache: Buffer = holds(Holds.BUFFER)  # [layers, 2, pages, kv_heads, PAGE * size]
    tables: Buffer = holds(Holds.BUFFER)  # [sequences, pages]: the pages of a sequence, in order
    layer: Scalar = holds(Holds.SCALAR)
    scales: Buffer | None = holds(Holds.BUFFER, default=None)  # [layers, 2, pages, kv_heads, PAGE], of an 8-bit cache


@node
class Ragged:
    """Keys and values of sequences that stand one behind the other without padding."""

    keys: Buffer = holds(Holds.BUFFER)  # [tokens, kv_heads, size]
    values: Buffer = holds(Holds.BUFFER)
    starts: Buffer = holds(Holds.BUFFER)  # [sequences + 1]: the first token of each, and the number of tokens


@node
class Attention:
    """`out[t, h]` is the mean of the values that token `t` sees, weighted by exp(score), where

        score = capped(scale * queries[t, h] . key) + bias        capped(x) = softcap * tanh(x / softcap), or x where softcap is 0

    Token `t` belongs to sequence `sequences[t]`, and query head `h` reads kv head `h // (heads / kv_heads)`. With `positions` the mask is
    causal: the token sees the positions up to its own, and with a window only the last `window` of these. Without, it sees its whole
    sequence. A sink is the score of a key that has no value. `bias[h, m + d]` belongs to a key `d` positions behind the query; a distance
    above `m`, in either direction, counts as `m`.

    It is the whole body of its function until a schedule takes its place. Its meaning is ops/attention/plain.py.
    """

    queries: Buffer = holds(Holds.BUFFER)  # [tokens, heads, size]
    keys: Paged | Ragged = holds(Holds.NODE)
    sequences: Buffer = holds(Holds.BUFFER)  # [tokens]
    out: Buffer = holds(Holds.BUFFER)  # [tokens, heads, size]
    scale: float
    positions: Buffer | None = holds(Holds.BUFFER, default=None)  # [tokens]
    window: int = 0
    softcap: float = 0.0
    sinks: Buffer | None = holds(Holds.BUFFER, default=None)  # [heads]
    bias: Buffer | None = holds(Holds.BUFFER, default=None)  # [heads, 2 * m + 1]
