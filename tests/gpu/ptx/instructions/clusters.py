"""Instructions of clusters: blocks that reach the shared memory of each other, and wait for each other.

An address that `mapa` makes holds the rank of a block in its upper bits. It is a fault to use an mbarrier that another block may not have
made yet, or to reach a block that has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.instructions.warps import check_whole
from tests.gpu.ptx.program import SHARED_WINDOW, Array, Arrive, Assembler, Index, Instruction, Step, rule
from tests.gpu.ptx.wave import Context

RANK_BIT = 24  # an address in a certain block holds the rank of the block, plus 1, in the bits from this one on
BARRIER = "the barrier of a cluster"


def located(wave: Any, threads: Array, addresses: Array) -> tuple[Array, Array]:
    """Return the blocks, as numbers in the wave, and the addresses in their shared memory that these threads name."""
    addresses = np.where(addresses >= SHARED_WINDOW, addresses - SHARED_WINDOW, addresses)
    rank, own = (addresses >> RANK_BIT) - 1, wave.slot[threads]
    if (rank >= wave.cluster).any():
        raise Fault(f"rank {int(rank.max())} is not in the cluster, which has {wave.cluster} blocks")
    return np.where(rank < 0, own, own // wave.cluster * wave.cluster + rank), addresses & (1 << RANK_BIT) - 1


def check_reach(wave: Any, threads: Array, slots: Array, made: Array) -> None:
    """Raise a fault if a thread reaches an mbarrier of another block that has ended, or that may not have made the mbarrier yet."""
    for thread, slot, time in zip(threads, slots, made, strict=True):
        if slot != wave.slot[thread]:
            check_alive(wave, slot)
            if wave.known.times[thread, wave.rank[slot]] <= time:
                block = int(wave.blocks[slot])
                lacks = "no fence.mbarrier_init followed by a barrier of the cluster with .release"
                raise Fault(f"uses an mbarrier that block {block} may not have made yet: {lacks}")


def check_alive(wave: Any, slot: int) -> None:
    if not wave.alive[wave.slot == slot].any():
        raise Fault(f"reaches the shared memory of block {int(wave.blocks[slot])}, which has ended")


@rule("mapa")
def _mapa(code: Assembler, instruction: Instruction) -> Step:
    to, address, rank = instruction.operands
    if not instruction.modifiers[0].startswith("shared") or instruction.type != "u32":
        raise UnknownPtx("only mapa.shared::cluster.u32 is supported")
    write, read, read_rank = code.write(to, np.uint32), code.read(address, np.uint32), code.read(rank, np.uint32)

    def step(wave: Any, index: Index) -> None:
        ranks = read_rank(wave, index)
        if (ranks >= wave.cluster).any():
            raise Fault(f"rank {int(ranks.max())} is not in the cluster, which has {wave.cluster} blocks")
        write(wave, index, read(wave, index) + (ranks + np.uint32(1) << np.uint32(RANK_BIT)))

    return step


# --- the barrier of a cluster --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Waiting:
    threads: Array
    context: Context


@dataclass(slots=True, eq=False)
class Arrived:
    """For each thread: whether it has arrived, and whether all threads of its cluster have."""

    here: Array
    complete: Array
    times: Array  # for each thread: the time before which its arrival orders all that it did; 0 if it arrived with .relaxed
    learnt: Array  # for each thread at a complete barrier: up to which time it knows each block of its cluster: [threads, ranks]


def barrier(instruction: Instruction) -> Arrive:
    action, aligned = instruction.modifiers[1], "aligned" in instruction.modifiers
    if action not in ("arrive", "wait"):
        raise UnknownPtx(f"barrier.cluster.{action} is not supported")
    releases = "relaxed" not in instruction.modifiers  # .release is the default; a wait always acquires

    def run(wave: Any, context: Context) -> None:
        if aligned:
            check_whole(wave, context.index)
        if BARRIER not in wave.state:
            wave.state["arrivals in a cluster"] = Arrived(
                *(np.zeros(len(wave.threads), bool) for _ in range(2)),
                np.zeros(len(wave.threads), np.int32),
                np.zeros((len(wave.threads), wave.cluster), np.int32),
            )
            wave.state[BARRIER] = []
            wave.stalls.append(lambda wave: _complete(wave, whole=False))
        arrived: Arrived = wave.state["arrivals in a cluster"]
        before = (arrived.here | arrived.complete)[context.threads]
        if action == "arrive":
            if before.any():
                raise Fault("arrives at the barrier of the cluster again, without waiting for it")
            arrived.here[context.threads] = True
            arrived.times[context.threads] = wave.shadow.next_time() if releases else 0
            wave.resume(context.piece + 1, context.threads, context.join, context.age)
        else:
            if not before.all():
                raise Fault("waits for the barrier of the cluster, at which it has not arrived")
            wave.state[BARRIER].append(Waiting(context.threads, context))
        _complete(wave, whole=True)

    return run


def _complete(wave: Any, *, whole: bool) -> bool:
    """Complete the barriers at which all threads of a cluster have arrived, and release the threads that wait for them. With `whole`,
    release the threads of a context only together."""
    arrived: Arrived = wave.state["arrivals in a cluster"]
    cluster = wave.slot // wave.cluster
    missing = np.bincount(cluster[wave.alive & ~arrived.here], minlength=cluster[-1] + 1)
    complete = arrived.here & (missing[cluster] == 0)
    if complete.any():
        times = np.zeros(len(wave.blocks), np.int32)  # 0 for a block of which a thread arrived with .relaxed
        np.maximum.at(times, wave.slot[complete], arrived.times[complete])
        times[wave.slot[complete & (arrived.times == 0)]] = 0
        arrived.learnt[complete] = times.reshape(-1, wave.cluster)[cluster[complete]]
    arrived.complete |= complete
    arrived.here &= ~complete
    released = False
    for w in list(wave.state[BARRIER]):
        leaves = arrived.complete[w.threads]
        if not leaves.any() or (whole and not leaves.all()):
            continue
        released, gone = True, w.threads[leaves]
        wave.state[BARRIER].remove(w)
        arrived.complete[gone] = False
        learnt = arrived.learnt[gone]
        wave.shadow.synchronise(gone, learnt[np.arange(len(gone)), wave.rank[wave.slot[gone]]])
        wave.known.learn(gone, learnt)
        wave.resume(w.context.piece + 1, gone, w.context.join, w.context.age)
        if not leaves.all():
            wave.state[BARRIER].append(Waiting(w.threads[~leaves], w.context))
    return released
