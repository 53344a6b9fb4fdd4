"""Predict the time of each kernel of a step on an H100 or H200, from its machine code.

A block first fills its pipeline, then makes the trips of its hot loop, then writes its results. A trip takes as long as the slowest of

    the warp         its own instructions and what they wait for (tests/lab/sass/warp.py)
    issue            the instructions of all warps that share a scheduler, and those of them that the unit for special functions runs
    turns            in attention, the turns of both warpgroups, which multiply one after the other
    tensor cores     the products of all blocks on a multiprocessor
    the producer     the instructions of the warp that copies for a product
    copies           the latency of memory, divided by the number of stages in flight
    L2               the bytes that all multiprocessors copy from it

and a kernel takes at least as long as its bytes take at the bandwidth of a copy. This is a model on paper: it says what to mend first, and
an error of 30 % would not surprise. Where it knows no better, it takes both sides of a branch, and one trip of a loop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from compiler.backends.cuda.schedule.attention.walk import FEW, SPLIT
from compiler.backends.cuda.schedule.float_product import FEW as FEW_ROWS
from compiler.ir.loops.statements import Allocate, For, Let, Tile, When
from compiler.ir.loops.visit import statements, walk_stmts
from compiler.machine.intrinsics.block_code import WARPS
from compiler.machine.intrinsics.block_product import BlockProduct
from compiler.machine.intrinsics.mma import Mma
from compiler.machine.intrinsics.mma_pages import PageScores
from compiler.machine.intrinsics.wgmma import WARPGROUPS, Wgmma
from compiler.machine.intrinsics.wgmma_attend import WgmmaAttend
from deploy.bench.compute.case import Case
from runtime.cache_groups import PAGE_SIZE
from runtime.device.cuda.region import BLOCKS_PER_UNIT
from tests.lab.sass.facts import facts_of
from tests.lab.sass.listing import Listing, Loop
from tests.lab.sass.step import Kernel, Launched, is_scan, saved_states
from tests.lab.sass.warp import (
    DRAM,
    L2,
    MULTIPLIES,
    SPECIAL_CYCLES,
    cycles_between,
    cycles_of,
    cycles_of_trip,
    mma_operations,
    product_cycles,
)

WARPGROUPS_ATTEND = "warpgroup attention"  # name of a schedule
IDLE = 2 * L2  # cycles of a block of attention that loads what tells it that it has no work
LAUNCH_S = 1.3e-6  # from the end of a kernel to the begin of the next one, within a graph
# From the end of a kernel to the first instruction after griddepcontrol.wait of the next one, if that has begun early. This is an
# assumption: half of LAUNCH_S.
WAITED_S = 0.65e-6
FEW_UNITS = 8  # a launch on at most one in so many multiprocessors leaves room for the next one
SCHEDULERS = 4  # number of schedulers of a multiprocessor
WARP = 32


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    bytes_per_s: float  # bandwidth of a copy
    operations_per_s: float  # rate of bf16 products that others measured
    l2_bytes_per_s: float = 5.5e12
    units: int = 132
    clock_hz: float = 1.755e9
    registers: int = 65536  # of one multiprocessor, like all following numbers
    shared_bytes: int = 228 << 10
    threads: int = 2048
    blocks: int = 32
    tensor_operations: int = 4096  # in a cycle
    mma_operations: int = 2560  # in a cycle, by `mma.sync`; others measured five eighths of the rate of `wgmma`

    @property
    def slowdown(self) -> float:
        """The factor by which tensor cores that are always busy are slower than by the clock."""
        return self.units * self.clock_hz * self.tensor_operations / self.operations_per_s


CARDS = (Card("H100", 3.0e12, 790e12), Card("H200", 4.3e12, 790e12))
# For cards without `wgmma`, bandwidths and rates are estimates: nine tenths of what NVIDIA states.
CARDS_OF: Mapping[str, Sequence[Card]] = {
    "sm_80": (Card("A100", 1.8e12, 280e12, 4.5e12, 108, 1.41e9, shared_bytes=164 << 10, tensor_operations=2048, mma_operations=2048),),
    "sm_89": (
        Card(
            *("L40S", 0.78e12, 325e12, 4.5e12, 142, 2.52e9),
            shared_bytes=100 << 10,
            threads=1536,
            blocks=24,
            tensor_operations=1024,
            mma_operations=1024,
        ),
    ),
    "sm_90a": CARDS,
}
RESERVED_BYTES = 1 << 10  # bytes of shared memory that the card reserves for each block


@dataclass(frozen=True, slots=True)
class Prediction:
    launched: Launched
    resident: int  # blocks that fit a multiprocessor at once
    warp: float  # cycles of a trip of the hot loop for a warp
    issue: float  # cycles of a trip for the schedulers
    flight: float  # bytes in flight on the whole card
    seconds: float  # of one launch
    operations: float
    limit_s: float  # the time of its bytes and operations at the limits of the card

    @property
    def share(self) -> float:
        return self.limit_s / self.seconds


@dataclass(frozen=True, slots=True)
class _Work:
    """The cycles of the parts of a block: before its hot loop, in a trip of this loop, and after it."""

    before: float
    trip: float  # cycles of a trip for one warp
    issue: float  # cycles of a trip for the scheduler with most instructions of one block
    tensor: float  # cycles of a trip for which one block keeps the tensor cores busy
    trips: float  # number of trips of the hot loop
    after: float
    flight: float  # bytes in flight of a block
    stages: int = 0  # stages of copies in flight; 0: the warp waits for its loads itself
    copied_bytes: int = 0  # bytes that a block copies in a trip
    turns: float = 0.0  # cycles of a trip in which one warpgroup has the tensor cores and the others wait for them


def predict(card: Card, launched: Launched, case: Case) -> Prediction:
    kernel = launched.kernel
    if kernel.schedule == WARPGROUPS_ATTEND and case.is_prefill == ("HMMA" in kernel.kinds):
        return _idle(card, launched)
    resident, work = occupancy(card, kernel), _work(card, launched, case)
    start = start_of(kernel.listing)
    begins_early = launched.before is not None and finds_room(card, launched, launched.before)
    active = _working_blocks(launched, case)
    on_unit = min(resident, math.ceil(active / card.units))
    copies = DRAM / work.stages if work.stages else 0.0
    from_l2 = work.copied_bytes * min(active, card.units * resident) / card.l2_bytes_per_s * card.clock_hz
    turns = work.turns + work.tensor * (card.slowdown - 1) if work.turns else 0.0
    trip = max(work.trip, work.issue * on_unit, work.tensor * on_unit * card.slowdown, turns, copies, from_l2)
    rounds = math.ceil(active / (card.units * resident))
    # While the kernel before still runs, the first blocks do what they do before they wait for its end. Those that copy weights early do
    # all that they do before their first trip, and their first weights arrive: then `first`, the wait for the first bytes, is short.
    ends, hidden, first = work.before + work.after, 0.0, DRAM
    awaited = DRAM if kernel.tiles else 0  # the first operands of a product, by each block
    done = 0.0  # the part of `hidden` that is no wait
    if begins_early and copies_early(launched):
        done, hidden, first = work.before, work.before + awaited - L2, L2
    elif begins_early and start.wait is not None:
        done = hidden = cycles_of(kernel.listing, 0, start.wait, L2, lambda _: 1)
        if kernel.tiles:  # the first wait may be that of another tile, which comes after its early copies
            done = hidden = min(hidden, work.before)
    # Blocks that begin no run load what tells them so. As large as others, they take turns with them.
    ends_at_once = IDLE * (launched.blocks - active) / (card.units * resident) if launched.working < 1 else 0.0
    transfer_s, operations = launched.num_bytes / card.bytes_per_s, _operations(launched, case)
    seconds = _gap_s(kernel) + max(
        transfer_s + (max(0.0, ends - done) + first) / card.clock_hz,
        (rounds * launched.of_block * (ends + awaited + work.trips * trip) + ends_at_once - hidden) / card.clock_hz,
    )
    return Prediction(
        launched,
        resident=resident,
        warp=work.trip,
        issue=work.issue * on_unit,
        flight=work.flight * min(active, card.units * resident),
        seconds=seconds,
        operations=operations,
        limit_s=max(transfer_s, operations / card.operations_per_s),
    )


def _gap_s(kernel: Kernel) -> float:
    """Return the time from the end of the kernel before to the first thing that a kernel does after this end."""
    return WAITED_S if start_of(kernel.listing).waits else LAUNCH_S


def _idle(card: Card, launched: Launched) -> Prediction:
    """Predict a phase of attention by `wgmma` whose blocks find nothing to do, because the other phase computes the tokens of the step. A
    block loads what tells it so, and waits for this."""
    resident = occupancy(card, launched.kernel)
    blocks, most = max(1, launched.blocks), card.units * BLOCKS_PER_UNIT  # a launch has at least one block
    rounds = math.ceil(min(blocks, most) / (card.units * resident)) * math.ceil(blocks / most)
    seconds = _gap_s(launched.kernel) + rounds * IDLE / card.clock_hz
    return Prediction(launched, resident, warp=IDLE, issue=0.0, flight=0.0, seconds=seconds, operations=0.0, limit_s=0.0)


def occupancy(card: Card, kernel: Kernel) -> int:
    """Return how many blocks of a kernel fit a multiprocessor, at least 1. A thread gets registers in units of 8, and the warps of a
    scheduler share a quarter of the registers."""
    registers = -(-kernel.usage.registers // 8) * 8 * WARP
    warps = card.registers // SCHEDULERS // registers * SCHEDULERS
    by_registers, shared = warps // math.ceil(kernel.threads / WARP), kernel.shared_bytes + RESERVED_BYTES
    return max(1, min(card.blocks, card.threads // kernel.threads, by_registers, card.shared_bytes // shared))


def finds_room(card: Card, launched: Launched, before: Launched) -> bool:
    """Return whether blocks of a launch can begin while the launch before it runs. They can if the earlier launch has few blocks, if it
    leaves enough multiprocessors without work, or if a block of each launch fits a multiprocessor together."""
    kernel = launched.kernel
    both = kernel, before.kernel
    registers = sum(-(-k.usage.registers // 8) * 8 * WARP * math.ceil(k.threads / WARP) for k in both)
    shared = sum(k.shared_bytes + RESERVED_BYTES for k in both)
    fits = registers <= card.registers and shared <= card.shared_bytes and sum(k.threads for k in both) <= card.threads
    left = max(0, card.units - before.blocks)  # multiprocessors without work
    return fits or before.blocks <= card.units // FEW_UNITS or launched.blocks <= left * occupancy(card, kernel)


@dataclass(frozen=True, slots=True)
class Start:
    """How a kernel begins."""

    wait: int | None  # index of the wait for the end of the kernel before, if it may begin before that
    copies_early: bool  # whether it copies to shared memory before it waits

    @property
    def waits(self) -> bool:
        return self.wait is not None


def start_of(listing: Listing) -> Start:
    """Read how a kernel begins. ACQBULK is the assembler's name of griddepcontrol.wait, and UBLKCP that of a bulk copy."""
    kinds = [x.kind for x in listing.instructions]
    wait = kinds.index("ACQBULK") if "ACQBULK" in kinds else None
    return Start(wait, wait is not None and "UBLKCP" in kinds[:wait])


def copies_early(launched: Launched) -> bool:
    """Return whether the tile of a launch copies weights before it waits. Wide tiles only wait, also if narrow tiles of the kernel copy."""
    kernel = launched.kernel
    return start_of(kernel.listing).copies_early and (not has_loops(kernel) or loops_for(kernel, launched.rows).wgmma.is_narrow)


def has_loops(kernel: Kernel) -> bool:
    """Return whether a kernel has tiles with loops along k. The compiler unrolls short loops completely."""
    return bool(kernel.tiles) and bool(kernel.listing.loops_with(MULTIPLIES))


def _work(card: Card, launched: Launched, case: Case) -> _Work:
    kernel = launched.kernel
    if has_loops(kernel):
        return _mma_product(card, launched) if isinstance(kernel.tiles[0].op, Mma) else _product(launched)
    if "HGMMA" in kernel.kinds and not kernel.tiles:
        return _warpgroup_attention(kernel, case)
    if "attention" in kernel.schedule:
        return _attention(kernel, case)
    if is_scan(kernel):
        return _scan(kernel, case)
    # Subroutines follow the last store. They compute square roots and quotients of special values, so they are seldom called.
    listing = kernel.listing
    end = max((i + 1 for i, x in enumerate(listing.instructions) if x.kind == "STG"), default=0)
    arms = _arms(kernel)
    if kernel.schedule == "float product" and len(arms) > 1:
        arms = arms[:1] if case.tokens <= FEW_ROWS else arms[1:]
    others = [sorted(set(chain(*_arms(kernel))) - set(arm)) for arm in arms] or [[]]

    def cycles(skipped: Sequence[int]) -> tuple[float, float]:
        """Return the cycles of a warp and the number of its instructions."""
        trips = {loop: counted(listing, loop) for loop in listing.innermost if loop.begin not in skipped}
        instructions = end - len(skipped) + sum((count - 1) * (loop.end - loop.begin) for loop, count in trips.items())
        return cycles_of(listing, 0, end, L2, lambda x: trips.get(x, int(x not in listing.innermost)), skipped), instructions

    whole, instructions = (x / max(1, len(kernel.tiles)) for x in max(map(cycles, others)))  # a block runs one tile
    return _Work(before=0, trip=whole, issue=_issue(kernel.threads, instructions), tensor=0, trips=1, after=0, flight=0)


def _arms(kernel: Kernel) -> list[range]:
    """Return the parts of a kernel of which each block runs one, because of the number of the block: instructions with stores over which
    branches go, as many as the kernel has such parts."""
    stmt, listing = kernel.prim.body, kernel.listing
    while isinstance(stmt, For | Let | Allocate):
        stmt = stmt.body
    ends = [(i, listing.labels.get(x.target or "", 0)) for i, x in enumerate(listing.instructions) if x.predicate]
    found = [range(i + 1, end) for i, end in ends if any(listing.instructions[k].kind == "STG" for k in range(i + 1, end))]
    outer = [arm for arm in found if not any(set(arm) < set(other) for other in found)]
    parts = statements(stmt)
    return outer if len(outer) == len(parts) > 1 and all(isinstance(part, When) for part in parts) else []


def _issue(threads: int, instructions: float) -> float:
    """Return the cycles in which a scheduler issues these instructions for its share of a block's warps. A block with fewer warps than
    schedulers uses some of them, and other blocks use the others."""
    return instructions * math.ceil(threads / WARP) / SCHEDULERS


# --- scans -------------------------------------------------------------------------------------------------------------


def token_loop(listing: Listing) -> Loop:
    """Return the loop over the tokens of a scan: the longest loop inside of the loop over blocks."""
    return max((x for x in listing.loops if listing.loops[0].contains(x)), key=lambda loop: loop.end - loop.begin)


def _scan(kernel: Kernel, case: Case) -> _Work:
    """Return the work of a block that scans the tokens of one sequence, for some columns of one head. The state comes from memory before
    the first token. After some tokens it is written; branches go over these instructions otherwise."""
    listing, loop = kernel.listing, token_loop(kernel.listing)
    saves, share = _saves(listing, loop), saved_states(case) / case.tokens

    def trips(inner: Loop) -> float:
        return counted(listing, inner)

    often, always = (cycles_of_trip(listing, loop, L2, trips, skipped) for skipped in (saves, range(0)))
    return _Work(
        before=cycles_of(listing, 0, loop.begin, DRAM, trips),
        trip=often + share * (always - often),
        issue=_issue(kernel.threads, _instructions(listing, loop, trips) - len(saves) * (1 - share)),
        tensor=0,
        trips=case.tokens / case.sequences,
        after=0,
        flight=kernel.threads * facts_of(listing, Loop(0, loop.begin)).bytes_in_flight,
    )


def _saves(listing: Listing, loop: Loop) -> range:
    """Return the instructions of a loop over tokens that write the state: the most that a branch goes over, with several stores."""
    branches = ((i, listing.labels.get(listing.instructions[i].target or "", 0)) for i in range(loop.begin, loop.end))
    found = [range(i + 1, end) for i, end in branches if i < end <= loop.end]
    return max((x for x in found if sum(listing.instructions[i].kind == "STG" for i in x) > 1), key=len, default=range(0))


# --- products ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TileLoops:
    """The loops along k of a tile: that of the warps that multiply, and that of the warp that copies. By `mma.sync`, all warps multiply and
    copy in the same loop."""

    tile: BlockProduct
    consumer: Loop
    producer: Loop

    @property
    def wgmma(self) -> Wgmma:
        """The tile of a product by `wgmma`."""
        assert isinstance(self.tile, Wgmma)
        return self.tile


def loops_for(kernel: Kernel, rows: int) -> TileLoops:
    """Return the loops of the tile that computes a product of `rows` rows: of the tiles without a cluster, the lowest with enough rows;
    otherwise the last tile."""
    found = loops_of_tiles(kernel)
    low = [loops for loops in found if loops.tile.cluster == 1 and loops.tile.rows >= rows]
    return min(low, key=lambda loops: loops.tile.rows, default=found[-1])


def loops_of_tiles(kernel: Kernel) -> list[TileLoops]:
    """Return the loops of all tiles of a product. Tiles follow each other in the code."""
    tiles = [tile.op for tile in kernel.tiles if isinstance(tile.op, BlockProduct)]
    consumers = sorted(kernel.listing.loops_with(MULTIPLIES), key=lambda loop: loop.begin)
    producers = consumers if tiles and isinstance(tiles[0], Mma) else _producers(kernel.listing)
    if not tiles or not len(tiles) == len(consumers) == len(producers):
        counts = f"{len(tiles)} tiles, {len(consumers)} loops that multiply and {len(producers)} that copy"
        raise ValueError(f"kernel {kernel.name} has {counts}; the model knows no other products")
    return [TileLoops(*loops) for loops in zip(tiles, consumers, producers, strict=True)]


def _producers(listing: Listing) -> list[Loop]:
    """Return the smallest loops that copy rows and panels, in the order of the code. The assembler puts a loop around a copy of a panel."""
    found: list[Loop] = []
    for loop in sorted(listing.loops, key=lambda loop: loop.end - loop.begin):
        copied = {x.kind for x in listing.body(loop)}
        apart = all(loop.end <= other.begin or other.end <= loop.begin for other in found)
        if apart and {"UBLKCP", "LDGSTS"} <= copied and "HGMMA" not in copied:
            found.append(loop)
    return sorted(found, key=lambda loop: loop.begin)


def _product(launched: Launched) -> _Work:
    kernel, listing = launched.kernel, launched.kernel.listing
    loops = loops_for(kernel, launched.rows)
    tile, loop = loops.wgmma, loops.consumer
    depth, *_ = kernel.tiles[0].dims
    body, seldom, share = listing.body(loop), _end_of_group(listing, loop), min(1.0, tile.fold * tile.step / _group(kernel))
    often, always = (cycles_of_trip(listing, loop, L2, lambda _: 1, skipped) for skipped in (seldom, range(0)))
    active = min(1.0, launched.rows / tile.rows)
    return _Work(
        before=_prologue(listing, loops_of_tiles(kernel), loops),
        trip=max(often + share * (always - often), cycles_of_trip(listing, loops.producer, L2, lambda _: 1)),
        issue=_issue(tile.multipliers, len(body) - len(seldom) * (1 - share)) + len(listing.body(loops.producer)),
        tensor=tile.multipliers // (WARPS * WARP) * sum(map(product_cycles, body)),
        trips=depth.const / (tile.fold * tile.step),
        after=active * _epilogue(launched, loops),
        flight=tile.ahead * tile.weight_bytes,
        stages=tile.ahead,
        copied_bytes=tile.copied_bytes,
    )


def _mma_product(card: Card, launched: Launched) -> _Work:
    """Return the work of a block whose warps all copy and multiply by `mma.sync`."""
    kernel, listing = launched.kernel, launched.kernel.listing
    loops = loops_for(kernel, launched.rows)
    tile, loop = loops.tile, loops.consumer
    depth, *_ = kernel.tiles[0].dims
    body, seldom, share = listing.body(loop), _end_of_group(listing, loop), min(1.0, tile.step / _group(kernel))
    often, always = (cycles_of_trip(listing, loop, L2, lambda _: 1, skipped) for skipped in (seldom, range(0)))
    return _Work(
        before=_prologue(listing, loops_of_tiles(kernel), loops),
        trip=often + share * (always - often),
        issue=_issue(tile.threads, len(body) - len(seldom) * (1 - share)),
        tensor=tile.threads // WARP * sum(map(mma_operations, body)) / card.mma_operations,
        trips=depth.const / tile.step,
        after=min(1.0, launched.rows / tile.rows) * _epilogue(launched, loops),
        flight=(tile.stages - 1) * tile.weight_bytes,
        stages=tile.stages - 1,
        copied_bytes=tile.stage_bytes,
    )


def _group(kernel: Kernel) -> int:
    """Return the number of weights along k that share a scale."""
    _, _, _, _, *group = kernel.tiles[0].dims
    return group[0].const if group else kernel.tiles[0].dims[0].const


def _end_of_group(listing: Listing, loop: Loop) -> range:
    """Return the instructions that run only in trips in which a group of weights ends. A branch skips them otherwise, and they load
    scales."""
    for number in range(loop.begin, loop.end):
        target = listing.labels.get(listing.instructions[number].target or "", 0)
        if number < target <= loop.end and any(listing.instructions[i].kind == "LDG" for i in range(number, target)):
            return range(number + 1, target)
    return range(0)


def _last_store(listing: Listing, loop: Loop) -> int:
    """Return the end of the instructions that write the results of a loop along k: they come before the next such loop."""
    following = [other.begin for other in listing.loops_with(MULTIPLIES) if other.begin >= loop.end]
    end = min(following, default=len(listing.instructions))
    return max((i + 1 for i in range(loop.end, end) if listing.instructions[i].kind == "STG"), default=loop.end)


def _prologue(listing: Listing, tiles: Sequence[TileLoops], loops: TileLoops) -> float:
    """Return the cycles of a block from its begin to the loop along k of its tile. The code of the tiles begins where the first mbarrier is
    made, or in the loop over blocks if there is none. The block branches over the code of the tiles before its own. Only one lane runs the
    early copies of weights, while the other warps wait for them."""
    number = tiles.index(loops)
    made = (i for i, x in enumerate(listing.instructions) if x.name.startswith("SYNCS.EXCH"))
    entry = next(made, listing.loops[0].begin)
    begin, end = _end_of_results(listing, tiles[number - 1].consumer) if number else entry, loops.consumer.begin
    copies = [x for x in listing.innermost if begin <= x.begin < x.end <= end and any(i.kind == "UBLKCP" for i in listing.body(x))]
    skipped = range(min((x.begin for x in copies), default=0), max((x.end for x in copies), default=0))
    return cycles_of(listing, 0, entry, L2, lambda _: 1) + cycles_of(listing, begin, end, L2, lambda _: 0, skipped)


def _end_of_results(listing: Listing, loop: Loop) -> int:
    """Return the end of the code that writes the results of a loop along k."""
    last = _last_store(listing, loop)
    around = [x for x in listing.loops if loop.end <= x.begin < last < x.end]
    return max([last, *(x.end for x in around if all(i.kind != "LDGSTS" for i in listing.body(x)))])


def _epilogue(launched: Launched, loops: TileLoops) -> float:
    """Return the cycles in which a thread writes its elements of the result after a loop along k. If several loops write elements, a thread
    runs one of them."""
    listing, tile, begin = launched.kernel.listing, loops.tile, loops.consumer.end
    end = _end_of_results(listing, loops.consumer)
    copies = set(_copying(listing, loops))
    skipped = sorted(copies | _other_arms(listing, range(begin, end), is_whole=launched.rows % tile.rows == 0))

    def num_stores(loop: Loop) -> int:
        return sum(listing.instructions[i].kind == "STG" for i in range(loop.begin, loop.end) if i not in skipped)

    within = [x for x in listing.loops if begin <= x.begin and x.end <= end and x.begin not in copies]
    stores = {x: count for x in within if (count := num_stores(x)) and not any(other.contains(x) for other in within)}
    elements = -(-tile.rows * tile.columns // tile.writers)  # of a thread
    longest = max((elements / n * cycles_of_trip(listing, x, L2, lambda _: 1, skipped) for x, n in stores.items()), default=0.0)
    return longest + cycles_of(listing, begin, end, L2, lambda inner: 0 if inner in stores or inner.begin in copies else 1, skipped)


def _other_arms(listing: Listing, part: range, *, is_whole: bool) -> set[int]:
    """Return the instructions of the arm that does not run. The code that writes results (compiler/backends/cuda/schedule/epilogue.py) has
    one arm for tiles whose rows all exist (`is_whole`), and one that tests each row. Both store elements; the second has more branches."""
    found: set[int] = set()
    for number in part:
        x, begin = listing.instructions[number], listing.labels.get(listing.instructions[number].target or "", 0)
        joined = listing.instructions[begin - 1] if number < begin - 1 and begin in part else None
        if x.predicate and joined is not None and joined.target and not joined.predicate:
            arms = range(number + 1, begin), range(begin, listing.labels[joined.target])
            kinds = [[listing.instructions[i].kind for i in arm] for arm in arms]
            if all("STG" in kind for kind in kinds):
                few_first = kinds[0].count("BRA") <= kinds[1].count("BRA")
                found.update(arms[1 if few_first == is_whole else 0])
    return found


def _copying(listing: Listing, loops: TileLoops) -> range:
    """Return the instructions of the warp that copies: a branch before the loop of the other warps goes to the first of them."""
    before = [listing.labels.get(x.target or "", 0) for x in listing.instructions[: loops.consumer.begin]]
    begin = max((at for at in before if loops.consumer.end <= at <= loops.producer.begin), default=loops.producer.begin)
    return range(begin, loops.producer.end)


def _operations(launched: Launched, case: Case) -> float:
    kernel = launched.kernel
    if "attention" in kernel.schedule:
        *_, heads, size = (d.const for d in kernel.prim.outputs[0].shape[1:])
        seen = case.context - (case.tokens / case.sequences - 1) / 2  # keys that a token sees, on average
        return 4.0 * heads * size * seen * case.tokens
    if not kernel.tiles:
        return 0.0
    tile = kernel.tiles[0]
    assert isinstance(tile.op, BlockProduct)
    return 2.0 * tile.dims[0].const * tile.op.sums * _num_columns(kernel) * launched.rows * launched.runs


def _num_columns(kernel: Kernel) -> int:
    """Return the number of columns of a product, rounded up to whole panels."""
    tile = kernel.tiles[0]
    assert isinstance(tile.op, BlockProduct)
    return tile.op.panel_columns * tile.operands[2].buffer.shape[-3].const


# --- attention ---------------------------------------------------------------------------------------------------------


def splits_of(kernel: Kernel) -> Loop:
    """Return the loop over the splits of attention by `wgmma`."""
    multiplies = [i for i, x in enumerate(kernel.listing.instructions) if x.kind == "HGMMA"]
    around = [x for x in kernel.listing.loops if x.begin <= multiplies[0] and multiplies[-1] < x.end]
    return min(around, key=lambda loop: loop.end - loop.begin)


def _warpgroup_attention(kernel: Kernel, case: Case) -> _Work:
    """Return the work of a block of attention by `wgmma`. Both warpgroups make every trip. In one split of the keys per tile, some rows do
    not see some keys; in the other splits, branches skip the instructions that mask scores and check means."""
    listing, loop, op = kernel.listing, splits_of(kernel), attend_tile(kernel)
    body, edges, other = listing.body(loop), _edges(listing, loop), _other_copies(listing, loop)
    num_splits = (-(-case.context // SPLIT) + 1) / 2
    # With several stages, each warpgroup copies as much as the other; with one stage, the second one copies everything.
    of_first, of_second = other, other if op.stages > 1 else []
    often, always = (cycles_of_trip(listing, loop, L2, lambda _: 1, skipped) for skipped in (edges + of_second, of_second))
    num_warps = kernel.threads // WARP / SCHEDULERS
    end = _last_store(listing, loop)
    skipped = (len(of_first) + len(of_second)) / 2
    tensor = sum(map(product_cycles, body))
    if op.is_latent:  # the warpgroups take no turns: each waits for the products of both
        often, always, turns = often + tensor, always + tensor, 0.0
    else:
        awaited = rf"BAR\.SYNC\S* \w+, {kernel.threads:#x}$"  # barriers of one warpgroup have fewer threads
        turns = sum(cycles_between(listing, loop, awaited, "BAR.ARV", L2, edges + others) for others in (of_first, of_second))
    return _Work(
        before=cycles_of(listing, 0, loop.begin, L2, lambda inner: counted(listing, inner)),
        trip=often + (always - often) / num_splits,
        issue=num_warps
        * max(len(body) - skipped - len(edges) * (1 - 1 / num_splits), SPECIAL_CYCLES * sum(x.kind == "MUFU" for x in body)),
        tensor=WARPGROUPS * tensor,
        trips=num_splits,
        after=cycles_of(listing, loop.end, end, L2, lambda inner: counted(listing, inner)),
        flight=op.stage_bytes,
        stages=1,
        copied_bytes=op.stage_bytes,
        turns=turns,
    )


def _other_copies(listing: Listing, loop: Loop) -> list[int]:
    """Return the instructions of a loop that copy what the other warpgroup copies: branches go over some of the copies, not all. With
    several stages, each warpgroup copies one half, and the code of the first half that a branch goes over counts."""
    copies = {i for i in range(loop.begin, loop.end) if listing.instructions[i].kind == "LDGSTS"}
    found: set[int] = set()
    for number in range(loop.begin, loop.end):
        target = listing.labels.get(listing.instructions[number].target or "", 0)
        inside = set(range(number + 1, target if target <= loop.end else 0))
        if number not in found and 0 < len(copies & inside) < len(copies):
            found |= inside
            if 2 * len(copies & inside) == len(copies):
                break
    return sorted(found)


def attend_tile(kernel: Kernel) -> WgmmaAttend:
    return next(s.op for s in walk_stmts(kernel.prim.body) if isinstance(s, Tile) and isinstance(s.op, WgmmaAttend))


def _edges(listing: Listing, loop: Loop) -> list[int]:
    """Return the instructions of a loop over splits that run only where some row does not see all keys: branches go over them, and they
    turn bits of a mask into predicates, or note a mean that is not finite."""
    found: set[int] = set()
    for number in range(loop.begin, loop.end):
        target = listing.labels.get(listing.instructions[number].target or "", 0)
        inside = range(number + 1, target if target <= loop.end else 0)
        if {"R2P", "ATOMS"} & {listing.instructions[i].kind for i in inside}:
            found.update(inside)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The shape of an attention kernel."""

    on_tensors: bool
    keys: Loop  # the loop over the keys of a split
    values: Loop  # on tensor cores, over groups of pages
    each_page: Loop | None  # the loop over single pages, of groups in which some keys are not seen
    split: Loop  # all that a block does for a split
    end: int  # end of the code after the splits, which joins the results of the splits in steps of few tokens


def _walk_of(kernel: Kernel, case: Case) -> _Walk:
    """Find the parts of an attention kernel that run in a step. On tensor cores, the code for few rows comes first."""
    listing = kernel.listing
    on_tensors = any(x.kind == "HMMA" for x in listing.instructions)
    loops = listing.loops_with("HMMA" if on_tensors else r"LDG\.E\.U16")
    first = 2 if on_tensors and case.is_prefill else 0
    if len(loops) < first + 2:
        raise ValueError(f"kernel {kernel.name} has no loops over keys and values that the model knows")
    keys, values = loops[first : first + 2]
    around = [loop for loop in listing.loops if loop.contains(keys) and loop.contains(values)]
    split = around[-1] if len(around) > 1 else Loop(keys.begin, values.end)
    following = [loop.begin for loop in loops[first + 2 :]]
    later = [loop for loop in listing.loops if split.end <= loop.begin and loop.end <= min(following, default=loop.end)]
    joins = [loop.end for loop in later if {"LDG", "FFMA"} <= {x.kind for x in listing.body(loop)}]  # other loops load queries
    groups = [loop for loop in listing.loops if loop.contains(values) and split.contains(loop)] if on_tensors else []
    each_page = values if groups else None
    return _Walk(on_tensors, keys, groups[-1] if groups else values, each_page, split, max(joins, default=split.end))


def _attention(kernel: Kernel, case: Case) -> _Work:
    listing, walk = kernel.listing, _walk_of(kernel, case)
    is_few, num_splits = case.tokens <= FEW, -(-case.context // SPLIT)
    pages, size = SPLIT // PAGE_SIZE, _head_size(kernel)

    def trips(loop: Loop) -> float:
        if loop == walk.keys:
            return pages / WARPS if walk.on_tensors else size / _loads(listing, loop)
        if loop == walk.each_page:
            return 0
        if loop == walk.values and walk.each_page is not None:
            each = _loads(listing, walk.each_page)  # of a page in which all keys are seen, and of another one
            return pages / ((_loads(listing, loop) - each) / (each / 2))
        if loop == walk.values:
            return pages if walk.on_tensors else PAGE_SIZE / _loads(listing, loop)
        if not walk.split.contains(loop):
            return 1
        return pages if loop.contains(walk.values) and not walk.on_tensors else counted(listing, loop)

    def joins(loop: Loop) -> float:
        return num_splits / max(1, _loads(listing, loop) // 3) if loop in listing.innermost else 1

    split = walk.split
    return _Work(
        before=cycles_of(listing, 0, split.begin, L2, trips),
        trip=cycles_of_trip(listing, split, DRAM, trips),
        issue=_issue(kernel.threads, _instructions(listing, split, trips)),
        tensor=0,
        trips=1 if is_few else (num_splits + 1) / 2 if case.is_prefill else num_splits,
        after=cycles_of(listing, split.end, walk.end, L2, joins) if is_few else 0,
        flight=kernel.threads * max(facts_of(listing, loop).bytes_in_flight for loop in (walk.keys, walk.values)),
    )


def counted(listing: Listing, loop: Loop) -> int:
    """Estimate how many trips a loop makes from the constant with which its counter is compared, rounded up to an even number. Return 1 for
    loops without such a constant."""
    branch = listing.instructions[loop.end - 1]
    compared = (re.match(r"(U?P\d), U?PT, (\w+)(?:\.reuse)?, (0x[0-9a-f]+), ", x.operands) for x in listing.body(loop) if "ISETP" in x.name)
    ends = [(found[2], int(found[3], 16)) for found in compared if found and found[1] == branch.predicate.lstrip("!")]
    if not ends:
        return 1
    counter, end = ends[-1]
    added = (re.match(rf"{counter}, (?:U?P\d, )?{counter}(?:\.reuse)?, (0x[0-9a-f]+)\b", x.operands) for x in listing.body(loop))
    steps = end // next((int(found[1], 16) for found in added if found), 1)
    return max(1, steps + steps % 2)


def _instructions(listing: Listing, loop: Loop, trips: Callable[[Loop], float]) -> float:
    """Return the number of instructions of a trip of a loop, those of the loops inside counted once for each of their trips."""
    inside = [x for x in listing.loops if loop.contains(x)]
    direct = [x for x in inside if not any(other.contains(x) for other in inside)]
    own = loop.end - loop.begin - sum(x.end - x.begin for x in direct)
    return own + sum(trips(x) * _instructions(listing, x, trips) for x in direct)


def _loads(listing: Listing, loop: Loop) -> int:
    return max(1, sum(x.kind == "LDG" for x in listing.body(loop)))


def _head_size(kernel: Kernel) -> int:
    """Return the number of elements of a head's result, the last extent of the output."""
    return kernel.prim.outputs[0].shape[-1].const


def _working_blocks(launched: Launched, case: Case) -> int:
    """Return the number of blocks that have work; the others end at once. In a prefill on tensor cores, a block computes the attention of a
    run of tokens."""
    kernel = launched.kernel
    if has_loops(kernel) and isinstance(tile := loops_for(kernel, launched.rows).tile, Wgmma) and tile.lone:
        return -(-_num_columns(kernel) // tile.columns)
    if kernel.tiles:
        return round(launched.blocks * launched.working)
    if "attention" not in kernel.schedule or not case.is_prefill or "HMMA" not in kernel.kinds:
        return launched.blocks
    rows = max(tile.op.rows for tile in walk_stmts(kernel.prim.body) if isinstance(tile, Tile) and isinstance(tile.op, PageScores))
    heads_of_a_block = kernel.prim.outputs[0].shape[1].const * case.tokens // launched.blocks
    return -(-launched.blocks * heads_of_a_block // rows)
