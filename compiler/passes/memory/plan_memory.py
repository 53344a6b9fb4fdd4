"""Assign allocations offsets in one arena.

Before: `Alloc`s without offsets. After: each has an offset in the arena of its function, unless it stays separate memory outside of the
arena, and the function records the arena's size. A function that already records a size stays as it is. The entry points of a module share
one arena, since only one of them runs at a time; a function that other functions call uses the bytes after those of its caller. Results of
such a function, and of preparations of weights, are used after the arena is reused, so they stay separate memory.

Two allocations may overlap if their lifetimes do not. A lifetime begins at the allocation and ends with the last use of any alias: a copy,
a view, a match_cast, a tuple, the value of an If. A value that a function returns lives to the end of the function.

Allocations whose size has an upper bound are placed with this size, the largest first, at the lowest offset that is free during their
lifetime. Behind them, allocations without an upper bound share *slots* at symbolic offsets: an allocation uses a free slot that is provably
large enough, or enlarges a free slot that is provably smaller, or gets a new slot. An allocation stays separate memory if its size depends
on data and has no bound.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from functools import lru_cache

from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Body, Function, If, Value
from compiler.ir.graph.values import Alloc
from compiler.ir.graph.visit import operands
from compiler.ir.module import IRModule
from compiler.ir.prove import bounds, prove_le
from compiler.ir.types import TensorType, binders_of
from compiler.ops.memory import Owners
from compiler.passes.rewrite import called_functions, rewrite_function
from runtime.executable import PREPARATION

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
LARGEST = 1 << 47  # number of bytes that a process can address


@dataclass(slots=True, eq=False)
class _Life:
    """The lifetime of an allocation: its variable, its size, and the numbers of the first and last binding that use its memory."""

    var: Var
    size: Dim
    first: int
    last: int


def plan_memory(module: IRModule) -> IRModule:
    called = called_functions(module)
    builder = Builder(module)
    changed = False
    for name, func in module.graph_functions.items():
        if func.arena is None:
            changed |= _plan(builder, name, func, outlived=name in called or PREPARATION in name)
    return builder.finish() if changed else module


def _plan(builder: Builder, name: str, func: Function, *, outlived: bool) -> bool:
    """Plan a function. Return whether an allocation got an offset. `outlived` states that callers use its results after its arena is
    reused."""
    lives = _Lives(Owners(func.body))
    lives.walk(func.body)
    returned = lives.keep(func.body)
    known = {v for p in func.params for v in binders_of(p.type)}
    planned = [life for life in lives.found.values() if not (outlived and life in returned) and _sized_at_entry(life, known)]
    offsets, total = place(planned)
    if not offsets:
        return False

    def replace(_: Builder, binding: Binding, value: Value) -> Value | None:
        match value:
            case Alloc(type=type_, offset=None) if binding.var in offsets:
                return Alloc(type_, offsets[binding.var])
            case _:
                return None

    rewrite_function(builder, name, func, replace, arena=total)
    return True


def _sized_at_entry(life: _Life, known: set[DimVar]) -> bool:
    """Whether the size is known or bounded at the entry of the function, where the arena is allocated. A size that depends on data may have
    a bound."""
    return known.issuperset(life.size.vars()) or _upper_bound(life.size) is not None


@lru_cache(maxsize=1024)
def tensor_bytes(type_: TensorType) -> Dim:
    """Return the number of bytes that a tensor takes in the arena: its size, rounded up to the alignment. A negative extent counts as 0."""
    assert type_.shape is not None and type_.dtype is not None
    count = Dim.of(1)
    for dim in type_.shape:
        # To make a tensor of negative extent raises an error, but the size of the arena is computed before.
        count = count * (dim if prove_le(0, dim) else dim_max(dim, 0))
    return ceil_div(count * type_.dtype.num_bytes, ALIGNMENT) * ALIGNMENT


# --- lifetimes ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Lives:
    """Finds lifetimes in one walk over a body in program order, which numbers the bindings. The bindings of the branches of an If get
    numbers one branch after the other."""

    owners: Owners
    found: dict[Var, _Life] = field(default_factory=dict[Var, _Life])
    _now: int = 0

    def walk(self, body: Body) -> None:
        for binding in body.bindings:
            self._now += 1
            self._binding(binding)
        self._now += 1
        self._use(body.result)

    def keep(self, body: Body) -> list[_Life]:
        """Extend the lifetimes of the function's results to its end, since the caller reads them. Return these lifetimes."""
        self._now += 1
        return self._use(body.result)

    def _binding(self, binding: Binding) -> None:
        value = binding.value
        self._use(*operands(value))
        match value:
            case Alloc(type=TensorType(shape=shape, dtype=dtype) as type_, offset=None) if shape is not None and dtype is not None:
                self.found[binding.var] = _Life(binding.var, tensor_bytes(type_), self._now, self._now)
            case If(then=then, orelse=orelse):
                self.walk(then)
                self.walk(orelse)
                self._use(binding.var)
            case _:
                return

    def _use(self, *atoms: Atom) -> list[_Life]:
        """Let all memory to which the atoms may refer live until the present binding, and return the lifetimes of this memory."""
        lives = [self.found[place.var] for place in self.owners.of(*atoms) if place.var in self.found]
        for life in lives:
            life.last = self._now
        return lives


# --- offsets -----------------------------------------------------------------------------------------------------------


def place(lives: list[_Life]) -> tuple[dict[Var, Dim], Dim]:
    """Return an offset for each allocation, and the size of the arena in bytes."""
    most = {size: _upper_bound(size) for size in {life.size for life in lives}}
    bounded = [(life, size) for life in lives if (size := most[life.size]) is not None]
    offsets, total = _place_bounded(bounded)
    return _place_slots([life for life in lives if most[life.size] is None], offsets, Dim.of(total))


def _upper_bound(size: Dim) -> int | None:
    """Return the upper bound of a size. Return None if there is no bound, or if it exceeds the address space of a process."""
    most = bounds(size)[1]
    return most if most is not None and most <= LARGEST else None


def _place_bounded(lives: list[tuple[_Life, int]]) -> tuple[dict[Var, Dim], int]:
    """Place the allocations, the largest first, each at the lowest offset that is free throughout its lifetime."""
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first and last binding of the lifetime), ordered by offset
    offsets: dict[Var, Dim] = {}
    total = 0
    for life, size in sorted(lives, key=lambda item: (-item[1], item[0].first)):
        offset, first, last = 0, life.first, life.last
        for start, end, other_first, other_last in placed:
            if first > other_last or other_first > last:
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        insort(placed, (offset, offset + size, first, last))
        offsets[life.var] = Dim.of(offset)
        total = max(total, offset + size)
    return offsets, total


@dataclass(slots=True)
class _Slot:
    """Memory at a symbolic offset that several allocations use, one after another."""

    size: Dim
    last_use: int  # number of the last binding that uses the slot
    users: list[_Life]


def _place_slots(lives: list[_Life], offsets: dict[Var, Dim], total: Dim) -> tuple[dict[Var, Dim], Dim]:
    """Place allocations in slots after the first `total` bytes, and add their offsets to `offsets`. Return these offsets, and the size of
    the arena."""
    slots: list[_Slot] = []
    for life in lives:  # in order of allocation
        free = [s for s in slots if s.last_use < life.first]
        slot = next((s for s in free if prove_le(life.size, s.size)), None)
        if slot is None:
            slot = next((s for s in free if prove_le(s.size, life.size)), None)
            if slot is None:
                slot = _Slot(life.size, 0, [])
                slots.append(slot)
            slot.size = life.size
        slot.users.append(life)
        slot.last_use = life.last
    for slot in slots:
        for life in slot.users:
            offsets[life.var] = total
        total = total + slot.size
    return offsets, total
