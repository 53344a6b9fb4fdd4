"""Instructions that load, store, or change memory atomically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import UnknownPtx
from tests.gpu.ptx.instructions import mbarriers
from tests.gpu.ptx.instructions.arithmetic import maximum, minimum
from tests.gpu.ptx.program import DTYPES, LOCAL_WINDOW, PACKED, SHARED_WINDOW, Array, Assembler, Index, Instruction, Step, bits_of, rule
from tests.gpu.ptx.text import Address, Symbol, Vector

SPACES = ("global", "shared", "local", "param", "const")


def space_of(instruction: Instruction) -> str:
    """Return the state space that an instruction names, or `generic`."""
    names = {m.partition("::")[0] for m in instruction.modifiers}
    return next((space for space in SPACES if space in names), "generic")


Access = Callable[[Any, Index, dict[int, Array], Array, str], None]


def reaching(space: str, address: Any, size: int, access: Access) -> Step:
    """Return a step that evaluates `address` and calls `access` with the memory there. Each thread accesses `size` bytes. Threads with
    generic addresses may access several state spaces: `access` is then called once for each."""
    if space != "generic":

        def step(wave: Any, index: Index) -> None:
            words, offsets = wave.locate(space, index, address(wave, index), size)
            if len(offsets) == 1 and space != "param":
                offsets = offsets.repeat(len(wave.threads[index]))
            access(wave, index, words, offsets, space)

        return step

    def generic(wave: Any, index: Index) -> None:
        addresses = np.broadcast_to(address(wave, index), wave.threads[index].shape)
        spaces = wave.space_of(addresses)
        for number, (name, window) in enumerate((("global", 0), ("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW))):
            here = spaces == number
            if here.all():
                access(wave, index, *wave.locate(name, index, addresses - window, size), name)
            elif here.any():
                threads = wave.threads[index][here]
                access(wave, threads, *wave.locate(name, threads, addresses[here] - window, size), name)

    return generic


def orders(instruction: Instruction) -> bool:
    """Return whether an access orders other accesses, because threads can use it to signal to each other."""
    return bool({"volatile", "acquire", "release", "relaxed", "mmio"} & set(instruction.modifiers))


def signals(instruction: Instruction) -> bool:
    """Return whether threads of other blocks can receive a signal by an access that orders others."""
    return "cta" not in instruction.modifiers


def note_grain(code: Assembler, space: str, num_bytes: int) -> None:
    if space in ("shared", "generic"):
        code.shared_grain = min(code.shared_grain, num_bytes)
    if space in ("global", "generic"):
        code.global_grain = min(code.global_grain, num_bytes)


@rule("ld", "ldu")
def _ld(code: Assembler, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.type]
    bits = bits_of(dtype)
    writers = [code.write(part, dtype) for part in code.parts(instruction.operands[0])]
    place = instruction.operands[1]
    if space_of(instruction) == "param" and isinstance(place, Address) and isinstance(place.base, Symbol):
        at = code.parameters[place.base.name] + place.offset
        if at % (bits // 8):
            raise UnknownPtx("misaligned parameters are not supported")

        def parameter(wave: Any, index: Index) -> None:
            for number, write in enumerate(writers):
                start = at + number * (bits // 8)
                write(wave, index, wave.parameters[start : start + bits // 8].view(dtype))

        return parameter
    shift = bits.bit_length() - 4  # log2 of the element's size in bytes

    strong, signal, constant = orders(instruction), signals(instruction), "nc" in instruction.modifiers
    note_grain(code, space_of(instruction), bits // 8)

    def load(wave: Any, index: Index, words: dict[int, Array], offsets: Array, space: str) -> None:
        if strong:
            wave.shadow.synchronise(index)
        elif space == "shared":
            wave.shadow.read(wave.threads[index], offsets, bits // 8 * len(writers))
        if space == "global":
            wave.reads(index, offsets, bits // 8 * len(writers), constant=constant, strong=strong, signals=signal)
        data, at = words[bits], offsets >> shift
        for number, write in enumerate(writers):
            write(wave, index, data[at + number].view(dtype))

    return reaching(space_of(instruction), code.address(instruction.operands[1]), bits // 8 * len(writers), load)


@rule("st")
def _st(code: Assembler, instruction: Instruction) -> Step:
    dtype = np.dtype(f"u{bits_of(DTYPES[instruction.type]) // 8}").type
    bits = bits_of(dtype)
    readers = [code.read(part, dtype) for part in code.parts(instruction.operands[1])]
    shift = bits.bit_length() - 4
    space = space_of(instruction)
    if space in ("param", "const"):
        raise UnknownPtx("stores to parameters and constants are not supported")

    strong, signal = orders(instruction), signals(instruction)
    note_grain(code, space, bits // 8)

    def store(wave: Any, index: Index, words: dict[int, Array], offsets: Array, space: str) -> None:
        if space == "shared" and not strong:
            wave.shadow.write(wave.threads[index], offsets, bits // 8 * len(readers))
        if space == "global":
            wave.writes(index, offsets, bits // 8 * len(readers), strong=strong, signals=signal)
        data, at = words[bits], offsets >> shift
        for number, read in enumerate(readers):
            data[at + number] = read(wave, index)

    return reaching(space, code.address(instruction.operands[0]), bits // 8 * len(readers), store)


@rule("prefetch", "prefetchu", "discard", "applypriority", "createpolicy")
def _hint(code: Assembler, instruction: Instruction) -> Step:
    return lambda wave, index: None


# --- atomics -------------------------------------------------------------------------------------------------------------

# name of an atomic -> function that computes the new value from the old value and the operands
UPDATES: dict[str, Callable[..., Array]] = {
    "add": lambda old, value: old + value,
    "min": minimum,
    "max": maximum,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "cas": lambda old, compare, value: np.where(old == compare, value, old),
    "inc": lambda old, value: np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, value: np.where((old == 0) | (old > value), value, old - old.dtype.type(1)),
}


@rule("atom", "red")
def _atomic(code: Assembler, instruction: Instruction) -> Step:
    """Apply an atomic operation. Threads that use the same address execute one after another, in the order of their numbers or in random
    order."""
    if instruction.opcode == "red" and "async" in instruction.modifiers:
        raise UnknownPtx("red.async is not supported")
    name = next(m for m in instruction.modifiers if m in UPDATES)
    update = UPDATES[name]
    type_ = instruction.type
    packed = PACKED.get(type_)
    dtype = DTYPES[type_]
    bits = bits_of(dtype)
    shift = bits.bit_length() - 4
    operands = list(instruction.operands)
    target = operands.pop(0) if instruction.opcode == "atom" else None
    if any(isinstance(operand, Vector) for operand in operands):
        raise UnknownPtx("atomics of vectors are not supported")
    write = code.write(target, dtype) if target is not None else None
    readers, signal = [code.read(operand, dtype) for operand in operands[1:]], signals(instruction)

    def combine(old: Array, *values: Array) -> Array:
        if packed is None:
            return update(old, *values)
        return update(*(np.ascontiguousarray(v).view(packed).reshape(-1, 2) for v in (old, *values))).astype(packed).view(dtype)[:, 0]

    def access(wave: Any, index: Index, words: dict[int, Array], offsets: Array, space: str) -> None:
        wave.shadow.synchronise(index)
        if space == "global":
            wave.order.write(index, offsets, bits // 8)
        data = words[bits]
        at = offsets >> shift
        values = [np.broadcast_to(read(wave, index), at.shape) for read in readers]
        before = np.empty(at.shape, dtype)
        left = np.arange(len(at)) if wave.random is None else wave.random.permutation(len(at))
        while left.size:
            places, first = np.unique(at[left], return_index=True)
            turn = left[first]
            if space == "global" and signal:
                wave.races.signal(wave.threads[index][turn], offsets[turn], reads=True, writes=True)
            old = data[places].view(dtype)
            before[turn] = old
            data[places] = np.ascontiguousarray(combine(old, *(v[turn] for v in values)).astype(dtype)).view(data.dtype)
            left = np.delete(left, first)
        if write is not None:
            write(wave, index, before)

    return reaching(space_of(instruction), code.address(operands[0]), bits // 8, access)


def _fence_of_proxy(wave: Any, index: Index) -> None:
    wave.shadow.fence(wave.threads[index])
    mbarriers.fence_of_proxy(wave, wave.threads[index])


@rule("membar", "fence")
def _fence(code: Assembler, instruction: Instruction) -> Step:
    if "proxy" in instruction.modifiers and "async" in {m.partition("::")[0] for m in instruction.modifiers}:
        return _fence_of_proxy
    if "mbarrier_init" in instruction.modifiers:
        return mbarriers.fence
    if {"gpu", "gl", "sys"} & set(instruction.modifiers):
        return lambda wave, index: wave.races.fence(index)
    return lambda wave, index: None
