"""Compute the sequences and positions that the attention operator reads in place of the real ones, in models with attention within chunks,
or with attention in both directions among the tokens of an image. In models with chunks, a sequence is cut at multiples of the chunk size,
and a token attends to the tokens of its chunk up to itself.

The attention operator does not distinguish chunks from sequences. Its operands describe each chunk as a sequence of its own: the page table
of this sequence has the pages of the chunk, and its positions begin at 0. So every kernel and every export supports chunks, and the bits of
a row do not depend on how a prompt was divided into steps. The cache treats a chunk as a window of the same size.

The tokens of an image may attend to each other in both directions. Then an operand of the operator has the last position to which each
token attends: the last position of its image for an image token, and its own position for any other token. In a layer with a window, the
operand also has the first position to which a token attends, which depends on the token's own position. An image token reads the keys of
later tokens of its image, so all tokens of an image must be in one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.frontend.layers.nn import Net
from compiler.ir.dims import Dim, DimLike, dim_min
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.types import TensorType
from compiler.ops.attention.kv_cache import PAGE
from compiler.ops.create import ARANGE
from compiler.ops.elementwise import ADD, EQUAL, FLOOR_DIVIDE, MAXIMUM, MULTIPLY, SUBTRACT, WHERE
from compiler.ops.index import GATHER, SCATTER, TAKE
from compiler.ops.manipulate import CONCAT, EXPAND_DIMS
from compiler.ops.reduce import MIN


@dataclass(frozen=True, slots=True)
class Places:
    """The operands of attention that describe a step: the sequence and the position of each token, and each sequence's pages."""

    seq_ids: Var
    positions: Var  # [tokens], or [tokens, 2]: the first and the last position to which each token attends
    page_tables: Var

    @property
    def has_first_positions(self) -> bool:
        return len(_shape(self.positions)) > 1


def in_chunks(net: Net, whole: Places, size: int, most_tokens: int, max_context: int) -> Places:
    """Return operands in which the chunks with tokens in this step replace each sequence. A step has at most `most_tokens` tokens, and a
    sequence at most `max_context`."""
    num_chunks = -(-max_context // size)
    each = min(num_chunks, -(-(most_tokens - 1) // size) + 1)  # maximum number of chunks of one sequence with tokens in a step
    (s, p), (t,) = _shape(whole.page_tables), _shape(whole.seq_ids)
    pages = size // PAGE
    w = dim_min(p, pages)  # length of a chunk's page table

    chunks = net.call(FLOOR_DIVIDE, whole.positions, _int(size))
    is_own = net.call(EQUAL, net.reshape(whole.seq_ids, 1, t), net.reshape(_count(net, s), s, 1))
    # For each sequence, the number of the first chunk with tokens in this step.
    first = net.call(MIN, net.call(WHERE, is_own, net.reshape(chunks, 1, t), _int(num_chunks)), axes=[1])
    number = net.call(SUBTRACT, chunks, net.call(TAKE, first, whole.seq_ids, axis=0))
    # The indices of the pages of chunks in the page table of their sequence: [sequences, chunks of each, pages of a chunk].
    later = net.reshape(net.call(MULTIPLY, _count(net, each), _int(pages)), 1, each, 1)
    begin = net.add(net.reshape(net.call(MULTIPLY, first, _int(pages)), s, 1, 1), later)
    index = net.add(begin, net.reshape(_count(net, w), 1, 1, w))
    tables = net.call(GATHER, whole.page_tables, net.reshape(index, s, each * w), axis=1)
    return Places(
        seq_ids=net.call(ADD, net.call(MULTIPLY, whole.seq_ids, _int(each)), number),
        positions=net.call(SUBTRACT, whole.positions, net.call(MULTIPLY, chunks, _int(size))),
        page_tables=net.reshape(tables, each * s, w),
    )


def _int(value: int) -> ScalarValue:
    return ScalarValue(value, "i32")


def _count(net: Net, stop: DimLike) -> Var:
    return net.call(ARANGE, stop=stop, dtype="i32")


def _shape(x: Atom) -> tuple[Dim, ...]:
    assert isinstance(x, Var) and isinstance(x.type, TensorType) and x.type.shape is not None, x
    return x.type.shape


def spans(net: Net, positions: Var, at: Var, lasts: Var, window: int) -> Var:
    """Return the last position to which each token attends, [tokens]; with a window (`window` is not 0), the first and the last position,
    [tokens, 2]. The tokens `at` attend up to `lasts`, and other tokens up to their own position. An image is not longer than a window."""
    seen = net.call(SCATTER, positions, at, lasts, axis=0)
    if not window:
        return seen
    firsts = net.call(MAXIMUM, net.call(SUBTRACT, positions, ScalarValue(window - 1, "i32")), ScalarValue(0, "i32"))
    return net.call(CONCAT, net.call(EXPAND_DIMS, firsts, axes=1), net.call(EXPAND_DIMS, seen, axes=1), axis=1)
