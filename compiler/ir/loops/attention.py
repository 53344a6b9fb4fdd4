"""Attention: a single node of the loop level until a schedule replaces it."""

from __future__ import annotations

from compiler.ir.fields import Holds, holds, node
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar


@node
class Paged:
    """Keys and values in the pages of a cache, in the layout of ops/attention/kv_cache.py. If the cache has no values, a value is the
    beginning of its key. Position `p` of a sequence is in page `tables[sequence, p // PAGE]`, at offset `p % PAGE`."""

    cache: Buffer = holds(Holds.BUFFER)  # [layers, 2 or 1, pages, kv_heads, PAGE * size]
    tables: Buffer = holds(Holds.BUFFER)  # [sequences, pages]: the pages of each sequence, in order
    layer: Scalar = holds(Holds.SCALAR)
    scales: Buffer | None = holds(Holds.BUFFER, default=None)  # [layers, 2 or 1, pages, kv_heads, PAGE], for an 8-bit cache
    has_values: bool = True  # whether values are stored beside the keys; the extent of the cache may be symbolic, so it does not show this


@node
class Ragged:
    """Keys and values of sequences stored one after another without padding."""

    keys: Buffer = holds(Holds.BUFFER)  # [tokens, kv_heads, size]
    values: Buffer = holds(Holds.BUFFER)
    starts: Buffer = holds(Holds.BUFFER)  # [sequences + 1]: the first token of each sequence, then the number of tokens


@node
class Attention:
    """Attention. `out[t, h]` is the mean of the values to which token `t` attends, weighted by exp(score), where

        score = capped(scale * queries[t, h] . key) + bias        capped(x) = softcap * tanh(x / softcap), or x where softcap is 0

    Token `t` belongs to sequence `sequences[t]`, and query head `h` reads kv head `h // (heads / kv_heads)`. If `positions` has one column,
    it has the position of each token, and the mask is causal: a token attends to the positions up to its own or, with a window, only to the
    last `window` of these. With two columns, `positions` has the first and the last position to which each token attends. Without
    `positions`, a token attends to its whole sequence. A sink is the score of an additional key whose value is 0. Without `bias`, the bias
    of all keys is 0. `bias[h, m + d]` is the bias of a key `d` positions after the query (`d` is negative for earlier keys); distances
    beyond `m`, in either direction, are clamped to `m`.

    The node is the whole body of its function until a schedule replaces it. ops/attention/plain.py defines its meaning; a schedule may add
    the terms of a sum in another order.
    """

    queries: Buffer = holds(Holds.BUFFER)  # [tokens, heads, size]
    keys: Paged | Ragged = holds(Holds.NODE)
    sequences: Buffer = holds(Holds.BUFFER)  # [tokens]
    out: Buffer = holds(Holds.BUFFER)  # [tokens, heads, size of a value]
    scale: float
    positions: Buffer | None = holds(Holds.BUFFER, default=None)  # [tokens] or [tokens, 2]
    window: int = 0  # number of positions; 0 for no window
    softcap: float = 0.0  # 0 for no cap
    sinks: Buffer | None = holds(Holds.BUFFER, default=None)  # [heads]
    bias: Buffer | None = holds(Holds.BUFFER, default=None)  # [heads, 2 * m + 1]
    exact: bool = False  # if true, a schedule must not round queries and weights exp(score) to bf16
    row_bits: int = 16  # over an 8-bit cache, a schedule may round queries and weights exp(score) to integers of this many bits: 8 or 16

    @property
    def has_spans(self) -> bool:
        """Whether `positions` has the first and the last position to which each token attends."""
        return self.positions is not None and len(self.positions.shape) == 2
