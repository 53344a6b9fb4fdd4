"""Instructions for asynchronous copies. The copies run as late as the rules allow, or at random times, so that tests notice a kernel that
does not wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.instructions import clusters, mbarriers
from tests.gpu.ptx.program import Array, Assembler, Index, Instruction, Step, rule
from tests.gpu.ptx.text import Immediate


@dataclass(slots=True, eq=False)
class Copy:
    """Copies that one instruction has started for several threads. Each thread copies `num_bytes` bytes from its source to its target."""

    threads: Array
    group: Array  # number of the group to which each thread's copy belongs
    sources: Array  # byte offsets
    targets: Array
    num_bytes: int
    kept: Array  # per thread: number of bytes that are copied; the rest of the target is filled with zeros
    pieces: Array | None = None  # if the source is shared memory: the pieces of its access history (shadow.py) that the copy reads


@dataclass(slots=True, eq=False)
class Groups:
    """The groups of asynchronous copies that threads have started. The groups of each thread are numbered separately."""

    open: Array  # per thread: number of the group that its next copies join
    copies: list[Copy] = field(default_factory=list)

    def commit(self, index: Index) -> None:
        self.open[index] += 1

    def wait(self, wave: Any, threads: Array, allowed: int | None) -> None:
        """Carry out the copies of `threads`, except those in the last `allowed` committed groups and in the open group. If `allowed` is
        None, carry out all copies."""
        mine = np.zeros(len(self.open), bool)
        mine[threads] = True
        left = []
        for copy in self.copies:
            due = mine[copy.threads]
            if allowed is not None:
                due = due & (copy.group < self.open[copy.threads] - allowed)
            if due.any():
                _do(wave, copy, due)
            if not due.all():
                left.append(_part(copy, ~due))
        self.copies = left


def _part(copy: Copy, chosen: Array) -> Copy:
    if chosen.all():
        return copy
    return Copy(
        copy.threads[chosen], copy.group[chosen], copy.sources[chosen], copy.targets[chosen], copy.num_bytes, copy.kept[chosen], copy.pieces
    )


def _do(wave: Any, copy: Copy, due: Array) -> None:
    copy = _part(copy, due)
    span = np.arange(copy.num_bytes)
    if copy.pieces is None and (copy.kept == copy.num_bytes).all():
        whole = f"V{copy.num_bytes}"
        wave.shared.view(whole)[copy.targets // copy.num_bytes] = wave.memory.bytes.view(whole)[copy.sources // copy.num_bytes]
        wave.shadow.arrive(copy.threads, copy.targets, copy.num_bytes, asynchronous=False)
    elif copy.pieces is None:
        data = wave.memory.bytes[np.where(span < copy.kept[:, None], copy.sources[:, None] + span, 0)]
        wave.shared[copy.targets[:, None] + span] = np.where(span < copy.kept[:, None], data, 0)
        wave.shadow.arrive(copy.threads, copy.targets, copy.num_bytes, asynchronous=False)
    else:
        wave.shadow.end_reading(copy.pieces)
        wave.memory.bytes[copy.targets[:, None] + span] = wave.shared[copy.sources[:, None] + span]


def groups_of(wave: Any, name: str) -> Groups:
    if name not in wave.state:
        wave.state[name] = Groups(np.zeros(len(wave.threads), np.int64))
    return wave.state[name]


ASYNC, BULK = "cp.async groups", "bulk groups"


@rule("cp")
def _cp(code: Assembler, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    if modifiers[0] != "async":
        raise UnknownPtx("not supported")
    if "tensor" in modifiers:
        raise UnknownPtx("tensor maps are not supported")
    bulk = modifiers[1] == "bulk"
    last = modifiers[2] if bulk and len(modifiers) > 2 else modifiers[1]
    match last:
        case "commit_group":
            return lambda wave, index: groups_of(wave, BULK if bulk else ASYNC).commit(index)
        case "wait_group" | "wait_all":
            allowed = None
            if last == "wait_group":
                assert isinstance(instruction.operands[0], Immediate)
                allowed = instruction.operands[0].value
            return lambda wave, index: groups_of(wave, BULK if bulk else ASYNC).wait(wave, wave.threads[index], allowed)
        case "mbarrier":
            return _arrive_after_copies(code, instruction)
        case _ if bulk:
            return _bulk(code, instruction)
        case _:
            return _async(code, instruction)


def _async(code: Assembler, instruction: Instruction) -> Step:
    """Copy asynchronously to shared memory: `cp.async.cg.shared.global [to], [from], size{, bytes to read}{, policy}`."""
    to, source, size = instruction.operands[:3]
    assert isinstance(size, Immediate)
    num_bytes = size.value
    if num_bytes not in (4, 8, 16) or ("cg" in instruction.modifiers and num_bytes != 16):
        raise UnknownPtx(f"a copy of {num_bytes} bytes is not supported")
    if "ignore-src" in instruction.text:
        raise UnknownPtx("ignore-src is not supported")
    hinted = any(m.startswith("L2::cache_hint") for m in instruction.modifiers)
    fewer = instruction.operands[3] if len(instruction.operands) > 3 + hinted else None
    read_to, read_from = code.address(to), code.address(source)
    read_kept = code.read(fewer, np.uint32) if fewer is not None else None

    def step(wave: Any, index: Index) -> None:
        threads = wave.threads[index]
        targets, sources = (np.broadcast_to(read(wave, index), threads.shape) for read in (read_to, read_from))
        kept = np.broadcast_to(read_kept(wave, index) if read_kept is not None else np.array([num_bytes]), threads.shape).astype(np.int64)
        if (kept > num_bytes).any():
            raise Fault(f"a copy of {num_bytes} bytes reads {kept.max()} bytes; expected at most {num_bytes}")
        _, at = wave.locate("shared", index, mbarriers.shared_offset(targets), num_bytes)
        reading = kept > 0
        offsets = np.zeros(len(threads), np.int64)
        offsets[reading] = wave.memory.offsets(sources[reading], num_bytes)
        wave.reads(threads[reading], offsets[reading], num_bytes)
        group = groups_of(wave, ASYNC)
        wave.shadow.announce(threads, at, num_bytes, asynchronous=False)
        group.copies.append(Copy(threads, group.open[index].copy(), offsets, at, num_bytes, kept))

    return step


def _arrive_after_copies(code: Assembler, instruction: Instruction) -> Step:
    """Arrive at an mbarrier when the thread's copies are done (`cp.async.mbarrier.arrive{.noinc}`). Without .noinc, the mbarrier also
    expects one additional arrival in this phase."""
    read = code.address(instruction.operands[0])
    counted = "noinc" in instruction.modifiers

    def step(wave: Any, index: Index) -> None:
        threads = wave.threads[index]
        found = mbarriers.groups(wave, index, read(wave, index))
        for address, positions in found:
            mbarriers.check_made(wave, address, threads[positions])
        if not counted:
            for address, positions in found:
                slots = wave.slot[threads[positions]]
                mbarriers.barrier_at(wave, address, slots).missing += np.bincount(slots, minlength=len(wave.blocks))

        def do() -> None:
            groups_of(wave, ASYNC).wait(wave, threads, None)
            for address, positions in found:
                mbarriers.arrive(wave, address, wave.slot[threads[positions]], np.ones(len(positions)), np.zeros(len(positions)))

        wave.later(do)

    return step


def _bulk(code: Assembler, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    if "prefetch" in modifiers:
        return lambda wave, index: None
    spaces = [m.partition("::")[0] for m in modifiers if m.partition("::")[0] in ("shared", "global")]
    to, source, size = instruction.operands[:3]
    read_to, read_from, read_size = code.address(to), code.address(source), code.read(size, np.uint32)
    if spaces == ["global", "shared"]:
        return _bulk_out(read_to, read_from, read_size)
    if spaces != ["shared", "global"]:
        raise UnknownPtx(f"a bulk copy between {spaces} is not supported")
    read_barrier = code.address(instruction.operands[3])
    read_mask = code.read(instruction.operands[4], np.uint16) if "multicast::cluster" in modifiers else None

    def step(wave: Any, index: Index) -> None:
        threads = wave.threads[index]
        targets, sources, sizes, barriers = (
            np.broadcast_to(read(wave, index), threads.shape).astype(np.int64) for read in (read_to, read_from, read_size, read_barrier)
        )
        targets, barriers = mbarriers.shared_offset(targets), mbarriers.shared_offset(barriers)
        for position, size in enumerate(sizes):  # usually one thread per block starts a bulk copy, so this loop is short
            _check_bulk(size, targets[position], sources[position])
            here = threads[position : position + 1]
            _, at = wave.locate("shared", here, targets[position : position + 1], 16)
            wave.locate("shared", here, targets[position : position + 1] + size - 16, 16)
            source = int(wave.memory.offset(int(sources[position])))
            wave.memory.span(int(sources[position]), int(size))
            wave.reads(here, np.array([source]), int(size))
            for slot in wave.slot[here] if read_mask is None else _blocks(wave, here, int(read_mask(wave, index)[0])):
                _copy_to(wave, here, np.array([slot]), at, source, int(size), int(barriers[position]))

    return step


def _blocks(wave: Any, thread: Array, mask: int) -> Array:
    """Return the blocks of a thread's cluster that a mask names."""
    if not 0 < mask < 1 << wave.cluster:
        raise Fault(f"the mask {mask:#x} does not name blocks of a cluster of {wave.cluster}")
    first = int(wave.slot[thread[0]]) // wave.cluster * wave.cluster
    return np.array([first + rank for rank in range(wave.cluster) if mask >> rank & 1])


def _copy_to(wave: Any, thread: Array, slot: Array, at: Array, source: int, size: int, barrier: int) -> None:
    """Begin a copy to the shared memory of the block `slot`, at the place that corresponds to `at` in that of the thread's own block."""
    awaited = mbarriers.barrier_at(wave, barrier, slot)
    number = awaited.number[slot]
    if slot[0] == wave.slot[thread[0]]:
        mbarriers.check_made(wave, barrier, thread)
        if not awaited.shown[slot[0]]:
            raise Fault("signals an mbarrier that was made without fence.mbarrier_init, or fence.proxy.async")
    if wave.cluster > 1:
        clusters.check_reach(wave, thread, slot, awaited.made[slot])
    at = at + (slot - wave.slot[thread]) * wave.shared_stride
    target = int(at[0])
    wave.shadow.announce(thread, at, size, asynchronous=True)

    def do() -> None:
        mbarriers.check_landing(wave, barrier, slot, number)
        wave.shared[target : target + size] = wave.memory.bytes[source : source + size]
        wave.shadow.arrive(thread, np.array([target]), size, asynchronous=True)
        mbarriers.bring(wave, barrier, slot, np.array([size]))

    wave.later(do)


def _bulk_out(read_to: Any, read_from: Any, read_size: Any) -> Step:
    def step(wave: Any, index: Index) -> None:
        threads = wave.threads[index]
        targets, sources, sizes = (
            np.broadcast_to(read(wave, index), threads.shape).astype(np.int64) for read in (read_to, read_from, read_size)
        )
        sources = mbarriers.shared_offset(sources)
        group = groups_of(wave, BULK)
        for position, size in enumerate(sizes):
            _check_bulk(size, sources[position], targets[position])
            here = threads[position : position + 1]
            _, at = wave.locate("shared", here, sources[position : position + 1], 16)
            wave.locate("shared", here, sources[position : position + 1] + size - 16, 16)
            wave.memory.span(int(targets[position]), int(size))
            pieces = wave.shadow.pieces_of_range(int(at[0]), int(size))
            wave.shadow.begin_reading(int(here[0]), pieces)
            target = np.array([wave.memory.offset(int(targets[position]))])
            wave.writes(here, target, int(size))
            group.copies.append(Copy(here, group.open[here].copy(), at, target, int(size), np.array([size]), pieces))

    return step


def _check_bulk(size: int, *addresses: int) -> None:
    if size % 16 or any(a % 16 for a in addresses):
        raise Fault(f"a bulk copy of {size} bytes between {' and '.join(map(hex, addresses))}: all must be multiples of 16")
    if size == 0:
        raise Fault("a bulk copy of 0 bytes; expected at least 16")
