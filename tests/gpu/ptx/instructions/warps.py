"""Instructions by which the threads of a warp exchange values. It is a fault if a lane that the instruction's mask names does not run the
instruction together with the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.program import DTYPES, Array, Assembler, Index, Instruction, Step, rule
from tests.gpu.ptx.text import Vector

FULL = np.uint32(0xFFFFFFFF)


def lanes_here(wave: Any, index: Index) -> Array:
    """Return for each warp of the wave the mask of lanes that run the instruction."""
    count = wave.warps_per_block * len(wave.blocks)
    weights = np.exp2(wave.lane[index].astype(np.float64))
    return np.bincount(wave.warp[index], weights, minlength=count).astype(np.uint64).astype(np.uint32)


def existing_lanes(wave: Any) -> Array:
    if "lanes" not in wave.state:
        wave.state["lanes"] = lanes_here(wave, slice(None))
    return wave.state["lanes"]


def check_members(wave: Any, index: Index, masks: Array) -> None:
    """Raise a fault unless each thread's mask names exactly the lanes that run the instruction."""
    if isinstance(index, slice) and index.start is None and (masks == FULL).all():
        return
    warps = wave.warp[index]
    here = lanes_here(wave, index)[warps]
    named = np.broadcast_to(masks, warps.shape) & existing_lanes(wave)[warps]
    wrong = named != here
    if wrong.any():
        thread = wave.threads[index][np.flatnonzero(wrong)[0]]
        number = np.flatnonzero(wrong)[0]
        raise Fault(f"a split warp: the mask names lanes {named[number]:#010x}, but {here[number]:#010x} are here ({wave.name(thread)})")


def check_whole(wave: Any, index: Index) -> None:
    check_members(wave, index, np.array([FULL]))


@rule("nanosleep", "pmevent")
def _timing(code: Assembler, instruction: Instruction) -> Step:
    """Do nothing. These instructions pause threads, or count events."""
    return lambda wave, index: None


@rule("griddepcontrol")
def _dependence(code: Assembler, instruction: Instruction) -> Step:
    if int("".join(filter(str.isdigit, code.module.target))) < 90:
        raise UnknownPtx(f"griddepcontrol needs sm_90 or later, and the code is for {code.module.target}")
    match instruction.modifiers:
        case ("launch_dependents",):  # launches run one after another; tests/gpu/ptx/order.py says what goes wrong if they overlap
            return lambda wave, index: None
        case ("wait",):
            return lambda wave, index: wave.order.wait(index)
        case _:
            raise UnknownPtx("expected wait or launch_dependents")


@rule("trap", "brkpt")
def _trap(code: Assembler, instruction: Instruction) -> Step:
    def trap(wave: Any, index: Index) -> None:
        raise Fault(f"the kernel executed a trap ({wave.name(int(wave.threads[index][0]))})")

    return trap


@rule("shfl")
def _shfl(code: Assembler, instruction: Instruction) -> Step:
    if instruction.modifiers[0] != "sync":
        raise UnknownPtx("shfl without .sync is not part of the architecture any more")
    mode = instruction.modifiers[1]
    to, source, lanes, clamp, mask = instruction.operands
    parts = to.parts if isinstance(to, Vector) else (to,)
    write = code.write(parts[0], np.uint32)
    write_valid = code.write(parts[1], np.bool_) if len(parts) > 1 else None
    read, read_lane, read_clamp, read_mask = (code.read(o, np.uint32) for o in (source, lanes, clamp, mask))

    def step(wave: Any, index: Index) -> None:
        check_members(wave, index, read_mask(wave, index))
        lane = wave.lane[index]
        amount = (read_lane(wave, index) & np.uint32(31)).astype(np.int64)
        bounds = read_clamp(wave, index).astype(np.int64)
        limit, segment = bounds & 31, bounds >> 8 & 31
        highest = lane & segment | limit & ~segment
        match mode:
            case "up":
                other = lane - amount
                valid = other >= highest
            case "down":
                other = lane + amount
                valid = other <= highest
            case "bfly":
                other = lane ^ amount
                valid = other <= highest
            case _:
                other = lane & segment | amount & ~segment
                valid = other <= highest
        other = np.where(valid, other, lane)
        values = np.zeros(wave.threads.shape, np.uint32)
        present = np.zeros(wave.threads.shape, bool)
        values[index] = read(wave, index)
        present[index] = True
        sender = np.minimum(wave.threads[index] - lane + other, len(wave.threads) - 1)
        # Reading a lane that does not run the instruction gives no defined value.
        there = present[sender] & (wave.warp[sender] == wave.warp[index])
        write(wave, index, np.where(there, values[sender], np.uint32(0xA5A5A5A5)))
        if write_valid is not None:
            write_valid(wave, index, valid)

    return step


@rule("vote", "match", "redux", "elect", "activemask")
def _collective(code: Assembler, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    match instruction.opcode:
        case "activemask":
            write = code.write(instruction.operands[0], np.uint32)
            return lambda wave, index: write(wave, index, lanes_here(wave, index)[wave.warp[index]])
        case "vote":
            return _vote(code, instruction)
        case "redux":
            return _redux(code, instruction)
        case "elect":
            return _elect(code, instruction)
        case _:
            raise UnknownPtx(f"{instruction.opcode}.{'.'.join(modifiers)} is not supported")


def _vote(code: Assembler, instruction: Instruction) -> Step:
    kind = instruction.modifiers[1]
    to, predicate, mask = instruction.operands
    read, read_mask = code.read(predicate, np.bool_), code.read(mask, np.uint32)
    write = code.write(to, np.uint32 if kind == "ballot" else np.bool_)

    def step(wave: Any, index: Index) -> None:
        check_members(wave, index, read_mask(wave, index))
        threads = wave.threads[index]
        holds = np.broadcast_to(read(wave, index), threads.shape)
        warps = wave.warp[threads]
        yes, here = lanes_here(wave, threads[holds])[warps], lanes_here(wave, threads)[warps]
        match kind:
            case "ballot":
                write(wave, index, yes)
            case "all":
                write(wave, index, yes == here)
            case "any":
                write(wave, index, yes != 0)
            case _:
                write(wave, index, (yes == 0) | (yes == here))

    return step


def _redux(code: Assembler, instruction: Instruction) -> Step:
    operation, dtype = instruction.modifiers[1], DTYPES[instruction.type]
    to, source, mask = instruction.operands
    read, read_mask, write = code.read(source, dtype), code.read(mask, np.uint32), code.write(to, dtype)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[
        operation
    ]

    def step(wave: Any, index: Index) -> None:
        check_members(wave, index, read_mask(wave, index))
        warps = wave.warp[index]  # ascending, because `index` lists threads in ascending order
        starts = np.flatnonzero(np.diff(warps, prepend=-1))
        values = np.broadcast_to(read(wave, index), warps.shape)
        folded = function.reduceat(values, starts, dtype=dtype)
        write(wave, index, np.repeat(folded, np.diff(starts, append=len(warps))))

    return step


def _elect(code: Assembler, instruction: Instruction) -> Step:
    to, mask = instruction.operands
    parts = to.parts if isinstance(to, Vector) else (to,)
    write_lane, write = code.write(parts[0], np.uint32), code.write(parts[1], np.bool_)
    read_mask = code.read(mask, np.uint32)

    def step(wave: Any, index: Index) -> None:
        check_members(wave, index, read_mask(wave, index))
        warps = wave.warp[index]
        first = np.diff(warps, prepend=-1) != 0
        write(wave, index, first)
        starts = np.flatnonzero(first)
        write_lane(wave, index, np.repeat(wave.lane[index][starts], np.diff(starts, append=len(warps))).astype(np.uint32))

    return step
