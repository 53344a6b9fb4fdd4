"""Group rows by their experts. A block finds the rows of one expert, so all experts are grouped in parallel.

    for block e in experts {
      for thread t { count its choices of expert e, and those of lower experts }
      place of each thread's first choice of e: all choices of lower experts, plus the choices of e of the threads before
      for thread t { write its choices of expert e, in order }
    }

The choices of a thread are adjacent. A thread has several loads in flight, so a thread with few choices waits for memory only once.
"""

from __future__ import annotations

from compiler.backends.cuda.schedule.hold import hold
from compiler.idioms.grouping import Grouping, match_grouping
from compiler.ir.dims import Dim, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, cast, const, equal, index, less, maximum, minimum, select
from compiler.machine.intrinsics.block_places import BlockPlaces

THREADS = BlockPlaces.threads
AT_ONCE = 4  # number of choices that a thread loads at once
I32, I64 = DType.I32, DType.I64


def schedule_grouping(prim: PrimFunc) -> PrimFunc | None:
    """Schedule a nest that groups rows by their experts. Return None for any other nest."""
    found = match_grouping(prim)
    if found is None:
        return None
    k = Kernel()
    with k.grid("b", found.count) as expert:
        _write(k, found, expert)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "grouping"})


def _write(k: Kernel, found: Grouping, expert: Dim) -> None:
    """Write what the block of an expert does: count its choices, find their places, and write the rows of the expert. A number that names
    no expert counts as the nearest expert."""
    experts, tokens, chosen, places = k.arrays(found.experts, found.tokens, found.chosen, found.places)
    num_chosen, num_rows = experts.shape[1].const, tokens.shape[0]
    own = cast(index(expert), I32)
    times = k.let("times", ceil_div(num_rows, THREADS * AT_ONCE))  # number of times that a thread loads AT_ONCE choices
    own_items, lower, first = (k.shared(name, THREADS, dtype=I32) for name in ("own", "lower", "first"))

    def choices(t: Dim, m: Dim) -> tuple[list[Dim], list[Scalar]]:
        """Return the numbers of some choices of a thread, and their experts. A choice after the last one gets the expert number `count`,
        for which there is no block."""
        numbers = [(t * times + m) * AT_ONCE + u for u in range(AT_ONCE)]
        values: list[Scalar] = []
        for number in numbers:
            at = k.let("at", dim_min(number, num_rows - 1), num_rows - 1)
            clamped = maximum(minimum(cast(experts[at // num_chosen, at % num_chosen], I64), found.count - 1), 0)
            values.append(select(less(number, num_rows), cast(clamped, I32), const(found.count, I32)))
        return numbers, hold(k, values)

    with k.threads("t", THREADS) as t:
        counts = k.local("counts", 2, dtype=I32)
        counts[0], counts[1] = 0, 0
        with k.serial("m", times) as m:
            _, values = choices(t, m)
            for value in values:
                counts[0] = counts[0] + cast(equal(value, own), I32)
                counts[1] = counts[1] + cast(value < own, I32)
        own_items[t], lower[t] = counts[0], counts[1]
    k.tile(BlockPlaces(), first[0], own_items[0], lower[0])
    with k.threads("t", THREADS) as t:
        following = k.local("following", 1, dtype=I32)
        following[0] = first[t]
        with k.serial("m", times) as m:
            numbers, values = choices(t, m)
            for number, value in zip(numbers, values, strict=True):
                with k.when(equal(value, own)):
                    row = k.let("row", cast(following[0], I64), num_rows - 1)
                    tokens[row] = cast(index(number // num_chosen), I32)
                    chosen[row] = own
                    places[number // num_chosen, number % num_chosen] = cast(index(row), I32)
                    following[0] = following[0] + 1
