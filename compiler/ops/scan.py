"""Recurrent layers whose state is a matrix per head: the gated delta rule, and the scan of Mamba-2, which lacks the delta rule's
correction.

    S = decay * S + k u^T,  out = S^T q       per head, token by token
    u = beta * (v - (decay * S)^T k)          with beta: the gated delta rule
    u = v                                     without beta: Mamba-2

S is the state of a head, a matrix [key_size, size]; q, k and v are the query, the key and the value of a token.
The operator reads the state of each sequence from its page, computes the sequence's tokens in order, and writes the state after token
`saved[m]` to page `pages[m]`, unless that page does not exist; see `compiler/ops/states.py` for the pages. Every token is computed by the
same operations wherever a step begins. So with pages of f32, which round nothing, the results of a sequence do not depend, to the bit, on
how its prompt is split into chunks.

A page stores the matrices [heads, key_size, size] of all heads in blocks of adjacent columns: [heads, blocks, key_size, width]. One thread
of a CPU computes one block of one head of one sequence, and the block stays in the first-level cache of its core. A thread of a GPU
computes one column (decision 0181).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast, const, equal, fma, index, less, minimum, not_equal, select, total
from compiler.ir.relations import Relation, at_least, multiple
from compiler.ir.types import TensorType, TupleType, Type
from compiler.machine.intrinsics.prefetch import Prefetch
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import bound_layer, check_layer, layer_operand
from compiler.ops.broadcast import sized_buffer
from compiler.ops.index import inside
from compiler.ops.indices import Extent, checked, skipped, starts_of, zeroed
from compiler.ops.operands import agree, tensor_operand, unproved, wants_float, wants_int
from compiler.ops.tables import Nest, Operands, UnknownShape, define

F32, I64 = DType.F32, DType.I64
MOST_COLUMNS, LANES = 32, 16  # maximum number of columns per block; elements per vector
AHEAD = 2  # number of tokens between the computed token and the one whose data is prefetched


def block_width(size: int) -> int:
    """Return the number of columns of a block, if a state has `size` columns per head."""
    return gcd(size, MOST_COLUMNS)


# --- the NumPy function ------------------------------------------------------------------------------------------------


def _numpy(
    states: Any, q: Any, k: Any, v: Any, decay: Any, sources: Any, starts: Any, saved: Any, pages: Any, layer: Any, beta: Any = None
) -> Any:
    states, out = states.copy(), np.zeros(v.shape, v.dtype)
    heads, size = v.shape[1:]
    width, each = block_width(size), heads // k.shape[1]
    blocks = heads, size // width, k.shape[2], width
    q, k = (np.repeat(x.astype(np.float32), each, axis=1) for x in (q, k))
    pages = pages.astype(np.int64)
    for s, source in enumerate(sources):
        held = states[layer, source] if source else np.zeros_like(states[layer, 0])
        state = held.reshape(blocks).swapaxes(1, 2).reshape(heads, k.shape[2], size).astype(np.float32)
        following = int((saved.astype(np.int64) < starts[s]).sum())
        for t in range(starts[s], starts[s + 1]):
            state = state * decay[t, :, None, None].astype(np.float32)
            u = v[t].astype(np.float32)
            if beta is not None:
                u = beta[t, :, None].astype(np.float32) * (u - (state * k[t, :, :, None]).sum(1))
            state = state + k[t, :, :, None] * u[:, None, :]
            out[t] = (state * q[t, :, :, None]).sum(1)
            if following < len(saved) and saved[following] == t:
                if 0 <= pages[following] < states.shape[1]:
                    held = state.reshape(heads, k.shape[2], size // width, width).swapaxes(1, 2)
                    states[layer, pages[following]] = held.reshape(-1)
                following += 1
    return out, states


# --- deduction of annotations ------------------------------------------------------------------------------------------


OPERANDS = ("states", "q", "k", "v", "decay", "sources", "starts", "saved", "pages", "layer", "beta")
FLOATS = {
    "states": (3, "[layers, pages, size]"),
    **dict.fromkeys("qkv", (3, "[t, heads, size]")),
    **dict.fromkeys(("decay", "beta"), (2, "[t, heads]")),
}
INTEGERS = {"sources": "[s]", "starts": "[s + 1]", "saved": "[m]", "pages": "[m]"}


def _type(args: tuple[Type, ...], _: Mapping[str, Any]) -> Type:
    given = OPERANDS[: len(args)]
    types = {
        name: wants_float(tensor_operand(args, given.index(name), name, ndim=rank, layout=layout), name)
        for name, (rank, layout) in FLOATS.items()
        if name in given
    }
    lists = {
        name: wants_int(tensor_operand(args, given.index(name), name, ndim=1, layout=layout), name) for name, layout in INTEGERS.items()
    }
    check_layer(args[given.index("layer")])
    q, k, v, states = (types[name] for name in ("q", "k", "v", "states"))
    for i, (wanted, found) in enumerate(zip(k.shape or (), q.shape or k.shape or (), strict=True)):
        agree(wanted, found, f"dimension {i} of q")
    if v.shape is not None:
        _agree_heads(v.shape, k, states, {name: types[name].shape for name in ("decay", "beta") if name in types})
    if (saved := lists["saved"].shape) is not None and (pages := lists["pages"].shape) is not None:
        agree(saved[0], pages[0], "the length of pages")
    if (sources := lists["sources"].shape) is not None and (starts := lists["starts"].shape) is not None:
        agree(sources[0] + 1, starts[0], "the length of starts")
    return TupleType((v, states))


def _agree_heads(v: tuple[Dim, ...], k: TensorType, states: TensorType, gates: Mapping[str, tuple[Dim, ...] | None]) -> None:
    tokens, heads, size = v
    for name, shape in gates.items():
        for i, (wanted, given) in enumerate(zip((tokens, heads), shape or (tokens, heads), strict=True)):
            agree(wanted, given, f"dimension {i} of {name}")
    if k.shape is None:
        return
    agree(tokens, k.shape[0], "the number of tokens of k")
    if states.shape is not None:
        agree(heads * size * k.shape[2], states.shape[2], "the size of states")


def _relations(args: tuple[Type, ...], _: Mapping[str, Any]) -> Iterable[Relation]:
    k, v = (args[OPERANDS.index(name)] for name in "kv")
    if isinstance(k, TensorType) and k.shape is not None:
        yield at_least(k.shape[2], 1, "the size of a key")
        if isinstance(v, TensorType) and v.shape is not None:
            yield at_least(v.shape[1], 1, "the number of heads of v")
            yield from multiple(v.shape[1], k.shape[1], "the number of heads of v", "the number of heads of k")


# --- the loop nest -----------------------------------------------------------------------------------------------------


def _nest(operands: Operands) -> Nest:
    kernel = Kernel()
    held, q, k, v, decay, sources, starts, saved, pages = (operands.buffer(i) for i in range(9))
    assert isinstance(operands.out, TupleType)
    out, states = sized_buffer(operands.out.fields[0], "out"), Buffer("new_states", held.shape, held.dtype)
    tokens, heads, size = v.shape
    num_seqs, num_keys, key_size = sources.shape[0], k.shape[1], k.shape[2]
    if not all(dim.is_const for dim in (heads, size, num_keys, key_size)):
        raise UnknownShape("a scan needs constant numbers of heads and constant head sizes; state them with match_cast")
    beta = kernel.array(operands.buffer(10)) if operands.has(10) else None
    arrays = dict(zip(("out", "states", "q", "k", "v", "decay"), kernel.arrays(out, states, q, k, v, decay), strict=True))
    scan = _Scan(kernel, **arrays, beta=beta, width=block_width(size.const))
    scan.write(layer_operand(operands.places[9]), *kernel.arrays(sources, starts, saved, pages))
    wanted: dict[int, tuple[Dim, ...]] = {
        0: (*held.shape[:2], heads * size * key_size),
        1: k.shape,
        2: (tokens, *k.shape[1:]),
        4: (tokens, heads),
        6: (num_seqs + 1,),
        8: saved.shape,
    }
    if beta is not None:
        wanted[10] = tokens, heads
    checks = unproved(operands, wanted)
    return Nest((out, states), kernel.body(), inplace=(None, 0), checks=checks, attrs={"schedule": "scan"})


@dataclass
class _Scan:
    """Writes the loops of a scan. The fields are the operands and results, with the names that the head of this file uses."""

    kernel: Kernel
    out: Array
    states: Array
    q: Array
    k: Array
    v: Array
    decay: Array
    beta: Array | None
    width: int  # number of columns of a block

    @property
    def rows(self) -> int:
        """The number of rows of a state: the size of a key."""
        return self.k.shape[2].const

    @property
    def lanes(self) -> int:
        """The number of columns that a vector holds."""
        return gcd(self.width, LANES)

    @property
    def parts(self) -> int:
        """Return the number of partial sums of a sum over the rows. With two partial sums, an addition need not wait for the previous
        addition."""
        return gcd(self.rows, 2)

    @property
    def last(self) -> Dim:
        """The last token of the step."""
        return self.v.shape[0] - 1

    def write(self, number: Scalar, sources: Array, starts: Array, saved: Array, pages: Array) -> None:
        """Write the whole nest. `number` is the number of the layer."""
        kernel = self.kernel
        heads, size = (dim.const for dim in self.v.shape[1:])
        axes = [("s", sources.shape[0]), ("h", Dim.of(heads)), ("b", Dim.of(size // self.width))]
        with kernel.parallel("i", sources.shape[0] * heads * (size // self.width)) as i:
            layer = bound_layer(kernel, number, self.states.buffer)
            s, h, b = kernel.unravel(i, axes)
            block = (h * (size // self.width) + b) * (self.rows * self.width)
            state, products = kernel.local("state", self.rows, self.width), kernel.local("products", self.parts, self.width)
            self._begin(state, layer, kernel.let("source", cast(sources[s], I64)), block)
            start, stop = (kernel.let(name, cast(starts[s + j], I64)) for j, name in enumerate(("start", "stop")))
            if self.beta is not None:
                with kernel.when(less(start, stop)):
                    self._multiply(products, state, kernel.let("t", index(start), self.last), h)
            # `saved` lists the saved tokens of all sequences in order.
            following = kernel.local("following", 1, dtype=I64)
            following[0] = total((saved.shape[0],), lambda r: select(cast(saved[r], I64) < index(start), const(1, I64), 0))
            with kernel.serial("j", stop - start) as j:
                t = kernel.let("t", index(start + j), self.last)
                self._prefetch(kernel.let("ahead", minimum(index(t + AHEAD), index(self.last)), self.last), h, b * self.width)
                self._step(state, products, t, h, b * self.width)
                with kernel.when(following[0] < index(saved.shape[0])):
                    m = kernel.let("m", following[0], saved.shape[0] - 1)
                    with kernel.when(equal(cast(saved[m], I64), index(t))):
                        with kernel.when(inside(pages[m], self.states.shape[1])):
                            self._save(state, layer, kernel.let("page", cast(pages[m], I64), self.states.shape[1] - 1), block)
                        following[0] = following[0] + 1

    def _save(self, state: Array, layer: Dim, page: Dim, block: Dim) -> None:
        kernel = self.kernel
        with kernel.serial("r", self.rows) as r, self._columns() as first, kernel.vector(self.lanes) as lane:
            c = first + lane
            self.states[layer, page, block + r * self.width + c] = cast(state[r, c], self.states.dtype)

    def _begin(self, state: Array, layer: Dim, source: Dim, block: Dim) -> None:
        """Read this block of the state from page `source`, or fill the block with zeros if `source` is 0. While reading, prefetch the
        following block, which the thread probably computes next."""
        kernel, lanes = self.kernel, self.lanes
        with kernel.when(not_equal(index(source), 0)), kernel.serial("r", self.rows) as r:
            row = block + r * self.width
            self._fetch(self.states[layer, source, row], self.width, ahead=self.rows * self.width, far=True)
            with self._columns() as first, kernel.vector(lanes) as lane:
                state[r, first + lane] = cast(self.states[layer, source, row + first + lane], F32)
        with kernel.orelse(), kernel.serial("r", self.rows) as r, self._columns() as first, kernel.vector(lanes) as lane:
            state[r, first + lane] = 0.0

    def _multiply(self, products: Array, state: Array, t: Dim, h: Dim) -> None:
        """Multiply the state by the key of the sequence's first token, and write the result to `products`."""
        with self._columns() as first:
            self._clear(products, first)
            with self._rows() as (r, p), self.kernel.vector(self.lanes) as lane:
                c = first + lane
                products[p, c] = fma(state[r, c], cast(self.k[t, self._head(h), r], F32), products[p, c])

    def _step(self, state: Array, products: Array, t: Dim, h: Dim, begin: Dim) -> None:
        """Update the state by one token and compute the token's output. With `beta`, `products` has the product of the old state and this
        token's key, and the same pass over the rows replaces it by the product of the new state and the next token's key. The block begins
        at column `begin` of the head. The sums of a group of columns stay in registers."""
        kernel, head = self.kernel, self._head(h)
        sums, added = kernel.local("sums", self.parts, self.width), kernel.local("added", self.width)
        factor = kernel.local("factor", 1)
        factor[0] = cast(self.decay[t, h], F32)
        following = kernel.let("following", minimum(index(t + 1), index(self.last)), self.last)
        with self._columns() as first:
            with kernel.vector(self.lanes) as lane:
                c = first + lane
                value = cast(self.v[t, h, begin + c], F32)
                if self.beta is not None:
                    value = cast(self.beta[t, h], F32) * (value - factor[0] * _over(products, c))
                added[c] = value
            self._clear(sums, first)
            if self.beta is not None:
                self._clear(products, first)
            with self._rows() as (r, p), kernel.vector(self.lanes) as lane:
                c = first + lane
                state[r, c] = fma(state[r, c], factor[0], cast(self.k[t, head, r], F32) * added[c])
                sums[p, c] = fma(state[r, c], cast(self.q[t, head, r], F32), sums[p, c])
                if self.beta is not None:
                    products[p, c] = fma(state[r, c], cast(self.k[following, head, r], F32), products[p, c])
            with kernel.vector(self.lanes) as lane:
                c = first + lane
                self.out[t, h, begin + c] = cast(_over(sums, c), self.out.dtype)

    def _prefetch(self, t: Dim, h: Dim, first: Dim) -> None:
        """Prefetch the data of a later token `t`: its query, key and gates in head `h`, and its value and output from column `first` on.
        The rows of a head are too far apart for the hardware to prefetch them."""
        for x in (self.k, self.q):
            self._fetch(x[t, self._head(h), 0], self.rows)
        for x in (self.v, self.out):
            self._fetch(x[t, h, first], self.width)
        for gate in (self.decay, self.beta):
            if gate is not None:
                self._fetch(gate[t, h], 1)

    def _fetch(self, place: Load, length: int, *, ahead: int = 0, far: bool = False) -> None:
        """Prefetch `length` elements, which begin `ahead` elements after the place."""
        size = place.buffer.dtype.num_bytes
        self.kernel.tile(Prefetch(far, ahead * size, -(-length * size // LINE_BYTES)), place)

    def _head(self, h: Dim) -> Dim:
        """Return the head of queries and keys that head `h` of the values uses."""
        return h // (self.v.shape[1].const // self.k.shape[1].const)

    def _clear(self, sums: Array, first: Dim) -> None:
        with self.kernel.unroll("p", self.parts) as p, self.kernel.vector(self.lanes) as lane:
            sums[p, first + lane] = 0.0

    @contextmanager
    def _columns(self) -> Generator[Dim]:
        """Open a loop over the groups of columns that one vector holds, and yield each group's first column."""
        with self.kernel.unroll("u", self.width // self.lanes) as u:
            yield u * self.lanes

    @contextmanager
    def _rows(self) -> Generator[tuple[Dim, Dim]]:
        """Open a loop over the rows, and yield each row and the partial sum to which it belongs."""
        with self.kernel.serial("r", self.rows // self.parts) as r, self.kernel.unroll("p", self.parts) as p:
            yield r * self.parts + p, p


def _over(sums: Array, column: Dim) -> Scalar:
    """Return the sum of the partial sums of one column."""
    return sum((sums[part, column] for part in range(1, sums.shape[0].const)), start=sums[0, column])


STATE_SCAN = define(
    "state_scan",
    ", ".join(OPERANDS) + "?",
    _type,
    _numpy,
    _nest,
    relations=_relations,
    indices={
        "sources": zeroed(Extent("states", 1), ahead=True),
        "starts": starts_of(Extent("v")),
        "pages": skipped(Extent("states", 1)),
        "layer": checked(Extent("states")),
    },
)
