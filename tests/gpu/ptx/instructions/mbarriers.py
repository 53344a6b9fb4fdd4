"""Instructions for mbarriers: barriers in shared memory that count arriving threads and the bytes that copies deliver. A phase ends when
all expected threads have arrived and all expected bytes are delivered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.instructions import clusters
from tests.gpu.ptx.program import SHARED_BASE, SHARED_WINDOW, Array, Arrive, Assembler, Index, Instruction, Step, rule, waits
from tests.gpu.ptx.text import Sink
from tests.gpu.ptx.wave import Context

LARGEST_COUNT = (1 << 20) - 1
NEVER = np.iinfo(np.int32).max


@dataclass(slots=True, eq=False)
class Mbarrier:
    """The mbarriers at one address in all blocks of a wave. Arrays have one element per block. `count` is 0 in blocks where the mbarrier is
    not initialised."""

    count: Array
    missing: Array  # arrivals that are missing until the phase ends
    bytes: Array  # bytes that copies must still deliver until the phase ends
    phase: Array  # number of phases that have ended
    made: Array  # when the thread that initialised the mbarrier executed fence.mbarrier_init; NEVER if it has not
    maker: Array  # that thread
    number: Array  # how often an mbarrier was initialised at this address
    since: Array  # when it was initialised
    shown: Array  # 1 if a fence has made this visible to copies: fence.mbarrier_init, or a later fence.proxy.async
    known: Array  # what the threads that arrived know of the blocks of their cluster: [blocks, ranks]


@dataclass(slots=True, eq=False)
class Waiting:
    threads: Array
    addresses: Array
    parities: Array
    context: Context
    write: Any
    acquires: bool  # whether the wait acquires; otherwise it orders nothing
    in_cluster: bool  # whether it acquires what other blocks have released


def shared_offset(addresses: Array) -> Array:
    """Return offsets in shared memory. An address inside the window of shared memory is a generic address, which comes from an instruction
    without a state space."""
    return np.where(addresses >= SHARED_WINDOW, addresses - SHARED_WINDOW, addresses)


def groups(wave: Any, index: Index, addresses: Array) -> list[tuple[int, Array]]:
    """Return for each different mbarrier address among `addresses`: (address, positions of the threads that use it)."""
    addresses = np.broadcast_to(shared_offset(addresses), wave.threads[index].shape)
    wave.locate("shared", index, addresses, 8)
    return [(int(a), np.flatnonzero(addresses == a)) for a in np.unique(addresses)]


def barrier_at(wave: Any, address: int, slots: Array) -> Mbarrier:
    barrier = wave.state.setdefault("mbarriers", {}).get(address)
    if barrier is None or (barrier.count[slots] == 0).any():
        raise Fault(f"no mbarrier was initialised at shared offset {address - SHARED_BASE}")
    return barrier


def check_made(wave: Any, address: int, threads: Array) -> None:
    """Raise a fault if threads use an mbarrier of their block, and no barrier orders this after its initialisation by another thread."""
    slots, shadow = wave.slot[threads], wave.shadow
    barrier = barrier_at(wave, address, slots)
    maker = barrier.maker[slots]
    epoch = np.where(wave.warp[maker] == wave.warp[threads], np.maximum(shadow.epoch, shadow.warp_epoch)[threads], shadow.epoch[threads])
    if ((maker != threads) & (epoch <= barrier.since[slots])).any():
        raise Fault(f"uses the mbarrier at shared offset {address - SHARED_BASE}, which another thread may not have made yet: no barrier")


def arrive(wave: Any, address: int, slots: Array, arrivals: Array, expected: Array) -> None:
    """Count arrivals of threads. An arrival may also announce bytes that copies will deliver. `slots` are the blocks of the threads; a
    block may occur several times."""
    barrier = barrier_at(wave, address, slots)
    blocks = len(wave.blocks)
    barrier.bytes += np.bincount(slots, expected, blocks).astype(np.int64)
    barrier.missing -= np.bincount(slots, arrivals, blocks).astype(np.int64)
    if (barrier.missing < 0).any():
        raise Fault(f"the mbarrier at shared offset {address - SHARED_BASE} gets more arrivals in a phase than it was initialised for")
    end_phases(wave, barrier)


def bring(wave: Any, address: int, slots: Array, num_bytes: Array) -> None:
    """Subtract bytes that copies have delivered from those that the mbarrier waits for."""
    barrier = barrier_at(wave, address, slots)
    barrier.bytes -= np.bincount(slots, num_bytes, len(wave.blocks)).astype(np.int64)
    end_phases(wave, barrier)


def check_landing(wave: Any, address: int, slot: Array, number: Array) -> None:
    """Raise a fault if a copy or an arrival lands in a block that has ended, or at an mbarrier that was initialised after the copy or
    arrival was sent. The arrays have one element: the block, and the number of the mbarrier to which the copy or arrival was sent."""
    clusters.check_alive(wave, int(slot[0]))
    barrier = barrier_at(wave, address, slot)
    if barrier.number[slot[0]] != number[0]:
        raise Fault(f"lands at another mbarrier that was made at shared offset {address - SHARED_BASE} in the meantime")


def check_end(wave: Any) -> None:
    """Raise a fault if blocks end while an mbarrier waits for the rest of a phase."""
    for address, barrier in wave.state["mbarriers"].items():
        check_awaited(barrier, address, np.arange(len(wave.blocks)))


def check_awaited(barrier: Mbarrier, address: int, slots: Array) -> None:
    """Raise a fault if the current phase of an mbarrier that is not used any more has begun: nobody waits for its arrivals."""
    begun = (barrier.count > 0) & ((barrier.missing != barrier.count) | (barrier.bytes != 0))
    if begun[slots].any():
        raise Fault(f"nobody waits for the last arrivals at the mbarrier at shared offset {address - SHARED_BASE}")


def end_phases(wave: Any, barrier: Mbarrier) -> None:
    ended = (barrier.count > 0) & (barrier.missing == 0) & (barrier.bytes == 0)
    if ended.any():
        barrier.phase += ended
        barrier.missing = np.where(ended, barrier.count, barrier.missing)
        release(wave, whole=True)


def release(wave: Any, *, whole: bool) -> bool:
    """Release the waiting threads whose phase has ended. With `whole`, release the threads of a `Context` only when the phases of all of
    them have ended, so that all blocks of the context stay at the same instruction."""
    waiting: list[Waiting] = wave.state.get("an mbarrier", [])
    released = False
    for w in list(waiting):
        ready = _ended(wave, w)
        if not ready.any() or (whole and not ready.all()):
            continue
        released = True
        waiting.remove(w)
        threads = w.threads[ready]
        w.write(wave, threads, np.ones(1, bool))
        _pass(wave, w, ready)
        wave.resume(w.context.piece + 1, threads, w.context.join, w.context.age + 1)
        if not ready.all():
            waiting.append(
                Waiting(w.threads[~ready], w.addresses[~ready], w.parities[~ready], w.context, w.write, w.acquires, w.in_cluster)
            )
    return released


def _ended(wave: Any, w: Waiting) -> Array:
    result = np.zeros(len(w.threads), bool)
    for address in np.unique(w.addresses):
        here = w.addresses == address
        slots = wave.slot[w.threads[here]]
        result[here] = (barrier_at(wave, int(address), slots).phase[slots] & 1) != w.parities[here]
    return result


def _pass(wave: Any, w: Waiting, ready: Array) -> None:
    """Let threads pass mbarriers whose phases have ended."""
    threads, addresses = w.threads[ready], w.addresses[ready]
    if w.acquires:
        wave.shadow.synchronise(threads)
    if wave.cluster > 1 and w.in_cluster:
        for address in np.unique(addresses):
            here = threads[addresses == address]
            wave.known.learn(here, barrier_at(wave, int(address), wave.slot[here]).known[wave.slot[here]])


def _release_some(wave: Any) -> bool:
    return release(wave, whole=False)


@waits("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(code: Assembler, instruction: Instruction) -> Arrive:
    """Wait until a phase ends. If it has not ended, the first `try_wait` of a thread returns false at once, and the second one waits until
    the phase ends. `test_wait` never waits."""
    if "parity" not in instruction.modifiers:
        raise UnknownPtx("waiting for a state is not supported; use .parity")
    to, address, parity = instruction.operands[:3]
    write, read_address, read_parity = code.write(to, np.bool_), code.address(address), code.read(parity, np.uint32)
    tests = instruction.modifiers[0] == "test_wait"
    acquires = "relaxed" not in instruction.modifiers  # .acquire is the default, with .cta
    in_cluster = acquires and "cluster" in instruction.modifiers

    def wait(wave: Any, context: Context) -> None:
        index = context.index
        addresses = np.broadcast_to(shared_offset(read_address(wave, index)), context.threads.shape)
        wave.locate("shared", index, addresses, 8)
        for address in np.unique(addresses):
            check_made(wave, int(address), context.threads[addresses == address])
        parities = np.broadcast_to(read_parity(wave, index) & np.uint32(1), context.threads.shape)
        waiting = Waiting(context.threads, addresses, parities, context, write, acquires, in_cluster)
        ready = _ended(wave, waiting)
        tried = wave.state.setdefault("tried", np.full(len(wave.threads), -1))
        again = bool((tried[context.threads] == context.piece).all())
        tried[context.threads] = -1 if ready.all() else context.piece
        if tests or ready.all() or not again:
            # return false to all threads even if some are ready, so that blocks stay at the same instruction
            ready = ready if tests or ready.all() else np.zeros(1, bool)
            write(wave, index, ready)
            ready = np.broadcast_to(ready, context.threads.shape)
            if ready.any():
                _pass(wave, waiting, ready)
            wave.resume(context.piece + 1, context.threads, context.join, context.age + 1)
            return
        if _release_some not in wave.last_stalls:
            wave.last_stalls.append(_release_some)
        wave.state.setdefault("an mbarrier", []).append(waiting)

    return wait


@rule("mbarrier")
def _mbarrier(code: Assembler, instruction: Instruction) -> Step:
    action = instruction.modifiers[0]
    match action:
        case "init":
            return _init(code, instruction)
        case "inval":
            read = code.address(instruction.operands[0])

            def invalidate(wave: Any, index: Index) -> None:
                for address, positions in groups(wave, index, read(wave, index)):
                    check_made(wave, address, wave.threads[index][positions])
                    slots = wave.slot[index][positions]
                    barrier = barrier_at(wave, address, slots)
                    check_awaited(barrier, address, slots)
                    barrier.count[slots] = 0

            return invalidate
        case "arrive":
            return _arrive(code, instruction)
        case "expect_tx":
            read, read_bytes = code.address(instruction.operands[0]), code.read(instruction.operands[1], np.uint32)

            def expect(wave: Any, index: Index) -> None:
                amounts = np.broadcast_to(read_bytes(wave, index), wave.threads[index].shape)
                for address, positions in groups(wave, index, read(wave, index)):
                    check_made(wave, address, wave.threads[index][positions])
                    arrive(wave, address, wave.slot[index][positions], np.zeros(len(positions)), amounts[positions])

            return expect
        case _:
            raise UnknownPtx(f"mbarrier.{action} is not supported")


def _init(code: Assembler, instruction: Instruction) -> Step:
    read, read_count = code.address(instruction.operands[0]), code.read(instruction.operands[1], np.uint32)

    def init(wave: Any, index: Index) -> None:
        counts = np.broadcast_to(read_count(wave, index), wave.threads[index].shape).astype(np.int64)
        if (counts < 1).any() or (counts > LARGEST_COUNT).any():
            raise Fault(f"an mbarrier counts from 1 to {LARGEST_COUNT} arrivals, not {counts.min()}")
        barriers = wave.state.setdefault("mbarriers", {})
        if check_end not in wave.ends:
            wave.ends.append(check_end)
        for address, positions in groups(wave, index, read(wave, index)):
            slots = wave.slot[index][positions]
            if address not in barriers:
                zeros = [np.zeros(len(wave.blocks), np.int64) for _ in range(9)]
                barriers[address] = Mbarrier(*zeros, np.zeros((len(wave.blocks), wave.cluster), np.int32))
            barrier = barriers[address]
            barrier.count[slots] = barrier.missing[slots] = counts[positions]
            barrier.bytes[slots] = barrier.phase[slots] = 0
            barrier.made[slots], barrier.maker[slots] = NEVER, wave.threads[index][positions]
            barrier.number[slots] += 1
            barrier.since[slots], barrier.shown[slots] = wave.shadow.time, 0
            barrier.known[slots] = 0

    return init


def fence(wave: Any, index: Index) -> None:
    """Apply a fence.mbarrier_init: other blocks may see the mbarriers that these threads have initialised."""
    for barrier in wave.state.get("mbarriers", {}).values():
        mine = np.isin(barrier.maker, wave.threads[index]) & (barrier.made == NEVER) & (barrier.count > 0)
        barrier.made[mine], barrier.shown[mine] = wave.shadow.time, 1


def fence_of_proxy(wave: Any, threads: Array) -> None:
    """Apply a fence.proxy.async: copies see the mbarriers that these threads have initialised, or that a barrier ordered before the
    fence."""
    latest = np.zeros(len(wave.blocks), np.int32)
    np.maximum.at(latest, wave.slot[threads], wave.shadow.epoch[threads])
    for barrier in wave.state.get("mbarriers", {}).values():
        barrier.shown[(np.isin(barrier.maker, threads) | (barrier.since < latest)) & (barrier.count > 0)] = 1


def _arrive(code: Assembler, instruction: Instruction) -> Step:
    """Arrive at an mbarrier: `mbarrier.arrive{.expect_tx} _, [address]{, number of arrivals or bytes}`."""
    announces = "expect_tx" in instruction.modifiers
    if {"noComplete", "drop"} & set(instruction.modifiers):
        raise UnknownPtx("only plain arrivals at an mbarrier are supported")
    if any(m.startswith("shared::cluster") for m in instruction.modifiers):
        return _arrive_in_cluster(code, instruction)
    if "relaxed" in instruction.modifiers:
        raise UnknownPtx("a relaxed arrival at an mbarrier of the own block is not supported")
    operands = list(instruction.operands)
    state = operands.pop(0)
    if not isinstance(state, Sink):
        write_state = code.write(state, np.uint64)
    else:
        write_state = None
    read = code.address(operands[0])
    read_number = code.read(operands[1], np.uint32) if len(operands) > 1 else None

    def step(wave: Any, index: Index) -> None:
        shape = wave.threads[index].shape
        numbers = np.broadcast_to(read_number(wave, index), shape) if read_number is not None else np.ones(shape)
        if write_state is not None:
            write_state(wave, index, np.zeros(1, np.uint64))  # write 0 as the state, because waiting for a state is not supported
        for address, positions in groups(wave, index, read(wave, index)):
            ones = np.ones(len(positions))
            given, slots = numbers[positions], wave.slot[index][positions]
            check_made(wave, address, wave.threads[index][positions])
            _tell(wave, address, slots, wave.threads[index][positions])
            arrive(wave, address, slots, ones if announces else given, given if announces else 0 * ones)

    return step


def _tell(wave: Any, address: int, slots: Array, threads: Array) -> None:
    """Note at the mbarriers of some blocks what the arriving threads know."""
    if wave.cluster > 1:
        np.maximum.at(barrier_at(wave, address, slots).known, slots, wave.known.of_arrivals(threads))


def _arrive_in_cluster(code: Assembler, instruction: Instruction) -> Step:
    """Arrive once at an mbarrier of a block of the cluster: `mbarrier.arrive.shared::cluster.b64 _, [address]`. At another block, the
    arrival lands later."""
    state, *operands = instruction.operands
    if not isinstance(state, Sink) or len(operands) > 1:
        raise UnknownPtx("an arrival in another block has no state, and counts once")
    read = code.address(operands[0])
    tells = "relaxed" not in instruction.modifiers and "cluster" in instruction.modifiers  # .release is the default, with .cta

    def step(wave: Any, index: Index) -> None:
        threads = wave.threads[index]
        slots, addresses = clusters.located(wave, threads, np.broadcast_to(read(wave, index), threads.shape))
        wave.locate("shared", threads, addresses, 8)
        for number, (slot, address) in enumerate(zip(slots, addresses, strict=True)):  # few threads arrive in another block
            thread, to = threads[number : number + 1], np.array([slot])
            barrier = barrier_at(wave, int(address), to)
            clusters.check_reach(wave, thread, to, barrier.made[to])
            told = wave.known.of_arrivals(thread) if tells else None
            if slot == wave.slot[thread[0]]:
                _land(wave, int(address), to, told)
            else:
                wave.later(partial(_land_in_other_block, wave, int(address), to, barrier.number[to], told))

    return step


def _land_in_other_block(wave: Any, address: int, slot: Array, number: Array, told: Array | None) -> None:
    check_landing(wave, address, slot, number)
    _land(wave, address, slot, told)


def _land(wave: Any, address: int, slot: Array, told: Array | None) -> None:
    """Count an arrival, and note at the mbarrier what the thread told."""
    if told is not None:
        np.maximum.at(barrier_at(wave, address, slot).known, slot, told)
    arrive(wave, address, slot, np.ones(1), np.zeros(1))
