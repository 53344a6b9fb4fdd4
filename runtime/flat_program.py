"""The planned functions of an executable as flat records, which JavaScript and C replay without a virtual machine.

A call of a function takes these steps:

    1  for each dimension of an input that defines a heap slot, write the dimension to that slot; write the literals after all slots
    2  call `derive`, a function of the object code, which computes all other slots; it returns 0 if it succeeds
    3  check that inputs have the shapes in the heap, and that each bound and check holds
    4  for each record in order, compute the addresses of its buffers, each a base plus the number of bytes in a slot, and the values of its
       dims; then run `body(buffers, dims, 0, grid(dims))`, or divide the range 0 to grid(dims) among several threads
    5  read the outputs in the arena; they stay there until the next call of the function

Functions share one arena. Each function uses a separate part of it, so the sampler can read the step's results. Weights and constants form
one block. Only straight-line functions can be flat: jumps, calls and library routines need the virtual machine (runtime/vm).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod

import msgspec

from runtime.errors import InvalidProgram
from runtime.executable import (
    DTYPES,
    Arg,
    Base,
    Call,
    DimRef,
    Executable,
    ExecutableMeta,
    Imm,
    NativeLaunch,
    Operand,
    Reg,
    Ret,
    ScalarSpec,
    Slot,
    TensorSpec,
    VMFunction,
    dtype_name,
)
from runtime.sections import align


class FlatBase(IntEnum):
    """The memory in which a buffer is: the arena, the block of weights and constants, or an input. INPUT + n stands for input n."""

    ARENA = 0
    WEIGHTS = 1
    INPUT = 2


class FlatStruct(msgspec.Struct, frozen=True):
    """Base class of the flat program and its parts. Each is written as a JSON object with its fields."""


class Stored(FlatStruct, frozen=True):
    """A weight of a function, or a constant, in the block of weights."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # byte at which it begins

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class FlatTensor(FlatStruct, frozen=True):
    """A tensor. `shape` has the heap slots of its extents; `offset` is the slot that holds its offset in the arena, or -1 for an input."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = -1


class Definition(FlatStruct, frozen=True):
    """A slot whose value is the extent of an input along an axis."""

    slot: int
    input: int
    axis: int


class FlatBound(FlatStruct, frozen=True):
    """A declared range of the variable `name`, whose value is in `slot`."""

    name: str
    slot: int
    lower: int
    upper: int  # slot that holds the upper bound; -1: no upper bound
    multiple_of: int


class Check(FlatStruct, frozen=True):
    """Two slots that must be equal. `place` names the operator that requires this."""

    place: str
    found: int
    expected: int


class Record(FlatStruct, frozen=True):
    """A launch of one phase of a kernel."""

    body: str
    grid: str
    buffers: tuple[tuple[int, int], ...]  # for each buffer: the base of its address, and the slot of its byte offset
    dims: tuple[int, ...]  # slots


class FlatFunction(FlatStruct, frozen=True):
    """A function as a list of records. `derive` is its shape function; None: all slots are extents of inputs."""

    name: str
    inputs: tuple[FlatTensor, ...]
    outputs: tuple[FlatTensor, ...]
    slots: tuple[str, ...]  # the expression that each slot holds, as text
    literals: tuple[str, ...]  # 64-bit integers in decimal; as JSON numbers they would not be exact
    definitions: tuple[Definition, ...]
    bounds: tuple[FlatBound, ...]
    checks: tuple[Check, ...]
    derive: str | None
    arena_begin: int  # offset of the function's part of the arena, in bytes
    records: tuple[Record, ...]


class FlatProgram(FlatStruct, frozen=True):
    """The functions, and the sizes of the memory that a replay allocates before the first call."""

    target: str
    functions: dict[str, FlatFunction]
    weights: tuple[Stored, ...]
    weights_bytes: int
    arena_bytes: int  # bytes of the arena, for the parts of all functions together
    stack_bytes: int  # stack that a thread needs for the local buffers of kernels
    most_buffers: int  # largest number of buffers of any record
    most_dims: int


def flat_program(executable: Executable, entry: str, others: Iterable[str] = ()) -> FlatProgram:
    """Flatten the functions `entry` and `others`, each with its weights, if it has any: the sampler has none. Raise InvalidProgram if a
    function is not flat, if a weight has no constant shape, or if the size of an arena is no constant."""
    meta, names = executable.meta, (entry, *others)
    weights, weights_bytes = _stored(executable, names)
    places = {w.name: w.offset for w in weights}
    functions, begin = dict[str, FlatFunction](), 0
    for name in names:
        source = meta.functions[name]
        functions[name] = _Flattening(meta, source, places).function(begin)
        begin = align(begin + _arena_bytes(source))
    records = [r for f in functions.values() for r in f.records]
    return FlatProgram(
        meta.target,
        functions,
        weights,
        weights_bytes,
        begin,
        meta.stack_bytes,
        max((len(r.buffers) for r in records), default=0),
        max((len(r.dims) for r in records), default=0),
    )


def constant_name(number: int) -> str:
    """Return the name under which the constant with this number is stored."""
    return f"constant.{number}"


def weight_name(function: str, weight: str) -> str:
    """Return the name under which a function's weight is stored. Two functions may have different weights of the same name."""
    return f"{function}: {weight}"


def _stored(executable: Executable, functions: Iterable[str]) -> tuple[tuple[Stored, ...], int]:
    """Place the weights of the functions, and all constants, in the block of weights. Return their places and the size of the block in
    bytes. Raise InvalidProgram if a weight has no constant shape."""
    found: list[Stored] = []
    end = 0
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    for source in map(executable.meta.functions.__getitem__, functions):
        for param in source.weights:
            spec = param.spec
            if not isinstance(spec, TensorSpec) or spec.dtype is None or spec.shape is None or any(isinstance(d, Slot) for d in spec.shape):
                raise InvalidProgram(f"{source.name}: weight {param.name!r} has no constant shape, so it cannot be stored")
            shapes.append((weight_name(source.name, param.name), spec.dtype, tuple(d for d in spec.shape if isinstance(d, int))))
    shapes += [(constant_name(i), dtype_name(c.dtype), c.shape) for i, c in enumerate(executable.constants)]
    for name, dtype, shape in shapes:
        found.append(Stored(name, dtype, shape, align(end)))
        end = found[-1].offset + found[-1].num_bytes
    return tuple(found), align(end)


def _arena_bytes(source: VMFunction) -> int:
    """Return the bytes of the arena that a function needs. Raise InvalidProgram if the number is no constant."""
    if isinstance(source.arena_bytes, Slot):
        raise InvalidProgram(
            f"{source.name}: its arena grows with {source.slots[source.arena_bytes.index]}, for which no bound is declared"
        )
    return source.arena_bytes


@dataclass(slots=True)
class _Flattening:
    """Flattens one function. Raises InvalidProgram for a function that is not flat."""

    meta: ExecutableMeta
    source: VMFunction  # the function to flatten
    places: Mapping[str, int]  # byte offset of each weight and constant in the block of weights
    literals: dict[int, int] = field(default_factory=dict[int, int])  # number of each literal, counted from the end of the function's slots
    tensors: dict[int, FlatTensor] = field(default_factory=dict[int, FlatTensor])  # tensors in the arena, by register
    # the tensors of each tuple, by register
    tuples: dict[int, tuple[FlatTensor, ...]] = field(default_factory=dict[int, tuple[FlatTensor, ...]])
    scalars: dict[int, int] = field(default_factory=dict[int, int])  # slot of each scalar, by register
    checks: list[Check] = field(default_factory=list[Check])
    records: list[Record] = field(default_factory=list[Record])
    outputs: tuple[FlatTensor, ...] = ()

    def function(self, arena_begin: int) -> FlatFunction:
        """Return the flat function, whose part of the arena begins at byte `arena_begin`. Raise InvalidProgram if the function is not
        flat."""
        source = self.source
        for instruction in source.instructions:
            match instruction:
                case Call(dst, callee, args):
                    self._call(dst, callee, args)
                case Ret(Reg(index)):
                    self.outputs = self.tuples[index] if index in self.tuples else (self._tensor(index),)
                case _:
                    raise InvalidProgram(
                        f"{source.name} is not flat: it has {type(instruction).__name__}, which only the virtual machine runs"
                    )
        inputs, definitions = self._inputs()
        bounds = tuple(
            FlatBound(b.name, b.slot, b.lower, -1 if b.upper is None else self._slot(b.upper), b.multiple_of) for b in source.bounds
        )
        return FlatFunction(
            source.name,
            inputs,
            self.outputs,
            source.slots,
            tuple(map(str, self.literals)),
            definitions,
            bounds,
            tuple(self.checks),
            source.derive,
            arena_begin,
            tuple(self.records),
        )

    def _inputs(self) -> tuple[tuple[FlatTensor, ...], tuple[Definition, ...]]:
        """Return the inputs, and the slots that hold their extents. Raise InvalidProgram if an input is not a tensor of known rank and
        type."""
        inputs: list[FlatTensor] = []
        definitions: list[Definition] = []
        for number, param in enumerate(self.source.inputs):
            spec = param.spec
            if not isinstance(spec, TensorSpec) or spec.dtype is None or spec.shape is None:
                raise InvalidProgram(f"{self.source.name} is not flat: input {param.name!r} is not a tensor of known rank and type")
            definitions += [Definition(d.index, number, i) for i, d in enumerate(spec.shape) if isinstance(d, Slot) and d.defines]
            inputs.append(FlatTensor(param.name, spec.dtype, tuple(map(self._slot, spec.shape))))
        return tuple(inputs), tuple(definitions)

    def _call(self, dst: int | None, callee: str, args: tuple[Arg, ...]) -> None:
        """Flatten a call: add the records of its launches or its check, or remember what the register `dst` holds. Raise InvalidProgram if
        only the virtual machine can make the call."""
        match callee, args:
            case "vm.run_region", (Imm(int() as region),):
                for launch in self.meta.regions[region].launches:
                    self._launch(launch)
            case "vm.alloc_arena", (offset, Imm(str() as dtype), *dims) if dst is not None:
                self.tensors[dst] = FlatTensor("", dtype, tuple(map(self._dim, dims)), self._dim(offset))
            case "vm.reshape", (Reg(index), *dims) if dst is not None:
                base = self._tensor(index)
                self.tensors[dst] = FlatTensor("", base.dtype, tuple(map(self._dim, dims)), base.offset)
            case "vm.tuple", _ if dst is not None:
                self.tuples[dst] = tuple(self._tensor(a.index) for a in args if isinstance(a, Reg))
            case "vm.make_scalar", (value, _) if dst is not None:
                self.scalars[dst] = self._dim(value)
            case "vm.match", (Reg(index), Imm(str() as place), Imm(ScalarSpec(value=Slot(defines=False) as expected)), Imm(None)):
                self.checks.append(Check(place, self.scalars[index], self._slot(expected)))
            case _:
                raise InvalidProgram(f"{self.source.name} is not flat: it calls {callee}, which only the virtual machine can call")

    def _tensor(self, register: int) -> FlatTensor:
        if register not in self.tensors:
            raise InvalidProgram(f"{self.source.name} is not flat: register {register} is not a tensor of the arena")
        return self.tensors[register]

    def _launch(self, launch: NativeLaunch) -> None:
        buffers = tuple(map(self._buffer, launch.operands))
        dims = tuple(map(self._slot, launch.dims))
        self.records += [Record(p.body, p.grid, buffers, dims) for p in self.meta.kernels[launch.kernel].phases]

    def _buffer(self, operand: Operand) -> tuple[int, int]:
        """Return the base of a buffer, and the slot of its offset from that base."""
        num_inputs = len(self.source.inputs)
        match operand.base:
            case Base.ARENA:
                return FlatBase.ARENA, self._slot(operand.offset)
            case Base.CONSTANT:
                return FlatBase.WEIGHTS, self._stored(operand.offset, self.places[constant_name(operand.index)])
            case Base.REGISTER if operand.index in self.tensors:
                return FlatBase.ARENA, self._behind(self.tensors[operand.index], operand.offset)
            case Base.REGISTER if operand.index < num_inputs:
                return FlatBase.INPUT + operand.index, self._slot(operand.offset)
            case Base.REGISTER:
                name = weight_name(self.source.name, self.source.params[operand.index].name)
                return FlatBase.WEIGHTS, self._stored(operand.offset, self.places[name])

    def _stored(self, offset: DimRef, place: int) -> int:
        """Return the slot of the offset of a buffer in the block of weights. `place` is the offset of the weight or constant in this block,
        and `offset` that of the buffer in the weight or constant. Raise InvalidProgram if `offset` is no constant."""
        if isinstance(offset, Slot):
            raise InvalidProgram(f"{self.source.name} is not flat: a weight's offset, {self.source.slots[offset.index]}, is not a constant")
        return self._slot(place + offset)

    def _behind(self, tensor: FlatTensor, offset: DimRef) -> int:
        """Return the slot of the offset of a buffer that is a whole tensor in the arena. Raise InvalidProgram if the buffer is only a part
        of the tensor."""
        if offset != 0:
            raise InvalidProgram(f"{self.source.name} is not flat: a launch reads only a part of a tensor in the arena")
        return tensor.offset

    def _dim(self, arg: Arg) -> int:
        """Return the slot of an argument that is an integer. Raise InvalidProgram for any other argument."""
        match arg:
            case Slot():
                return self._slot(arg)
            case Imm(int() as value):
                return self._slot(value)
            case _:
                raise InvalidProgram(f"{self.source.name} is not flat: {arg} is not an integer")

    def _slot(self, ref: DimRef) -> int:
        """Return the slot of an integer. The slots of literals come after those of the function."""
        if isinstance(ref, Slot):
            return ref.index
        return len(self.source.slots) + self.literals.setdefault(ref, len(self.literals))
