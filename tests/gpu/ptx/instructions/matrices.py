"""Instructions in which a warp loads, stores or multiplies matrices: ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.instructions.rounding import ELEMENTS, product
from tests.gpu.ptx.instructions.warps import check_whole
from tests.gpu.ptx.program import Array, Assembler, Index, Instruction, Reader, Step, rule
from tests.gpu.ptx.wave import WARP

ROW = "V16"  # element type of a row of a matrix, which has 16 bytes
LANE = np.arange(WARP)
# the row of a fragment in which each lane has elements, and the lane's position in the row: four lanes share a row
GROUP, IN_GROUP = LANE // 4, LANE % 4


def whole_warps(wave: Any, index: Index) -> int:
    """Return the number of warps that run an instruction. Raise a fault if a warp lacks a lane."""
    check_whole(wave, index)
    count = len(wave.threads[index])
    if count % WARP:
        raise Fault("a warp of fewer than 32 threads cannot run this")
    return count // WARP


@rule("ldmatrix")
def _ldmatrix(code: Assembler, instruction: Instruction) -> Step:
    registers = code.parts(instruction.operands[0])
    writers = [code.write(register, np.uint32) for register in registers]
    read = code.address(instruction.operands[1])
    transposed, count = _shape(instruction), len(registers)

    def step(wave: Any, index: Index) -> None:
        rows = _rows(wave, index, read(wave, index), count)
        wave.shadow.read(_readers(wave, index, count), rows.reshape(-1), 16)
        found = wave.shared.view(ROW)[rows >> 4].view(np.uint16).reshape(*rows.shape, 8)  # [warps, matrices, 8, 8]
        if transposed:
            found = np.ascontiguousarray(found.swapaxes(2, 3))
        words = found.view(np.uint32).reshape(len(rows), count, WARP)
        for number, write in enumerate(writers):
            write(wave, index, words[:, number].reshape(-1))

    return step


@rule("stmatrix")
def _stmatrix(code: Assembler, instruction: Instruction) -> Step:
    registers = code.parts(instruction.operands[1])
    readers = [code.read(register, np.uint32) for register in registers]
    read = code.address(instruction.operands[0])
    transposed, count = _shape(instruction), len(registers)

    def step(wave: Any, index: Index) -> None:
        rows = _rows(wave, index, read(wave, index), count)
        values = rows_of(_all(readers, wave, index), len(rows), WARP).view(np.uint16).reshape(*rows.shape, 8)
        if transposed:
            values = np.ascontiguousarray(values.swapaxes(2, 3))
        wave.shadow.write(_readers(wave, index, count), rows.reshape(-1), 16)
        wave.shared.view(ROW)[rows >> 4] = values.view(ROW)[..., 0]

    return step


def _shape(instruction: Instruction) -> bool:
    if "m8n8" not in instruction.modifiers or instruction.type != "b16":
        raise UnknownPtx("only m8n8 matrices of b16 are supported")
    return "trans" in instruction.modifiers


def _rows(wave: Any, index: Index, addresses: Array, count: int) -> Array:
    """Return the offsets of the rows of each warp's matrices in shared memory. Lane 8 i + j gives the address of row j of matrix i."""
    warps = whole_warps(wave, index)
    threads = wave.threads[index].reshape(warps, WARP)[:, : 8 * count]
    named = np.broadcast_to(addresses, wave.threads[index].shape).reshape(warps, WARP)[:, : 8 * count]
    _, offsets = wave.locate("shared", threads.reshape(-1), named.reshape(-1), 16)
    return offsets.reshape(warps, count, 8)


def _readers(wave: Any, index: Index, count: int) -> Array:
    """Return the threads whose addresses an instruction reads, that is those that give the addresses of matrix rows."""
    return wave.threads[index].reshape(-1, WARP)[:, : 8 * count].reshape(-1)


# --- mma.sync ------------------------------------------------------------------------------------------------------------


def fragment(registers: list[Array], element: Any, warps: int) -> Array:
    """Reshape packed registers [registers, threads] to elements [warps, registers, lanes, elements per register]."""
    words = rows_of(registers, warps, WARP)
    return words.view(element).reshape(warps, len(registers), WARP, -1)


def rows_of(registers: list[Array], groups: int, threads: int) -> Array:
    """Return the registers of groups of threads, [groups, registers, threads]. A register of one number is the same in all."""
    words = np.empty((groups, len(registers), threads), registers[0].dtype)
    for number, register in enumerate(registers):
        words[:, number] = register if len(register) == 1 else register.reshape(groups, threads)
    return words


def matrix_a(parts: Array) -> Array:
    """Return matrix A, [warps, 16, k], from its fragments."""
    return gathered(parts, order_of_a(parts.shape[1], parts.shape[3]))


def matrix_b(parts: Array) -> Array:
    """Return matrix B, [warps, 8, k], from its fragments. The axis of length 8 contains the columns of B."""
    return gathered(parts, order_of_b(parts.shape[1], parts.shape[3]))


def gathered(parts: Array, order: Array) -> Array:
    """Return, for each entry of axis 0, the elements of `parts` at the numbers in `order`, in the shape of `order`."""
    return np.take(parts.reshape(len(parts), -1), order.reshape(-1), axis=1).reshape(len(parts), *order.shape)


@cache
def order_of_a(count: int, per: int) -> Array:
    """Return, for each element of A, [16, k], its number among the elements of a warp's fragments, [registers, lanes, elements per
    register]. The registers of a lane alternate between rows 0 to 7 and rows 8 to 15."""
    numbers = np.arange(count * WARP * per).reshape(count, WARP, per)
    result = np.empty((16, count // 2 * 4 * per), np.int64)
    for number in range(count):
        for e in range(per):
            result[GROUP + 8 * (number % 2), per * IN_GROUP + e + 4 * per * (number // 2)] = numbers[number, :, e]
    return result


@cache
def order_of_b(count: int, per: int) -> Array:
    numbers = np.arange(count * WARP * per).reshape(count, WARP, per)
    result = np.empty((8, count * 4 * per), np.int64)
    for number in range(count):
        for e in range(per):
            result[GROUP, per * IN_GROUP + e + 4 * per * number] = numbers[number, :, e]
    return result


@cache
def orders_of_sums() -> tuple[Array, Array]:
    """Return, for each element of C, [16, 8], its number among the accumulators of a warp, [4 registers, lanes], and the inverse of this
    order."""
    result = np.empty((16, 8), np.int64)
    for number in range(4):
        result[GROUP + 8 * (number // 2), 2 * IN_GROUP + number % 2] = number * WARP + LANE
    return result, np.argsort(result, axis=None).reshape(4, WARP)


@rule("mma")
def _mma(code: Assembler, instruction: Instruction) -> Step:
    modifiers = [m for m in instruction.modifiers if m not in ("sync", "aligned", "row", "col", "satfinite", "kind::f8f6f4")]
    if "satfinite" in instruction.modifiers or len(modifiers) != 5:
        raise UnknownPtx("only dense products without .satfinite are supported")
    shape, d_type, a_type, b_type, c_type = modifiers
    size = re.fullmatch(r"m16n8k(\d+)", shape)
    if size is None or a_type not in ELEMENTS or b_type not in ELEMENTS or d_type != c_type or d_type not in ("f32", "s32"):
        raise UnknownPtx(f"products of {shape} with {a_type}, {b_type} and {d_type} are not supported")
    accumulator = np.float32 if d_type == "f32" else np.int32
    writers = [code.write(register, accumulator) for register in code.parts(instruction.operands[0])]
    words_a, words_b = ([code.read(register, np.uint32) for register in code.parts(o)] for o in instruction.operands[1:3])
    words_c = [code.read(register, accumulator) for register in code.parts(instruction.operands[3])]
    per = 4 // np.dtype(ELEMENTS[a_type]).itemsize
    if len(words_a) // 2 * 4 * per != int(size[1]):
        raise UnknownPtx(f"{len(words_a)} registers do not hold a matrix of {shape}")

    def step(wave: Any, index: Index) -> None:
        warps = whole_warps(wave, index)
        a = matrix_a(fragment(_all(words_a, wave, index), ELEMENTS[a_type], warps))
        b = matrix_b(fragment(_all(words_b, wave, index), ELEMENTS[b_type], warps))
        order, reverse = orders_of_sums()
        c = gathered(fragment(_all(words_c, wave, index), accumulator, warps), order)
        d = gathered(product(a, b, c, a_type, b_type, wave.launch.arch), reverse)
        for number, write in enumerate(writers):
            write(wave, index, d[:, number].reshape(-1))

    return step


def _all(readers: list[Reader], wave: Any, index: Index) -> list[Array]:
    return [read(wave, index) for read in readers]
