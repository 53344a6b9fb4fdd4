"""What can be run. The compiler emits it, the cache stores it, and the virtual machine needs nothing else.

    Executable
      functions   name -> VMFunction: instructions over registers
      kernels     what a launch names: the native phases of one loop-level function
      regions     straight-line launch lists, replayed by one native call
      constants   arrays that instructions and launches refer to
      object      machine code that defines every symbol named here; or PTX that defines the kernels, and beside it
      host        machine code of the host that defines all others: shape functions and grids
      preparing   an executable for the host, whose functions prepare the weights of this one. Without one this one's own do

Integers of a call live in its *shape heap* (int64), in numbered slots. Matching a value against a specification fills the slots
that the specification defines; a shape function, `int64_t (int64_t *heap)` of the object code, then computes the derived ones all at
once; then the slots that the specification only mentions are compared. A float scalar's slot holds the bits of its f64. A shape function
returns 0, or where a slot has no value: 1 + its number if 64 bits do not hold the value, -1 - its number if it divides by zero.

A native phase is `void body(void **buffers, int64_t *dims, int64_t begin, int64_t end)`: iterations begin..end-1 of its outermost
parallel loop; `int64_t grid(int64_t *dims)` tells how many there are. Iterations may run on any thread in any order. `dims` holds the
kernel's integer variables and after them its scalar parameters as raw 64-bit words (a float as the bits of its f64). Buffers are
compact and row-major; those in the arena and in the constant table begin at multiples of 64 bytes, arguments at multiples of their
element size.

On a GPU a phase is `void body(void **record)`, run by any number of blocks; `grid` tells how many have something to do. A record is the
address of a word that gets the record's own address when the phase begins, then the buffers, then the dims.

At the entry of a function its parameters are matched, `derive` is called, bounds are checked and the arena is made large enough;
then the instructions run. Weights whose specification mentions a slot are matched at each call, the others once, when bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, takewhile
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime import sections
from runtime.errors import DamagedFile, IncompatibleExecutable

FORMAT_VERSION = 4
PREPARATION = ".weights."  # between the name of an entry point and 0, 1, ...: the functions that prepare weights for it, once

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
    "u32": np.dtype(np.uint32),
    "bool": np.dtype(np.bool_),
}


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that is stored: MessagePack, tagged by class name."""


# --- parameter specifications ------------------------------------------------------------------------------------------
# A dimension in a specification is an int, or the number of a heap slot as `Slot`.


class Slot(Struct, frozen=True, tag=True):
    """`defines`: the dimension is a variable standing alone that gets its value here. Elsewhere the slot is only compared."""

    index: int
    defines: bool = False


DimRef = int | Slot


class TensorSpec(Struct, frozen=True, tag=True):
    shape: tuple[DimRef, ...] | None  # None: only the rank, or not even that, is known
    dtype: str | None
    ndim: int | None = None


class ShapeSpec(Struct, frozen=True, tag=True):
    dims: tuple[DimRef, ...] | None
    ndim: int | None = None


class ScalarSpec(Struct, frozen=True, tag=True):
    dtype: str | None
    value: DimRef | None = None


class TupleSpec(Struct, frozen=True, tag=True):
    fields: tuple[Spec, ...]


class AnySpec(Struct, frozen=True, tag=True):
    pass


Spec = TensorSpec | ShapeSpec | ScalarSpec | TupleSpec | AnySpec


class Bound(Struct, frozen=True, tag=True):
    """A declared range, checked when the slot gets its value. `upper` None: unbounded."""

    name: str
    slot: int
    lower: int = 0
    upper: DimRef | None = None
    multiple_of: int = 1


class ParamSpec(Struct, frozen=True, tag=True):
    name: str
    spec: Spec
    weight: bool = False  # bound once, not passed at every call; weights come after the other parameters
    written: bool = False  # changed in place


# --- kernels and launch lists ------------------------------------------------------------------------------------------


class Phase(Struct, frozen=True, tag=True):
    body: str  # symbols of the object code
    grid: str  # of the host's, where there is such
    threads: int = 1  # of a block on a GPU
    num_counters: int = 0  # that its blocks share: 32 bits each, zero before and behind each launch


class Kernel(Struct, frozen=True, tag=True):
    name: str
    phases: tuple[Phase, ...]  # run one after another, a barrier between
    num_buffers: int
    num_dims: int
    stack_bytes: int = 0  # at most, of local buffers; spilled registers come on top


class Base(StrEnum):
    REGISTER = "register"  # the tensor in a register of the calling frame
    ARENA = "arena"  # the planned arena, at an offset
    CONSTANT = "constant"  # an array of the constant table


class Operand(Struct, frozen=True, tag=True):
    """Where a buffer of a launch lies: a base (with its index: register or constant number) and a byte offset from it."""

    base: Base
    index: int = 0
    offset: DimRef = 0


class NativeLaunch(Struct, frozen=True, tag=True):
    kernel: int  # index in Executable.kernels
    operands: tuple[Operand, ...]
    dims: tuple[DimRef, ...]


class Region(Struct, frozen=True, tag=True):
    """Launches without anything between them that needs the host."""

    launches: tuple[NativeLaunch, ...]


# --- instructions ------------------------------------------------------------------------------------------------------


class Reg(Struct, frozen=True, tag=True):
    index: int


class ConstantRef(Struct, frozen=True, tag=True):
    index: int


class Imm(Struct, frozen=True, tag=True):
    """A literal."""

    value: bool | int | float | str | Spec | None


Arg = Reg | ConstantRef | Imm | Slot


class Call(Struct, frozen=True, tag=True):
    """`callee` names a builtin of the machine ("vm.", listed in runtime/vm/builtins.py), a library routine ("lib.", listed in
    runtime/library.py), or a function of the executable."""

    dst: int | None
    callee: str
    args: tuple[Arg, ...]


class Ret(Struct, frozen=True, tag=True):
    value: Arg


class Goto(Struct, frozen=True, tag=True):
    target: int  # index of an instruction


class If(Struct, frozen=True, tag=True):
    """Go on when the condition holds, else continue at `orelse`."""

    cond: Arg
    orelse: int


Instruction = Call | Ret | Goto | If


class VMFunction(Struct, frozen=True, tag=True):
    name: str
    params: tuple[ParamSpec, ...]  # in registers 0 .. len - 1
    num_registers: int
    slots: tuple[str, ...]  # what each slot holds, as text: "n", "2*n + 1"
    bounds: tuple[Bound, ...]
    instructions: tuple[Instruction, ...]
    derive: str | None = None  # shape function of the entry
    arena_bytes: DimRef = 0  # bytes of the shared arena that a call needs
    signature: str = ""
    num_prepared: int = 0  # of the weights, the last: what the preparations return
    variables: tuple[int | None, ...] = ()  # slots of the declared variables, in the order of the signature; None: unused

    @property
    def inputs(self) -> tuple[ParamSpec, ...]:
        return tuple(p for p in self.params if not p.weight)

    @property
    def weights(self) -> tuple[ParamSpec, ...]:
        return tuple(p for p in self.params if p.weight)


class ExecutableMeta(Struct, frozen=True, tag=True):
    """Everything but the bulk data; stored as one MessagePack document."""

    target: str  # "arch:+feature,+feature": what the object code needs
    functions: dict[str, VMFunction]
    kernels: tuple[Kernel, ...]
    regions: tuple[Region, ...]

    @property
    def stack_bytes(self) -> int:
        """The bytes of stack that these kernels need in a thread."""
        return max((kernel.stack_bytes for kernel in self.kernels), default=0)


# --- the whole, in memory and on disk ----------------------------------------------------------------------------------


class _ConstantInfo(Struct, frozen=True, tag=True):
    dtype: str
    shape: tuple[int, ...]


class _Document(Struct, frozen=True, tag=True):
    meta: ExecutableMeta
    constants: tuple[_ConstantInfo, ...]
    host_target: str | None = None


class _Version(msgspec.Struct, frozen=True):
    format_version: int


@dataclass(frozen=True, slots=True)
class HostCode:
    """Functions that the host calls for a device that is not the host itself: shape functions and sizes of grids."""

    object_code: bytes
    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """`texts` holds what was asked to be kept of the levels passed on the way (file name -> text)."""

    meta: ExecutableMeta
    object_code: bytes
    constants: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    host: HostCode | None = None
    preparing: Executable | None = None

    def preparations(self, entry: str) -> tuple[VMFunction, ...]:
        """The preparations of an entry point. Their results, in this order, are the last weights of the entry point."""
        known = (self.preparing or self).meta.functions
        names = (f"{entry}{PREPARATION}{number}" for number in count())
        return tuple(known[name] for name in takewhile(known.__contains__, names))

    def save(self, path: Path) -> None:
        sections.write(path, {"version": _encode(_Version(FORMAT_VERSION)), **_sections_of(self, "")})

    @staticmethod
    def load(path: Path) -> Executable:
        """Every section is verified. Constants are read-only views of the mapped file."""
        file = sections.SectionFile(path)
        version = _decode(file, "version", _Version)
        if version.format_version != FORMAT_VERSION:
            raise IncompatibleExecutable(
                f"{path} has format {version.format_version}, this runtime reads {FORMAT_VERSION}; compile the program again"
            )
        return _read(file, "")


_PREPARING = "preparing/"


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.Encoder(order="deterministic").encode(value)


def _sections_of(executable: Executable, prefix: str) -> dict[str, bytes | memoryview]:
    """The sections by name. Those of the executable within (`preparing`) have a prefix."""
    host, infos = executable.host, tuple(_ConstantInfo(dtype_name(c.dtype), c.shape) for c in executable.constants)
    found: dict[str, bytes | memoryview] = {
        f"{prefix}program": _encode(_Document(executable.meta, infos, None if host is None else host.target)),
        f"{prefix}object": executable.object_code,
    }
    if host is not None:
        found[f"{prefix}host"] = host.object_code
    found |= {f"{prefix}text/{name}": text.encode() for name, text in sorted(executable.texts.items())}
    found |= {f"{prefix}constant/{i}": _bytes_of(c) for i, c in enumerate(executable.constants)}
    return found if executable.preparing is None else found | _sections_of(executable.preparing, prefix + _PREPARING)


def _read(file: sections.SectionFile, prefix: str) -> Executable:
    document, texts = _decode(file, f"{prefix}program", _Document), f"{prefix}text/"
    return Executable(
        document.meta,
        bytes(file.read(f"{prefix}object")),
        [_constant(file, f"{prefix}constant/{i}", info) for i, info in enumerate(document.constants)],
        {name.removeprefix(texts): _text(file, name) for name in file.names if name.startswith(texts)},
        None if document.host_target is None else HostCode(bytes(file.read(f"{prefix}host")), document.host_target),
        _read(file, prefix + _PREPARING) if f"{prefix}{_PREPARING}program" in file.names else None,
    )


def dtype_name(dtype: np.dtype[Any]) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype {dtype} cannot be stored; known: {', '.join(DTYPES)}")


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


T = TypeVar("T")


def _decode(file: sections.SectionFile, name: str, type_: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(file.read(name), type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(file.path, name, str(error)) from error


def _text(file: sections.SectionFile, name: str) -> str:
    try:
        return str(file.read(name), "utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(file.path, name, str(error)) from error


def _constant(file: sections.SectionFile, name: str, info: _ConstantInfo) -> NDArray[Any]:
    data = file.read(name)
    dtype = DTYPES.get(info.dtype)
    if dtype is None or min(info.shape, default=0) < 0 or prod(info.shape) * dtype.itemsize != data.nbytes:
        raise DamagedFile(file.path, name, f"{data.nbytes} bytes are no {info.dtype} array of shape {info.shape}")
    return np.frombuffer(data, dtype).reshape(info.shape)
