"""Compute the addresses of buffer elements, and emit loads and stores for one lane or for all lanes of a vector loop."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.codegen.scalars import Scalars, Value, memory
from compiler.ir.dims import Atom, Dim, DimVar, row_major
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.prove import bounds
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code, broadcast, splat, suffix, vec, vector_literal

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory of a buffer."""

    pointer: str
    size: int | None = None  # number of elements, with the copies of all lanes, if the kernel allocates the buffer; None: a parameter
    lane: DimVar | None = None  # variable of a vector loop whose lanes each have a copy of the buffer, in an additional innermost dimension
    level: int = 0  # the outermost scope in which the pointer is known


@dataclass(frozen=True, slots=True)
class Place:
    """The address of an element or, in a vector loop, of one element per lane. `lanes` has the offset of each lane from `pointer`, in
    elements: as constants, or as an operand of LLVM IR, a vector. If `lanes` is None, all lanes access the same element."""

    pointer: str
    lanes: tuple[int, ...] | str | None = None
    safe: bool = False  # even inactive lanes may access their elements, because the elements are inside a buffer that the kernel allocates

    @property
    def contiguous(self) -> bool:
        """Whether lane i accesses the element i elements after `pointer`."""
        return isinstance(self.lanes, tuple) and self.lanes == tuple(range(len(self.lanes)))


class MemoryAccess:
    """Emits loads and stores at the current point of a loop nest. `lane`, `num_lanes` and `mask` describe the vector loop around this
    point."""

    def __init__(self, code: Code, indices: Indices, scalars: Scalars) -> None:
        self.code, self.indices, self.scalars = code, indices, scalars
        self.storage: dict[Buffer, Storage] = {}
        self.lane: DimVar | None = None  # variable of the surrounding vector loop; None: there is no such loop
        self.num_lanes = 1
        self.mask: str | None = None  # active lanes; None: all
        self._flat: dict[tuple[Buffer, tuple[Dim, ...]], Dim] = {}  # offsets that `_offset` has computed

    # --- reading and writing -------------------------------------------------------------------------------------------

    def load(self, buffer: Buffer, indices: tuple[Dim, ...]) -> Value:
        """Emit a load. The result has one lane if all lanes read the same element. Its values in inactive lanes are undefined."""
        place, element, lanes = self.place(buffer, indices), memory(buffer.dtype), self.num_lanes
        align = buffer.dtype.num_bytes
        if place.lanes is None:
            raw = self.code.op(f"load {element}, ptr {place.pointer}, align {align}")
            return self.scalars.loaded(raw, buffer.dtype, 1)
        kind, name = vec(element, lanes), suffix(element, lanes)
        if place.contiguous and (self.mask is None or place.safe):
            raw = self.code.op(f"load {kind}, ptr {place.pointer}, align {align}")
        elif place.contiguous:
            masked = f"ptr align {align} {place.pointer}, <{lanes} x i1> {self.mask}, {kind} zeroinitializer"
            raw = self.code.op(f"call {kind} @llvm.masked.load.{name}.p0({masked})")
        elif isinstance(place.lanes, tuple) and self.mask is None and 0 < max(place.lanes) < 2 * lanes and min(place.lanes) == 0:
            # The elements of all lanes are close together, so one load and one permutation replace a gather.
            span = max(place.lanes) + 1
            window = self.code.op(f"load {vec(element, span)}, ptr {place.pointer}, align {align}")
            order = vector_literal("i32", place.lanes)
            window_type = vec(element, span)
            raw = self.code.op(f"shufflevector {window_type} {window}, {window_type} poison, <{lanes} x i32> {order}")
        elif isinstance(place.lanes, tuple) and self.mask is None and (run := _run_of(place.lanes)) * align == WORD_BYTES:
            raw = self._load_words(place, place.lanes[::run], element)
        else:
            pointers, mask = self._pointers(place, element), self.mask or splat("true", "i1", lanes)
            gather = f"<{lanes} x ptr> align {align} {pointers}, <{lanes} x i1> {mask}, {kind} zeroinitializer"
            raw = self.code.op(f"call {kind} @llvm.masked.gather.{name}.v{lanes}p0({gather})")
        return self.scalars.loaded(raw, buffer.dtype, lanes)

    def _load_words(self, place: Place, starts: Sequence[int], element: str) -> str:
        """Load runs of consecutive elements, each run as one word of 32 bits. This is faster than to gather the elements. `starts` has the
        offset of the first element of each run."""
        words, found = vec("i32", len(starts)), "poison"
        for number, start in enumerate(starts):
            pointer = self.code.op(f"getelementptr {element}, ptr {place.pointer}, i64 {start}")
            word = self.code.op(f"load i32, ptr {pointer}, align 1")
            found = self.code.op(f"insertelement {words} {found}, i32 {word}, i32 {number}")
        return self.code.op(f"bitcast {words} {found} to {vec(element, self.num_lanes)}")

    def store(self, buffer: Buffer, indices: tuple[Dim, ...], value: Value) -> None:
        """Emit a store in the active lanes. Raise CompileError if several lanes of a vector loop are known to write the same element."""
        place, element, lanes = self.place(buffer, indices), memory(buffer.dtype), self.num_lanes
        align = buffer.dtype.num_bytes
        if self.lane is not None and (place.lanes is None or (isinstance(place.lanes, tuple) and len(set(place.lanes)) < lanes)):
            at = ", ".join(map(str, indices))
            raise CompileError(
                f"store to {buffer.name}[{at}] inside vector loop {self.lane.name}: lanes write the same element; "
                "expected one element per lane"
            )
        raw = self.scalars.stored(self.scalars.spread(value, lanes))
        kind, name = vec(element, lanes), suffix(element, lanes)
        if place.lanes is None or (place.contiguous and self.mask is None):
            self.code.do(f"store {kind} {raw}, ptr {place.pointer}, align {align}")
        elif place.contiguous and place.safe:
            # Store the whole vector: LLVM keeps a local buffer in registers only if every store is of a whole vector.
            old = self.code.op(f"load {kind}, ptr {place.pointer}, align {align}")
            new = self.code.op(f"select <{lanes} x i1> {self.mask}, {kind} {raw}, {kind} {old}")
            self.code.do(f"store {kind} {new}, ptr {place.pointer}, align {align}")
        elif place.contiguous:
            masked = f"{kind} {raw}, ptr align {align} {place.pointer}, <{lanes} x i1> {self.mask}"
            self.code.do(f"call void @llvm.masked.store.{name}.p0({masked})")
        else:
            pointers, mask = self._pointers(place, element), self.mask or splat("true", "i1", lanes)
            scatter = f"{kind} {raw}, <{lanes} x ptr> align {align} {pointers}, <{lanes} x i1> {mask}"
            self.code.do(f"call void @llvm.masked.scatter.{name}.v{lanes}p0({scatter})")

    def _pointers(self, place: Place, element: str) -> str:
        """Emit the vector of all lanes' addresses, for a place whose lanes access different elements."""
        offsets = vector_literal("i64", place.lanes) if isinstance(place.lanes, tuple) else place.lanes
        return self.code.op(f"getelementptr {element}, ptr {place.pointer}, <{self.num_lanes} x i64> {offsets}")

    # --- addresses -----------------------------------------------------------------------------------------------------

    def place(self, buffer: Buffer, indices: tuple[Dim, ...]) -> Place:
        """Emit the address of an element or, in a vector loop, the addresses of the elements of all lanes."""
        storage, element = self.storage[buffer], memory(buffer.dtype)
        offset = self._offset(buffer, indices, storage)
        shared, fixed, varying = self.split_lanes(offset)
        lowest = min(fixed) if fixed else 0
        pointer = self._pointer(storage, element, shared, lowest)
        if varying is not None:
            if fixed:
                offsets = Index(vector_literal("i64", (f - lowest for f in fixed)), 0, self.num_lanes)
                varying = self.indices.binary("add nsw", varying, offsets)
            return Place(pointer, str(varying.value))
        if len(set(fixed)) <= 1:
            return Place(pointer)
        return Place(pointer, tuple(f - lowest for f in fixed), _inside(offset, storage.size))

    def _offset(self, buffer: Buffer, indices: tuple[Dim, ...], storage: Storage) -> Dim:
        """Return the row-major offset of an element, counted in elements. If each lane has a copy of the buffer, the offset leads to the
        copy of the lane."""
        key = (buffer, indices)
        flat = self._flat.get(key)
        if flat is None:
            flat = row_major(indices, buffer.shape)
            if storage.lane is not None:
                flat = flat * self.num_lanes + storage.lane
            self._flat[key] = flat
        return flat

    def _pointer(self, storage: Storage, element: str, parts: list[Index], constant: int) -> str:
        """Add offsets to the pointer, the offsets of outer scopes first, so that few additions remain in inner loops. The constant is last,
        because the address in a load or store instruction can contain it."""
        pointer, at = storage.pointer, storage.level
        constant += sum(p.value for p in parts if isinstance(p.value, int))
        for level in sorted({p.level for p in parts if isinstance(p.value, str)}):
            step = self.indices.total(p for p in parts if p.level == level and isinstance(p.value, str))
            at = max(at, level)
            pointer = self.code.hoist(at, f"getelementptr {element}, ptr {pointer}, i64 {step.value}")
        if constant:
            pointer = self.code.hoist(at, f"getelementptr {element}, ptr {pointer}, i64 {constant}")
        return pointer

    # --- lanes ---------------------------------------------------------------------------------------------------------

    def split_lanes(self, dim: Dim) -> tuple[list[Index], tuple[int, ...], Index | None]:
        """Split `dim` into three summands: indices that all lanes share, to be added; a constant per lane, or () if no constant differs
        between lanes; and a vector of the numbers that are computed at run time, or None if all such numbers are shared."""
        shared: list[Index] = []
        varying: list[Index] = []
        fixed = [0] * self.num_lanes
        some = False
        for coefficient, monomial in dim.terms:
            if not self.varies(monomial):
                shared.append(self.indices.term(coefficient, monomial))
            elif (numbers := self._numbers(coefficient, monomial)) is not None:
                fixed, some = [a + b for a, b in zip(fixed, numbers, strict=True)], True
            else:
                varying.append(self.indices.term(coefficient, monomial))
        return shared, tuple(fixed) if some else (), self.indices.total(varying) if varying else None

    def varies(self, atoms: Iterable[Atom]) -> bool:
        """Return whether the value of an expression of these atoms may differ between lanes."""
        env = self.indices.env  # the axes of a reduction are not yet in `env` when a caller asks about the whole reduction
        return self.lane is not None and any(v in env and env[v].lanes > 1 for v in _variables(atoms))

    def _numbers(self, coefficient: int, monomial: tuple[Atom, ...]) -> list[int] | None:
        """Return the term's value in each lane, or None if these values are computed at run time."""
        assert self.lane is not None
        if monomial == (self.lane,):  # the usual case
            return [coefficient * lane for lane in range(self.num_lanes)]
        known: dict[DimVar, int] = {}
        for v in _variables(monomial):
            value = self.indices.env[v].value
            if v is not self.lane and not isinstance(value, int):
                return None
            if isinstance(value, int):
                known[v] = value
        term = Dim(((coefficient, monomial),))
        return [term.evaluate({**known, self.lane: lane}) for lane in range(self.num_lanes)]

    def below(self, low: Dim, high: Dim) -> Value | bool:
        """Emit low < high. Return a bool if the result is a constant that all lanes share."""
        shared, fixed, varying = self.split_lanes(high - low)
        room = self.indices.total(shared)
        if varying is not None or fixed:
            return Value(self._lanes_below(room, fixed, varying), DType.BOOL, self.num_lanes)
        if isinstance(room.value, int):
            return room.value > 0
        return Value(self.code.hoist(room.level, f"icmp sgt i64 {room.value}, 0"), DType.BOOL)

    def _lanes_below(self, room: Index, fixed: tuple[int, ...], varying: Index | None) -> str:
        """Emit whether -(fixed + varying) is less than `room`, for each lane. If `fixed` is () or `varying` is None, that summand is 0."""
        lanes, hoist = self.num_lanes, self.code.hoist
        if varying is None:
            # Lane i tests -fixed[i] < room. Clamp room to the range of the constants, so that 32 bits suffice.
            low, high = -max(fixed), -min(fixed) + 1
            room = self.indices.extreme("smin", self.indices.extreme("smax", room, Index(low)), Index(high))
            numbers = vector_literal("i32", (-f for f in fixed))
            if isinstance(room.value, int):
                return vector_literal("i1", ("true" if -f < room.value else "false" for f in fixed))
            short = hoist(room.level, f"trunc i64 {room.value} to i32")
            return hoist(room.level, f"icmp slt <{lanes} x i32> {numbers}, {broadcast(self.code, short, 'i32', lanes, room.level)}")
        if fixed:
            varying = self.indices.binary("add nsw", varying, Index(vector_literal("i64", fixed), 0, lanes))
        total = self.indices.binary("add nsw", varying, room)
        return hoist(total.level, f"icmp sgt <{lanes} x i64> {total.value}, zeroinitializer")

    @contextmanager
    def narrowed(self, cond: str) -> Generator[str]:
        """Deactivate the lanes in which `cond` is false, inside the `with`. Yield a flag that is true if any lane is active, so that the
        caller can skip the code inside."""
        outer, lanes = self.mask, self.num_lanes
        self.mask = cond if outer is None else self.code.op(f"and <{lanes} x i1> {outer}, {cond}")
        bits = self.code.op(f"bitcast <{lanes} x i1> {self.mask} to i{lanes}")
        yield self.code.op(f"icmp ne i{lanes} {bits}, 0")
        self.mask = outer

    @contextmanager
    def masked(self, cond: str) -> Generator[None]:
        """Deactivate the lanes in which `cond` is false, and skip the code inside if no lane is active."""
        with self.narrowed(cond) as some, self.code.when(some):
            yield


def _run_of(lanes: tuple[int, ...]) -> int:
    """Return how many consecutive lanes access consecutive elements, if all such runs of lanes are equally long. Return 0 otherwise."""
    breaks = [i for i in range(1, len(lanes)) if lanes[i] != lanes[i - 1] + 1]
    run = breaks[0] if breaks else len(lanes)
    return run if len(lanes) % run == 0 and breaks == list(range(run, len(lanes), run)) else 0


def _inside(offset: Dim, size: int | None) -> bool:
    """Return whether an offset is provably less than `size` and not negative; False if the size is not known."""
    if size is None:
        return False
    low, high = bounds(offset)
    return low is not None and low >= 0 and high is not None and high < size


def _variables(atoms: Iterable[Atom]) -> Iterator[DimVar]:
    """Yield the variables in atoms."""
    for atom in atoms:
        if isinstance(atom, DimVar):
            yield atom
        else:
            for operand in atom.operands:
                yield from operand.vars()
