"""Instructions by which the threads of a block, or of a warp, wait for each other at a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.instructions import clusters
from tests.gpu.ptx.instructions.warps import check_members, check_whole
from tests.gpu.ptx.program import Array, Arrive, Assembler, Instruction, waits
from tests.gpu.ptx.text import Operand
from tests.gpu.ptx.wave import WARP, Context


@dataclass(slots=True, eq=False)
class Waiting:
    """Threads that have arrived at a barrier. `stays` says whether the threads wait until the barrier is complete (bar.sync) or only count
    as arrived (bar.arrive)."""

    threads: Array
    barrier: int
    expected: int  # number of threads that the barrier waits for; 0 means the whole block
    stays: bool
    context: Context


@waits("bar", "barrier")
def _barrier(code: Assembler, instruction: Instruction) -> Arrive:
    modifiers = [m for m in instruction.modifiers if m != "cta"]
    if modifiers[0] == "warp":
        read_mask = code.read(instruction.operands[0], np.uint32)

        def warp(wave: Any, context: Context) -> None:
            check_members(wave, context.index, read_mask(wave, context.index))
            wave.shadow.synchronise_warps(context.index)
            wave.resume(context.piece + 1, context.threads, context.join, context.age)

        return warp
    if modifiers[0] == "cluster":
        return clusters.barrier(instruction)
    if modifiers[0] not in ("sync", "arrive"):
        raise UnknownPtx("reductions by barriers are not supported")
    aligned = instruction.opcode == "bar" or "aligned" in modifiers
    numbers: list[Operand] = list(instruction.operands)
    read_number = code.read(numbers[0], np.uint32)
    read_count = code.read(numbers[1], np.uint32) if len(numbers) > 1 else None

    def arrive(wave: Any, context: Context) -> None:
        if aligned:
            check_whole(wave, context.index)
        barriers = np.broadcast_to(read_number(wave, context.index), context.threads.shape)
        counts = (
            np.broadcast_to(read_count(wave, context.index), context.threads.shape) if read_count is not None else np.zeros_like(barriers)
        )
        waiting = wave.state.setdefault("a barrier", [])
        if not waiting and _release not in wave.stalls:
            wave.stalls.append(_release)
            wave.ends.append(_check_end)
        stays = modifiers[0] == "sync"
        for barrier in np.unique(barriers):
            if barrier > 15:
                raise Fault(f"barrier {barrier} does not exist: a block has barriers 0 to 15")
            here = barriers == barrier
            expected = int(counts[here].max())
            if expected % WARP or (counts[here] != expected).any():
                raise Fault(f"barrier {barrier} waits for {expected} threads: expected the same multiple of {WARP} in all threads")
            waiting.append(Waiting(context.threads[here], int(barrier), expected, stays, context))
        if not stays:
            wave.resume(context.piece + 1, context.threads, context.join, context.age)
        _complete(wave, whole=True)

    return arrive


def _release(wave: Any) -> bool:
    return _complete(wave, whole=False)


def _check_end(wave: Any) -> None:
    for waiting in wave.state["a barrier"]:
        raise Fault(f"a block ends although barrier {waiting.barrier} misses threads")


def _complete(wave: Any, *, whole: bool) -> bool:
    """Release the threads at complete barriers. With `whole`, release threads only if the barrier is complete in every block that has
    threads waiting there."""
    waiting: list[Waiting] = wave.state.get("a barrier", [])
    released = False
    for barrier in sorted({w.barrier for w in waiting}):
        group = [w for w in waiting if w.barrier == barrier]
        expected = max(w.expected for w in group)
        if any(w.expected != expected for w in group):
            raise Fault(f"threads at barrier {barrier} expect different numbers of threads")
        blocks = len(wave.blocks)
        here = sum(np.bincount(wave.slot[w.threads], minlength=blocks) for w in group)
        need = np.full(blocks, expected) if expected else np.bincount(wave.slot[wave.alive], minlength=blocks)
        if (here > need).any():
            raise Fault(f"barrier {barrier} gets {int(here.max())} threads, expected {int(need[here.argmax()])}")
        complete = (here == need) & (here > 0)
        if not complete.any() or (whole and not (complete == (here > 0)).all()):
            continue
        released = True
        if wave.cluster > 1:
            wave.known.share(wave.union([w.threads[complete[wave.slot[w.threads]]] for w in group]))
        for w in group:
            if w.stays:
                wave.shadow.synchronise(w.threads[complete[wave.slot[w.threads]]])
            waiting.remove(w)
            leaves = complete[wave.slot[w.threads]]
            if w.stays:
                wave.resume(w.context.piece + 1, w.threads[leaves], w.context.join, w.context.age)
            if not leaves.all():
                waiting.append(Waiting(w.threads[~leaves], barrier, expected, w.stays, w.context))
    return released
