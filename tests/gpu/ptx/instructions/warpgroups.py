"""Instructions wgmma: asynchronous matrix products that a warpgroup of 128 threads starts on operands in shared memory and later waits for.

Until that wait, the matrix unit owns the product's accumulators. It is a fault if a thread reads or writes one of them, or starts a product
on registers that it has written since its last fence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.instructions.matrices import GROUP, IN_GROUP, gathered, rows_of
from tests.gpu.ptx.instructions.rounding import ELEMENTS, product
from tests.gpu.ptx.program import SHARED_BASE, Array, Arrive, Assembler, Instruction, waits
from tests.gpu.ptx.text import Immediate, Register, Vector
from tests.gpu.ptx.wave import WARP, Context

WARPGROUP = 128
ROWS = 64
OLDER = (8, 0)  # compute capability of an older generation, whose tensor cores add in another order
SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # layout type in a matrix descriptor -> bytes per row of the swizzled tile


@dataclass(slots=True, eq=False)
class Product:
    """A product that one instruction has started in some warpgroups. Calling `do` computes the product."""

    threads: Array
    do: Any
    registers: frozenset[int]  # registers of the accumulators, and of A if A is in registers
    sums: frozenset[int]  # registers of the accumulators


@dataclass(slots=True, eq=False)
class Flight:
    """The products that a warpgroup has started and not yet waited for, in groups, oldest first. The last group is open."""

    groups: list[list[Product]] = field(default_factory=lambda: [[]])


def flights(wave: Any) -> dict[int, Flight]:
    """Return the products in flight. Keys are the first threads of warpgroups."""
    return wave.state.setdefault("wgmma", {})


def warpgroups(wave: Any, threads: Array) -> Array:
    """Return the first thread of each warpgroup that runs an instruction. Raise a fault if only a part of a warpgroup runs the
    instruction."""
    starts = threads[::WARPGROUP]
    whole = len(threads) % WARPGROUP == 0 and bool((threads.reshape(-1, WARPGROUP) == starts[:, None] + np.arange(WARPGROUP)).all())
    whole = whole and not (wave.thread[starts] % WARPGROUP).any()
    if not whole:
        raise Fault(f"a split warpgroup: {len(threads)} threads run an instruction that needs all 128")
    return threads[::WARPGROUP]


def meet(action: Any) -> Arrive:
    """Return a function that lets the warps of a warpgroup wait for each other. When all have arrived, `action` runs."""

    def arrive(wave: Any, context: Context) -> None:
        waiting: list[Context] = wave.state.setdefault("an instruction of a warpgroup", [])
        same = [c for c in waiting if c.piece == context.piece]
        threads = wave.union([context.threads, *(c.threads for c in same)])
        number = wave.warpgroup[threads]
        complete = np.bincount(number, minlength=1)[number] == WARPGROUP
        for c in (*same, context):
            if c in waiting:
                waiting.remove(c)
            if (rest := c.threads[~complete[np.searchsorted(threads, c.threads)]]).size:
                waiting.append(Context(c.piece, rest, rest, c.join, c.age))
        if complete.any():
            ready = threads[complete]
            action(wave, ready)
            for c in (*same, context):
                wave.resume(c.piece + 1, c.threads[complete[np.searchsorted(threads, c.threads)]], c.join, c.age)

    return arrive


@waits("setmaxnreg")
def _setmaxnreg(code: Assembler, instruction: Instruction) -> Arrive:
    return meet(warpgroups)


@waits("wgmma")
def _wgmma(code: Assembler, instruction: Instruction) -> Arrive:
    match instruction.modifiers[0]:
        case "fence":
            return meet(_fence)
        case "commit_group":
            return meet(_commit)
        case "wait_group":
            assert isinstance(instruction.operands[0], Immediate)
            allowed = instruction.operands[0].value
            return meet(lambda wave, threads: _wait(wave, threads, allowed))
        case "mma_async":
            return meet(_start(code, instruction))
        case _:
            raise UnknownPtx("not supported")


def _fence(wave: Any, threads: Array) -> None:
    warpgroups(wave, threads)
    wave.written[:, wave.index(threads)] = False


def _commit(wave: Any, threads: Array) -> None:
    for first in warpgroups(wave, threads):
        flights(wave).setdefault(int(first), Flight()).groups.append([])


def _wait(wave: Any, threads: Array, allowed: int) -> None:
    """Compute the products of all committed groups except the last `allowed`. Warpgroups that started a product by the same instruction
    compute it together."""
    due: dict[int, tuple[Product, list[Array]]] = {}
    order: list[int] = []
    for first in warpgroups(wave, threads):
        flight = flights(wave).get(int(first))
        while flight is not None and len(flight.groups) - 1 > allowed:
            for started in flight.groups.pop(0):
                if id(started) not in due:
                    due[id(started)] = (started, [])
                    order.append(id(started))
                due[id(started)][1].append(np.arange(first, first + WARPGROUP))
    for key in order:
        started, parts = due[key]
        started.do(wave, np.concatenate(parts))
    _note_flights(wave, threads)


def _note_flights(wave: Any, threads: Array) -> None:
    """Update `wave.held`, the registers that products in flight use."""
    held = wave.state.setdefault("held", {})
    for first in threads[::WARPGROUP]:
        flight = flights(wave).get(int(first))
        products = [p for group in flight.groups for p in group] if flight is not None else []
        held[int(first)] = frozenset().union(*(p.registers for p in products))
    wave.held = {first: registers for first, registers in held.items() if registers}


def _start(code: Assembler, instruction: Instruction) -> Any:
    modifiers = [m for m in instruction.modifiers[1:] if m not in ("sync", "aligned")]
    if len(modifiers) != 4:
        raise UnknownPtx("only dense products without .satfinite are supported")
    shape, d_type, a_type, b_type = modifiers
    size = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if size is None or a_type not in ELEMENTS or b_type not in ELEMENTS or d_type not in ("f32", "s32"):
        raise UnknownPtx(f"products of {shape} with {a_type}, {b_type} and {d_type} are not supported")
    n, k = int(size[1]), int(size[2])
    element = ELEMENTS[a_type]
    if n % 8 or not 8 <= n <= 256 or k * np.dtype(element).itemsize != 32:
        raise UnknownPtx(f"there is no product of {shape}")
    accumulator = np.float32 if d_type == "f32" else np.int32
    to, a, b, scale_d, *immediates = instruction.operands
    assert isinstance(to, Vector)
    if len(to.parts) != n // 2:
        raise UnknownPtx(f"{len(to.parts)} registers do not hold {ROWS} x {n} numbers of a warpgroup")
    values = [i.value for i in immediates if isinstance(i, Immediate)]
    in_registers = isinstance(a, Vector)
    transposes = dict(zip("b" if in_registers else "ab", values[2:], strict=False))
    if len(values) != len(immediates) or transposes.get("a", 0) or len(values) - 2 > (1 if in_registers else 2):
        raise UnknownPtx("transposed left operands are not supported")
    lines = bool(transposes.get("b", 0))
    if lines and k != 16:
        raise Fault("only operands of 16 bits can be transposed")
    if values[:2] not in ([1, 1], []):
        raise UnknownPtx("negated operands are not supported")
    readers = [code.read(part, accumulator) for part in to.parts]
    writers = [code.write(part, accumulator) for part in to.parts]
    read_scale = code.read(scale_d, np.bool_)
    read_b = code.read(b, np.uint64)
    read_a = [code.read(part, np.uint32) for part in a.parts] if isinstance(a, Vector) else [code.read(a, np.uint64)]
    parts = (*to.parts, *(a.parts if isinstance(a, Vector) else ()))
    registers = frozenset(part.slot for part in parts if isinstance(part, Register))
    code.unit_registers |= registers
    own = frozenset(part.slot for part in to.parts if isinstance(part, Register))

    def start(wave: Any, threads: Array) -> None:
        for first in warpgroups(wave, threads):
            held = wave.held.get(int(first), frozenset())
            other = [
                p
                for group in flights(wave).get(int(first), Flight()).groups
                for p in group
                if (p.sums & registers or p.registers & own) and not own <= p.sums  # several products may read the same A
            ]
            if held and other:
                raise Fault("the accumulators belong to a product of another shape that the kernel has not waited for")
        rows = wave.program.rows_of(registers)
        if (found := wave.written[rows][:, wave.index(threads)].any(axis=1)).any():
            slots = [slot for slot, row in wave.program.unit_registers.items() if row in rows[found]]
            names = ", ".join(wave.program.kernel.registers[slot].name for slot in sorted(slots)[:3])
            raise Fault(f"{names}: written after the last wgmma.fence, which must order it before the product")
        groups = threads.reshape(-1, WARPGROUP)
        one = groups[:, 0]
        matrix_b = operand(wave, one, read_b(wave, threads).reshape(-1)[_picks(threads, read_b(wave, threads))], n, in_lines=lines)
        adds = np.broadcast_to(read_scale(wave, threads), threads.shape)[::WARPGROUP].copy()
        if in_registers:
            kept = [np.broadcast_to(read(wave, threads), threads.shape).copy() for read in read_a]
            matrices = [matrix_b]
        else:
            kept = []
            descriptors = read_a[0](wave, threads)
            matrices = [operand(wave, one, descriptors.reshape(-1)[_picks(threads, descriptors)], ROWS), matrix_b]
        for group, first in enumerate(one):
            for matrix in matrices:
                wave.shadow.begin_reading(int(first), matrix[group].pieces)

        def do(wave: Any, who: Array) -> None:
            chosen = np.searchsorted(threads[::WARPGROUP], who[::WARPGROUP])
            count = len(chosen)
            if in_registers:
                rows_a = _registers_of_a([r.reshape(-1, WARPGROUP)[chosen] for r in kept], element)
            else:
                rows_a = _stored(wave, matrices[0], chosen, element)
            rows_b = _stored(wave, matrix_b, chosen, element)
            order, reverse = _orders_of_sums(n)
            c = gathered(rows_of([read(wave, who) for read in readers], count, WARPGROUP), order)
            c[~adds[chosen]] = 0
            uneven = wave.launch.uneven is not None and n >= wave.launch.uneven
            d = product(rows_a, rows_b, c, a_type, b_type, OLDER if uneven else wave.launch.arch)
            for group in chosen:
                for matrix in matrices:
                    wave.shadow.end_reading(matrix[group].pieces)
            sums = gathered(d, reverse)
            for number, write in enumerate(writers):
                write(wave, who, sums[:, number].reshape(-1))

        started = Product(threads, do, registers, own)
        for first in one:
            flights(wave).setdefault(int(first), Flight()).groups[-1].append(started)
        _note_flights(wave, threads)

    return start


def _picks(threads: Array, values: Array) -> Array:
    """Return the position in `values` of each warpgroup's first thread. All threads of a warpgroup must give the same descriptor."""
    if len(values) == 1:
        return np.zeros(len(threads) // WARPGROUP, np.int64)
    if (values.reshape(-1, WARPGROUP) != values.reshape(-1, WARPGROUP)[:, :1]).any():
        raise Fault("the threads of a warpgroup give different descriptors")
    return np.arange(0, len(threads), WARPGROUP)


def _places() -> tuple[Array, Array]:
    warp = np.arange(WARPGROUP) // WARP
    return 16 * warp + np.tile(GROUP, 4), 2 * np.tile(IN_GROUP, 4)


@cache
def _orders_of_sums(n: int) -> tuple[Array, Array]:
    """Return, for each of the sums, [64, n], its number among the accumulators of a warpgroup, [registers, threads], and the inverse of
    this order."""
    row, column = _places()
    result = np.empty((ROWS, n), np.int64)
    for number in range(n // 2):
        result[row + 8 * (number // 2 % 2), column + 8 * (number // 4) + number % 2] = number * WARPGROUP + np.arange(WARPGROUP)
    return result, np.argsort(result, axis=None).reshape(n // 2, WARPGROUP)


def _registers_of_a(parts: list[Array], element: Any) -> Array:
    """Return matrix A, [warpgroups, 64, k]. Each thread has four registers of elements of A."""
    words = np.ascontiguousarray(np.stack(parts, -1)).view(element)  # [warpgroups, 128, 4 * elements per register]
    per = words.shape[-1] // 4
    result = np.empty((words.shape[0], ROWS, 8 * per), words.dtype)
    row, _ = _places()
    inside = np.tile(IN_GROUP, 4)
    for number in range(4):
        for e in range(per):
            result[:, row + 8 * (number % 2), per * inside + e + 4 * per * (number // 2)] = words[..., number * per + e]
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix in shared memory, of which a product reads 32 bytes of each row."""

    offsets: Array  # of the adjacent bytes, in units of `adjacent`
    adjacent: int  # number of bytes that are adjacent both in a row of the matrix and in memory
    pieces: Array  # of the access history (shadow.py)


def operand(wave: Any, threads: Array, descriptors: Array, rows: int, *, in_lines: bool = False) -> list[Matrix]:
    """Return the matrix that each descriptor names in the shared memory of its thread's block."""
    found: list[Matrix] = []
    for thread, descriptor in zip(threads, descriptors, strict=True):
        adjacent = 2 if in_lines else 16
        offsets, pieces, low, high = _bytes_of(int(descriptor), rows, wave.shadow.grain, in_lines=in_lines)
        if low < 0 or high >= wave.shared_bytes:
            raise Fault(f"an operand of a product lies at shared offsets {low} to {high}, outside {wave.shared_bytes} bytes")
        start = int(wave.slot[thread]) * wave.shared_stride
        here = (offsets + start // adjacent, pieces + start // wave.shadow.grain) if start else (offsets, pieces)
        found.append(Matrix(here[0], adjacent, here[1]))
    return found


def _stored(wave: Any, matrices: list[Matrix], chosen: Array, element: Any) -> Array:
    """Return the elements of some matrices, [matrices, rows, elements in 32 bytes]."""
    offsets = matrices[int(chosen[0])].offsets if len(chosen) == 1 else np.stack([matrices[number].offsets for number in chosen])
    stored = wave.shared.view(f"V{matrices[0].adjacent}")[offsets]
    return stored.view(element).reshape(len(chosen), -1, 32 // np.dtype(element).itemsize)


@lru_cache(maxsize=1024)  # the loops of a kernel use few descriptors again and again
def _bytes_of(descriptor: int, rows: int, grain: int, *, in_lines: bool) -> tuple[Array, Array, int, int]:
    """Return where in a block's shared memory the adjacent bytes of a matrix are, in units of their number (see Matrix), their pieces of
    `grain` bytes, the lowest offset of a byte and the highest one. For each row of the matrix, these are 32 bytes along K. `in_lines`: the
    matrix is stored transposed, so elements of neighbouring rows are adjacent, not those of a row."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Fault("a product whose descriptors have a base offset is not supported")
    width = SWIZZLES[descriptor >> 62 & 3]
    row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
    if in_lines:  # CUTLASS, make_gmma_desc<Major::MN>: a line has `width` bytes; 8 lines of consecutive elements along K are adjacent
        element, of_line = byte // 2, width // 2
        if width == 16:
            leading, stride = stride, leading
        address = start + row // of_line * leading + element // 8 * stride + element % 8 * width + row % of_line * 2 + byte % 2
    elif width == 16:  # the matrix consists of core matrices of 8 rows by 16 bytes
        address = start + row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
    else:
        address = start + row // 8 * stride + row % 8 * width + byte
    if width > 16:
        address = address ^ ((address >> 7 & (width // 16 - 1)) << 4)
    offsets = address.reshape(-1) - SHARED_BASE
    pieces = np.unique(offsets // grain)
    adjacent = 2 if in_lines else 16
    places = offsets[::adjacent] // adjacent
    for shared in (places, pieces):
        shared.flags.writeable = False
    return places, pieces, int(offsets.min()), int(offsets.max())
