"""Estimate how long one warp takes for instructions, by the cycles that the assembler wrote into them and by measured latencies.

A warp issues in order. An instruction waits for scoreboards, then the warp pauses as the assembler says. Data of asynchronous copies is
assumed to be there: tests/lab/sass/model.py says when it arrives. All instructions of a range are assumed to run, those behind branches
too. Latencies are those that others measured on an H100, in cycles; those of loads depend on where the data is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.lab.sass.listing import Instruction, Listing, Loop

L2, DRAM = 270, 600  # latency of a load from global memory
LATENCY = {"LDS": 30, "LDSM": 33, "SHFL": 25, "MUFU": 25, "S2R": 25, "S2UR": 25, "ATOMG": 400, "ATOM": 400, "STG": 15, "STS": 15}
OTHER_LATENCY = 20
# Instructions that hold up a warp although they set no scoreboard: barriers and fences of the block, and taken branches.
HOLDS = {"BAR": 25, "MEMBAR": 20, "FENCE": 20, "SYNCS": 15, "DEPBAR": 5, "BRA": 8, "BSYNC": 8}
# The name of the store by which a kernel tells the host that it begins (runtime/device/cuda/last_launch.py) ends like this. Its predicate
# holds only with RELAXSERVE_DEBUG.
NAMES_ITSELF = "STRONG.SYS"
FEWEST = 16  # cycles of the smallest wgmma
SPECIAL_CYCLES = 8  # for which an instruction of a warp keeps the unit for special functions busy
DRAINS = 30  # cycles from the end of a wgmma until its sums can be read
MULTIPLIES = "HG?MMA"  # pattern of the names of the tensor cores' instructions: `wgmma` and `mma.sync`
_SHAPE = re.compile(r"HGMMA\.64x(\d+)x")

Trips = Callable[[Loop], float]


def product_cycles(instruction: Instruction) -> int:
    """Return for how many cycles a wgmma keeps the tensor cores busy; 0 for other instructions."""
    shape = _SHAPE.match(instruction.name)
    return 0 if shape is None else max(FEWEST, int(shape[1]) // 2)


def mma_operations(instruction: Instruction) -> int:
    """Return the number of operations of a mma.sync of bf16, of 16 columns by 8 rows by 16 elements along k; 0 for other instructions."""
    return 2 * 16 * 8 * 16 if instruction.kind == "HMMA" else 0


@dataclass(slots=True)
class Warp:
    load_cycles: int
    now: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)  # the cycle in which each scoreboard is released
    tensor_free: float = 0.0  # the cycle in which the tensor cores have ended all issued products
    groups: list[float] = field(default_factory=list[float])  # the cycle in which the sums of each group of wgmma can be read

    def issue(self, x: Instruction) -> None:
        if x.predicate and x.name.endswith(NAMES_ITSELF):
            return
        for board in x.waits:
            self.now = max(self.now, self.boards[board])
        if x.name.startswith("WARPGROUP.DEPBAR"):
            self.now = max([self.now, *self.groups[: len(self.groups) - _allowed(x)]])
        if cycles := product_cycles(x):
            self.tensor_free = max(self.now, self.tensor_free) + cycles
            if "gsb0" in x.operands:
                self.groups.append(self.tensor_free + DRAINS)
        if not x.never_runs:
            latency = self.load_cycles if x.kind == "LDG" else LATENCY.get(x.kind, OTHER_LATENCY)
            if x.sets is not None:
                self.boards[x.sets] = max(self.boards[x.sets], self.now + latency)
            if x.reads is not None:
                self.boards[x.reads] = max(self.boards[x.reads], self.now + LATENCY["STS"])
            self.now += HOLDS.get(x.kind, 0)
        self.now += max(1, x.stall)

    def drain(self) -> None:
        self.now = max(self.now, *self.boards)


def _allowed(wait: Instruction) -> int:
    """Return how many groups of wgmma may still run after a wait."""
    return int(wait.operands.rpartition(",")[2], 0)


def cycles_of(listing: Listing, begin: int, end: int, load_cycles: int, trips: Trips, skipped: Sequence[int] = ()) -> float:
    """Return the cycles of a range of instructions, in which each loop makes as many trips as `trips` says. `skipped` are instructions over
    which branches go."""
    warp = Warp(load_cycles)
    _run(warp, listing, (begin, end), trips, skipped=skipped)
    warp.drain()
    return warp.now


def cycles_of_trip(listing: Listing, loop: Loop, load_cycles: int, trips: Trips, skipped: Sequence[int] = ()) -> float:
    """Return the cycles of one trip of a loop that has made several trips. `skipped` are instructions over which the trip branches."""
    warp, before = Warp(load_cycles), 0.0
    for _ in range(4):
        before = warp.now
        _run(warp, listing, (loop.begin, loop.end), trips, loop, skipped)
    return warp.now - before


def cycles_between(listing: Listing, loop: Loop, first: str, last: str, load_cycles: int, skipped: Sequence[int]) -> float:
    """Return the cycles from the end of an instruction whose text begins with the pattern `first` to the end of the next one that begins
    with `last`, which may be in the next trip of a loop. `skipped` are instructions over which trips branch."""
    warp, begin, found = Warp(load_cycles), 0.0, 0.0
    for _ in range(4):
        for at in range(loop.begin, loop.end):
            if at not in skipped:
                warp.issue(listing.instructions[at])
                text = f"{listing.instructions[at].name} {listing.instructions[at].operands}"
                if re.match(first, text):
                    begin = warp.now
                elif re.match(last, text):
                    found = warp.now - begin
    return found


def _run(
    warp: Warp, listing: Listing, part: tuple[int, int], trips: Trips, inside: Loop | None = None, skipped: Sequence[int] = range(0)
) -> None:
    at, end = part
    loops = [loop for loop in listing.loops if inside is None or inside.contains(loop)]
    while at < end:
        loop = next((x for x in loops if x.begin == at and x.end <= end), None)
        if loop is None:
            if at not in skipped:
                warp.issue(listing.instructions[at])
            at += 1
        else:
            if count := trips(loop):
                warp.drain()
                warp.now += count * cycles_of_trip(listing, loop, warp.load_cycles, trips)
                warp.boards = [0.0] * 6
            at = loop.end
