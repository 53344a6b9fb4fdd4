"""Compile a kernel to Python closures, which apply each instruction to the threads of a wave.

A closure, here called a step, takes the wave and the index of the threads that run the instruction: a slice if all threads of the wave run
it, otherwise an array of thread numbers. `RULES` maps instructions to functions that make steps; `WAITS` maps instructions at which threads
may wait for others. The files of `tests/gpu/ptx/instructions` fill both tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.faults import UnknownPtx
from tests.gpu.ptx.flow import Flow, branches, flow_of, leaves
from tests.gpu.ptx.text import Address, Immediate, Instruction, Kernel, Module, Negated, Operand, Register, Sink, Special, Symbol, Vector

Array = NDArray[Any]
Index = Any  # the threads that run a step: slice(None) or an array of thread numbers
Step = Callable[[Any, Index], None]
Reader = Callable[[Any, Index], Array]
Writer = Callable[[Any, Index, Array], None]
Arrive = Callable[[Any, Any], None]  # takes a wave, and the context whose threads begin to wait

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64, "tf32": np.uint32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "e4m3x2": np.uint16, "e5m2x2": np.uint16, "u16x2": np.uint32, "s16x2": np.uint32,
}  # fmt: skip
PACKED = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16, "u16x2": np.uint16, "s16x2": np.int16}

SHARED_BASE = 0x400  # Address of the first byte of a block's shared memory. The system uses the addresses below.
# Where shared memory and local memory begin in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW = 0x2000_0000_0000, 0x2100_0000_0000

RULES: dict[str, Callable[[Assembler, Instruction], Step]] = {}
WAITS: dict[str, Callable[[Assembler, Instruction], Arrive]] = {}


def rule(*opcodes: str) -> Callable[[Callable[[Assembler, Instruction], Step]], Callable[[Assembler, Instruction], Step]]:
    def note(make: Callable[[Assembler, Instruction], Step]) -> Callable[[Assembler, Instruction], Step]:
        RULES.update(dict.fromkeys(opcodes, make))
        return make

    return note


def waits(*names: str) -> Callable[[Callable[[Assembler, Instruction], Arrive]], Callable[[Assembler, Instruction], Arrive]]:
    """Register a function for instructions at which threads may wait. A name is an opcode, optionally followed by its first modifiers."""

    def note(make: Callable[[Assembler, Instruction], Arrive]) -> Callable[[Assembler, Instruction], Arrive]:
        WAITS.update(dict.fromkeys(names, make))
        return make

    return note


def wait_of(instruction: Instruction) -> Callable[[Assembler, Instruction], Arrive] | None:
    name = instruction.opcode
    for modifier in ("", *instruction.modifiers):
        name = f"{name}.{modifier}" if modifier else name
        if name in WAITS:
            return WAITS[name]
    return None


def bits_of(dtype: Any) -> int:
    return 1 if dtype is np.bool_ else np.dtype(dtype).itemsize * 8


@dataclass(slots=True)
class Ending:
    """The instruction that ends a piece: a jump, a branch on a predicate, a jump table or a wait."""

    target: int = -1
    predicate: Reader | None = None
    otherwise: int = -1
    targets: tuple[int, ...] = ()
    select: Reader | None = None
    arrive: Arrive | None = None


@dataclass(slots=True)
class Code:
    steps: list[Step]
    texts: list[str]
    ending: Ending
    join: int
    # If the kernel has warpgroup products: the slots of the registers of such products that each step reads or writes, and last the piece's
    # ending; and of those that it writes.
    touches: list[frozenset[int]] = field(default_factory=list)
    writes: list[frozenset[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class KeptViews:
    """The arrays that steps read, for the next wave with as many threads. `memory` is that of the registers, by their bits."""

    count: int
    memory: dict[int, NDArray[np.uint8]]
    views: list[Array]


@dataclass(slots=True, eq=False)
class Program:
    kernel: Kernel
    target: str
    codes: list[Code]
    views: list[tuple[int, Any]]  # (register slot, element type) of each array that steps read
    static_bytes: int  # bytes of shared memory that the kernel declares, without dynamic memory
    local_bytes: int
    shared_grain: int  # bytes of the narrowest access to shared memory in the kernel, at most 4
    global_grain: int  # the same for global memory
    unit_registers: dict[int, int]  # slot of each register that warpgroup products use -> its number among them
    kept_views: KeptViews | None = None

    def rows_of(self, registers: frozenset[int]) -> NDArray[np.int64]:
        """Return the numbers of registers that warpgroup products use."""
        return np.array([self.unit_registers[slot] for slot in registers])

    @property
    def cluster(self) -> int:
        """The number of blocks of a cluster."""
        return prod(self.kernel.cluster or (1,))

    @property
    def exit(self) -> int:
        return len(self.codes)


class Assembler:
    """Compiles a kernel. `globals_` maps the module's variables to their addresses in device memory."""

    def __init__(self, module: Module, kernel: Kernel, globals_: dict[str, int]) -> None:
        self.module, self.kernel = module, kernel
        self.symbols = dict(globals_)
        self.parameters = {p.name: p.offset for p in kernel.parameters}
        self.static_bytes = self._lay_out("shared", SHARED_BASE)
        self.local_bytes = self._lay_out("local", 0)
        self.unit_registers: frozenset[int] = frozenset()
        self.shared_grain = self.global_grain = 4
        self._views: dict[tuple[int, Any], int] = {}

    def _lay_out(self, space: str, base: int) -> int:
        variables = [v for v in (*self.module.variables, *self.kernel.variables) if v.space == space]
        at = 0
        for variable in sorted(variables, key=lambda v: v.num_bytes == 0):  # dynamic memory, which has no size, comes last
            at = -(-at // variable.alignment) * variable.alignment
            self.symbols[variable.name] = base + at
            at += variable.num_bytes
        return at

    # --- operands --------------------------------------------------------------------------------------------------------

    def view(self, register: Register, dtype: Any) -> int:
        return self._views.setdefault((register.slot, dtype), len(self._views))

    def read(self, operand: Operand, dtype: Any) -> Reader:
        match operand:
            case Register():
                number = self.view(operand, dtype)
                return lambda wave, index: wave.views[number][index]
            case Negated():
                number = self.view(operand.register, np.bool_)
                return lambda wave, index: ~wave.views[number][index]
            case Special():
                return lambda wave, index: wave.special(operand.name)[index].astype(dtype)
            case Immediate() | Symbol():
                value = constant(operand, dtype) if isinstance(operand, Immediate) else np.array([self._address_of(operand)]).astype(dtype)
                return lambda wave, index: value
            case _:
                raise UnknownPtx(f"cannot read the operand {operand}")

    def write(self, operand: Operand, dtype: Any) -> Writer:
        match operand:
            case Sink():
                return lambda wave, index, values: None
            case Register(bits=bits) if bits > bits_of(dtype) and bits > 1:
                # Extend the value to the width of the register: with its sign if it is signed, otherwise with zeros.
                kind = "i" if np.dtype(dtype).kind == "i" else "u"
                number, narrow = self.view(operand, np.dtype(f"{kind}{bits // 8}").type), np.dtype(f"{kind}{bits_of(dtype) // 8}")

                def extend(wave: Any, index: Index, values: Array) -> None:
                    wave.views[number][index] = np.asarray(values, dtype).view(narrow)

                return extend
            case Register():
                number = self.view(operand, dtype)

                def write(wave: Any, index: Index, values: Array) -> None:
                    wave.views[number][index] = values

                return write
            case _:
                raise UnknownPtx(f"cannot write to the operand {operand}")

    def address(self, operand: Operand) -> Reader:
        if not isinstance(operand, Address):
            raise UnknownPtx(f"the operand {operand} is no address")
        if isinstance(operand.base, Register):
            offset = np.int64(operand.offset)
            if operand.base.bits == 64:
                wide = self.read(operand.base, np.int64)
                return (lambda wave, index: wide(wave, index) + offset) if operand.offset else wide
            narrow = self.read(operand.base, np.uint32)
            return lambda wave, index: narrow(wave, index).astype(np.int64) + offset
        fixed = operand.base.value if isinstance(operand.base, Immediate) else self._address_of(operand.base)
        value = np.array([fixed + operand.offset], np.int64)
        return lambda wave, index: value

    def _address_of(self, symbol: Symbol | Special) -> int:
        if symbol.name in self.symbols:
            return self.symbols[symbol.name]
        if symbol.name in self.parameters:
            return self.parameters[symbol.name]
        raise UnknownPtx(f"the name {symbol.name} is not declared")

    def parts(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.parts if isinstance(operand, Vector) else (operand,)

    # --- compiling a kernel ----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        code = self.kernel.instructions
        suspends = frozenset(number for number, instruction in enumerate(code) if wait_of(instruction) is not None)
        flow = flow_of(self.kernel, suspends)
        codes = [self._piece(flow, number, suspends) for number in range(len(flow.pieces))]
        if self.unit_registers:
            for made, piece in zip(codes, flow.pieces, strict=True):
                steps = code[piece.start : piece.start + len(made.steps)]
                made.touches = [touched(i) & self.unit_registers for i in (*steps, code[piece.end - 1])]
                made.writes = [written(i) & self.unit_registers for i in steps]
        return Program(
            self.kernel,
            self.module.target,
            codes,
            list(self._views),
            self.static_bytes,
            self.local_bytes,
            self.shared_grain,
            self.global_grain,
            {slot: number for number, slot in enumerate(sorted(self.unit_registers))},
        )

    def _piece(self, flow: Flow, number: int, suspends: frozenset[int]) -> Code:
        piece = flow.pieces[number]
        instructions = self.kernel.instructions[piece.start : piece.end]
        last = instructions[-1]
        ending = Ending(target=piece.successors[0])
        if piece.start in suspends:
            make = wait_of(last)
            assert make is not None
            ending = Ending(target=number + 1, arrive=self._made(last, make))
            if last.guard is not None:
                ending.predicate, ending.otherwise = self._guard(last), number + 1
            return Code([], [last.text], ending, piece.join)
        if last.opcode == "brx":
            ending.targets, ending.select = piece.successors, self.read(last.operands[0], np.uint32)
        elif branches(last) and last.guard is not None:
            ending.predicate, ending.otherwise = self._guard(last), piece.successors[-1]
        if branches(last):
            instructions = instructions[:-1] if last.opcode != "trap" else instructions
        assert not any(leaves(i) for i in instructions if i.opcode != "trap")
        steps, texts = [self._step(i) for i in instructions], [i.text for i in instructions]
        return Code(steps, texts, ending, piece.join)

    def _guard(self, instruction: Instruction) -> Reader:
        assert instruction.guard is not None
        guard = instruction.guard
        return self.read(Negated(guard.register) if guard.negated else guard.register, np.bool_)

    def _step(self, instruction: Instruction) -> Step:
        if instruction.opcode not in RULES:
            raise UnknownPtx(f"{self.kernel.name}: the instruction {instruction.text!r} is not known")
        step = self._made(instruction, RULES[instruction.opcode])
        if instruction.guard is None:
            return step
        guard = self._guard(instruction)

        def guarded(wave: Any, index: Index) -> None:
            taken = guard(wave, index)
            if taken.all():
                step(wave, index)
            elif taken.any():
                step(wave, wave.threads[index][taken])

        return guarded

    def _made(self, instruction: Instruction, make: Callable[[Assembler, Instruction], Any]) -> Any:
        try:
            return make(self, instruction)
        except (UnknownPtx, KeyError, IndexError, ValueError) as error:
            raise UnknownPtx(f"{self.kernel.name}: {instruction.text!r}: {error}") from error


def _registers(operand: Operand) -> frozenset[int]:
    match operand:
        case Register():
            return frozenset((operand.slot,))
        case Negated():
            return frozenset((operand.register.slot,))
        case Vector():
            return frozenset().union(*(_registers(part) for part in operand.parts))
        case Address():
            return _registers(operand.base)
        case _:
            return frozenset()


def touched(instruction: Instruction) -> frozenset[int]:
    """Return the slots of all registers that an instruction names."""
    guard = () if instruction.guard is None else (instruction.guard.register.slot,)
    return frozenset(guard).union(*(_registers(operand) for operand in instruction.operands))


def written(instruction: Instruction) -> frozenset[int]:
    first = instruction.operands[0] if instruction.operands else None
    return _registers(first) if isinstance(first, Register | Vector) and instruction.opcode not in ("st", "red") else frozenset()


def constant(immediate: Immediate, dtype: Any) -> Array:
    """Return an immediate operand as an array with one element, which NumPy broadcasts to all threads."""
    if dtype is np.bool_:
        return np.array([immediate.value != 0])
    bits = bits_of(dtype)
    unsigned = np.dtype(f"u{bits // 8}")
    if immediate.is_float and dtype in (np.float32, np.float64):
        double = immediate.value.bit_length() > 32 or bits == 64
        value = np.array([immediate.value], np.uint64 if double else np.uint32)
        return value.view(np.float64 if double else np.float32).astype(dtype)
    if not immediate.is_float and np.dtype(dtype).kind == "f":
        return np.array([immediate.value]).astype(dtype)
    return np.array([immediate.value & ((1 << bits) - 1)], unsigned).view(dtype)
