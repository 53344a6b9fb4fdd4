"""The format of executables. The compiler emits an executable, the cache stores it, and the virtual machine runs it.

    Executable
      functions   name -> VMFunction: instructions over registers
      kernels     each kernel consists of the native phases of one loop-level function; a launch names a kernel
      regions     straight-line launch lists, each replayed by one native call
      constants   arrays that instructions and launches refer to
      object      machine code that defines every symbol named here; for a GPU, PTX that defines the kernels
      host        only for a GPU: machine code of the host that defines all other symbols, which are shape functions and grids
      preparing   an executable for the host whose functions prepare the weights; None: functions of this executable prepare them

The integers of a call are in its *shape heap* (int64), in numbered slots. Matching a value against a specification fills the slots that the
specification defines. A shape function, `int64_t (int64_t *heap)` of the object code, then computes all derived slots at once. After that
the slots that the specification only mentions are compared with the value. The slot of a float scalar holds the bits of its f64. A shape
function returns 0 if all slots have a value. Otherwise it returns 1 + the number of the slot whose value does not fit into 64 bits, or
-1 - the number of the slot whose computation divides by zero.

A native phase is `void body(void **buffers, int64_t *dims, int64_t begin, int64_t end)`: it runs iterations begin..end-1 of its outermost
parallel loop; `int64_t grid(int64_t *dims)` returns the number of iterations. Iterations may run on any thread in any order. `dims` holds
the kernel's integer variables and after them its scalar parameters as raw 64-bit words (a float as the bits of its f64). Buffers are
compact and row-major; those in the arena and in the constant table begin at multiples of 64 bytes, arguments at multiples of their element
size.

On a GPU a phase is `void body(void **record, uint32_t tells)`, run by any number of blocks; `grid` returns how many blocks have work. A
record holds the address of a word, then the buffers, then the dims, then the address of the counters if the phase has any. If `tells` is
not 0, the phase begins by storing the address of the record in this word.

At the entry of a function its parameters are matched, which calls `derive` and checks bounds, and the arena is made large enough. Then the
instructions run. Weights whose specification mentions a slot are matched at each call, all others once, when they are bound.
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

from runtime import sealed, sections
from runtime.errors import DamagedFile, IncompatibleExecutable

FORMAT_VERSION = 5
# Preparations of an entry point have its name, this infix and a number. Each prepares weights for the entry point, once.
PREPARATION = ".weights."

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
    "u32": np.dtype(np.uint32),
    "bool": np.dtype(np.bool_),
}


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base class of the stored structures except `_Version`. They are encoded in MessagePack, and a tag names the class."""


# A dimension in a specification is an integer, or a `Slot` with the number of a heap slot.


class Slot(Struct, frozen=True, tag=True):
    """A heap slot as a dimension. If `defines`, the dimension is a single variable, and matching stores the value in the slot. Otherwise
    matching compares the value with the slot."""

    index: int
    defines: bool = False


DimRef = int | Slot


class TensorSpec(Struct, frozen=True, tag=True):
    """A tensor of this shape and element type. If `dtype` is None, any element type matches."""

    shape: tuple[DimRef, ...] | None  # None: the extents are unknown; `ndim` is the rank, if known
    dtype: str | None
    ndim: int | None = None


class ShapeSpec(Struct, frozen=True, tag=True):
    """A shape that is itself a value: a tuple of integers."""

    dims: tuple[DimRef, ...] | None  # None: the integers are unknown; `ndim` is their number, if known
    ndim: int | None = None


class ScalarSpec(Struct, frozen=True, tag=True):
    """A number of this type, with this value if one is given."""

    dtype: str | None
    value: DimRef | None = None


class TupleSpec(Struct, frozen=True, tag=True):
    """A tuple whose fields match these specifications."""

    fields: tuple[Spec, ...]


class AnySpec(Struct, frozen=True, tag=True):
    """Any value."""


Spec = TensorSpec | ShapeSpec | ScalarSpec | TupleSpec | AnySpec


class Bound(Struct, frozen=True, tag=True):
    """A declared range of a dimension, checked when the slot gets its value. If `upper` is None, there is no upper bound."""

    name: str
    slot: int
    lower: int = 0
    upper: DimRef | None = None
    multiple_of: int = 1


class ParamSpec(Struct, frozen=True, tag=True):
    """A parameter of a function, and the specification that its value must match."""

    name: str
    spec: Spec
    weight: bool = False  # bound once instead of passed at every call; weights follow all other parameters
    written: bool = False  # whether the call changes the value in place


# --- kernels and launch lists ------------------------------------------------------------------------------------------


OWN = -1  # stands for the rank that runs a kernel: see `Kernel.ranks`


class Phase(Struct, frozen=True, tag=True):
    """One parallel loop nest of a kernel, compiled."""

    body: str  # symbol of the object code
    grid: str  # symbol of the host code, or of the object code if there is no host code
    threads: int = 1  # threads per block on a GPU
    num_counters: int = 0  # number of 32-bit counters that the phase's blocks share; the counters are zero before and after each launch
    shared_bytes: int = 0  # bytes of shared memory that a launch must request per block on a GPU; 0: it needs no request


class Kernel(Struct, frozen=True, tag=True):
    """One loop-level function, compiled."""

    name: str
    phases: tuple[Phase, ...]  # they run one after another, with a barrier between them
    num_buffers: int
    num_dims: int
    stack_bytes: int = 0  # maximum bytes of local buffers on a thread's stack, without spilled registers
    # For each buffer, the rank in whose memory it is (runtime/device/cuda/ranks.py); OWN: the rank that runs the kernel. Empty: all OWN
    ranks: tuple[int, ...] = ()


class Base(StrEnum):
    """The memory in which a buffer is. The address of the buffer is the beginning of this memory plus an offset."""

    REGISTER = "register"  # the tensor in a register of the calling frame
    ARENA = "arena"  # the planned arena, at an offset
    CONSTANT = "constant"  # an array of the constant table


class Operand(Struct, frozen=True, tag=True):
    """The address of a launch's buffer: a base and a byte offset from it. `index` is the number of the base's register or constant."""

    base: Base
    index: int = 0
    offset: DimRef = 0


class NativeLaunch(Struct, frozen=True, tag=True):
    """A run of a kernel on some buffers."""

    kernel: int  # index in Executable.kernels
    operands: tuple[Operand, ...]
    dims: tuple[DimRef, ...]
    # Whether a GPU may begin this launch before earlier launches have ended. If so, the kernel itself waits for their end; until then, the
    # kernel reads only memory that no launch of the function writes.
    overlaps: bool = False


class Region(Struct, frozen=True, tag=True):
    """Launches that run without work of the host between them."""

    launches: tuple[NativeLaunch, ...]


# --- instructions ------------------------------------------------------------------------------------------------------


class Reg(Struct, frozen=True, tag=True):
    """The value in a register of the calling frame."""

    index: int


class ConstantRef(Struct, frozen=True, tag=True):
    """An array of the constant table."""

    index: int


class Imm(Struct, frozen=True, tag=True):
    """A literal."""

    value: bool | int | float | str | Spec | None


Arg = Reg | ConstantRef | Imm | Slot


class Call(Struct, frozen=True, tag=True):
    """Calls `callee` and stores the result in register `dst`. `callee` is a builtin of the machine ("vm.", listed in
    runtime/vm/builtins.py), a library routine ("lib.", listed in runtime/library.py), or a function of the executable."""

    dst: int | None
    callee: str
    args: tuple[Arg, ...]


class Ret(Struct, frozen=True, tag=True):
    """End the call with this result."""

    value: Arg


class Goto(Struct, frozen=True, tag=True):
    """Continue with another instruction."""

    target: int  # index of the instruction to execute next


class If(Struct, frozen=True, tag=True):
    """Continue with the next instruction if the condition holds, otherwise with the instruction at index `orelse`."""

    cond: Arg
    orelse: int


Instruction = Call | Ret | Goto | If


class VMFunction(Struct, frozen=True, tag=True):
    """A function that the virtual machine runs."""

    name: str
    params: tuple[ParamSpec, ...]  # parameter i is in register i
    num_registers: int
    slots: tuple[str, ...]  # the expression that each slot holds, as text: "n", "2*n + 1"
    bounds: tuple[Bound, ...]
    instructions: tuple[Instruction, ...]
    derive: str | None = None  # shape function that is called when the function is entered
    arena_bytes: DimRef = 0  # bytes of the shared arena that a call needs
    signature: str = ""  # shape signature of an entry point, as text
    num_prepared: int = 0  # number of weights that the preparations return; they are the last weights
    # `variables` has the slot of each declared variable, in the order of the signature. None: the function does not use the variable.
    variables: tuple[int | None, ...] = ()

    @property
    def inputs(self) -> tuple[ParamSpec, ...]:
        return tuple(p for p in self.params if not p.weight)

    @property
    def weights(self) -> tuple[ParamSpec, ...]:
        return tuple(p for p in self.params if p.weight)


class ExecutableMeta(Struct, frozen=True, tag=True):
    """The target, the functions, the kernels and the launch lists of an executable. They are stored as one MessagePack document."""

    target: str  # "arch:+feature,+feature": the machine and the features that the object code needs
    functions: dict[str, VMFunction]
    kernels: tuple[Kernel, ...]
    regions: tuple[Region, ...]

    @property
    def stack_bytes(self) -> int:
        """The bytes of stack that these kernels need in each thread."""
        return max((kernel.stack_bytes for kernel in self.kernels), default=0)


# --- executables in memory and on disk ---------------------------------------------------------------------------------


class _ConstantInfo(Struct, frozen=True, tag=True):
    """The element type and the shape of a stored constant, whose bytes are in a separate section."""

    dtype: str
    shape: tuple[int, ...]


class _Document(Struct, frozen=True, tag=True):
    """The content of the section `program`. `host_target` is None if there is no host code."""

    meta: ExecutableMeta
    constants: tuple[_ConstantInfo, ...]
    host_target: str | None = None


class _Version(msgspec.Struct, frozen=True):
    """The content of the section `version`, which is read before all others."""

    format_version: int


@dataclass(frozen=True, slots=True)
class HostCode:
    """Host functions for a device that is not the host: shape functions and functions that return the sizes of grids."""

    object_code: bytes
    target: str


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A compiled program. `texts` holds the intermediate texts that the caller asked the compiler to keep (file name -> text)."""

    meta: ExecutableMeta
    object_code: bytes
    constants: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    host: HostCode | None = None
    preparing: Executable | None = None

    def preparations(self, entry: str) -> tuple[VMFunction, ...]:
        """Return the preparations of an entry point. Their results, in this order, are the last weights of the entry point."""
        known = (self.preparing or self).meta.functions
        names = (f"{entry}{PREPARATION}{number}" for number in count())
        return tuple(known[name] for name in takewhile(known.__contains__, names))

    def save(self, path: Path, ranges: str = "") -> None:
        """Write and seal an executable. The seal also covers `ranges`, the ranges of its variables, which the cache stores in another
        file."""
        content = sections.packed({"version": _encode(_Version(FORMAT_VERSION)), **_sections_of(self, "")})
        sealed.store(path, content, _label(path, ranges))

    @staticmethod
    def load(path: Path, ranges: str = "", key: bytes | None = None) -> Executable:
        """Read an executable, and verify its seal and then every section. `key` is the key of the seal; None: the key of the file's folder.
        Constants are read-only views of the bytes that were read. Raise IncompatibleExecutable for a file of another format, and the errors
        of `sealed.load` for a file that cannot be used."""
        file = sections.SectionFile(path, content=sealed.load(path, _label(path, ranges), key))
        version = _decode(file, "version", _Version)
        if version.format_version != FORMAT_VERSION:
            raise IncompatibleExecutable(
                f"{path} has format {version.format_version}, this runtime reads {FORMAT_VERSION}; compile the program again"
            )
        return _read(file, "")


_PREPARING = "preparing/"


def _label(path: Path, ranges: str) -> str:
    """Return the name that is sealed with an executable."""
    return f"{path.name} {ranges}" if ranges else path.name


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.Encoder(order="deterministic").encode(value)


def _sections_of(executable: Executable, prefix: str) -> dict[str, bytes | memoryview]:
    """Return the sections by name. The names of sections of the inner executable `preparing` have a prefix."""
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
    """Read the executable whose sections have this prefix: "" or that of an inner executable."""
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
    """Return the key of an element type in DTYPES. Raise ValueError for a type that is not in DTYPES."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype {dtype} cannot be stored; known: {', '.join(DTYPES)}")


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


T = TypeVar("T")


def _decode(file: sections.SectionFile, name: str, type_: type[T]) -> T:
    """Return the content of a section. Raise DamagedFile if the section is missing or damaged, or does not contain a value of type
    `type_`."""
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
    """Return a constant as a view of the file. Raise DamagedFile if the section has another size than the array in `info`."""
    data = file.read(name)
    dtype = DTYPES.get(info.dtype)
    if dtype is None or min(info.shape, default=0) < 0 or prod(info.shape) * dtype.itemsize != data.nbytes:
        raise DamagedFile(file.path, name, f"its size is {data.nbytes} bytes, expected a {info.dtype} array of shape {info.shape}")
    return np.frombuffer(data, dtype).reshape(info.shape)
