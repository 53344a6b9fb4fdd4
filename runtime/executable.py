"""What can be run. The compiler emits it, the cache stores it, and the virtual machine needs nothing else.

    Executable
      functions   name -> VMFunction: instructions over registers
      kernels     what a launch names: the native phases of one loop-level function
      regions     straight-line launch lists, replayed by one native call
      constants   arrays that instructions and launches refer to
      object      machine code (or PTX) that defines every symbol named here

Integers of a call live in its *shape heap* (int64). A function's slots are numbered; `shape_function` is a symbol of the object
code that computes the derived slots from those that matching filled, all at once: `void (int64_t *heap)`.

A native phase is `void body(void **buffers, int64_t *dims, int64_t begin, int64_t end)`: iterations begin..end-1 of its outermost
parallel loop; `int64_t grid(int64_t *dims)` tells how many there are. Iterations may run on any thread in any order. `dims` holds the
kernel's integer variables and after them its scalar parameters as raw 64-bit words (a float as the bits of its f64).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that is stored: MessagePack, tagged by class name."""


# --- parameter specifications ------------------------------------------------------------------------------------------
# A dimension in a specification is an int, or the number of a heap slot as `Slot`.


class Slot(Struct, frozen=True, tag=True):
    index: int


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
    """A declared range of a variable, checked at entry. `upper` None: unbounded."""

    name: str
    slot: int
    lower: int = 0
    upper: int | None = None
    multiple_of: int = 1


class ParamSpec(Struct, frozen=True, tag=True):
    name: str
    spec: Spec
    weight: bool = False  # bound once, not passed at every call


# --- kernels and launch lists ------------------------------------------------------------------------------------------


class Phase(Struct, frozen=True, tag=True):
    body: str  # symbols of the object code
    grid: str


class Kernel(Struct, frozen=True, tag=True):
    name: str
    phases: tuple[Phase, ...]  # run one after another, a barrier between
    num_buffers: int
    num_dims: int
    cost: tuple[DimRef, ...] = ()


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
    """A literal: number, string, specification, or None."""

    value: Any


Arg = Reg | ConstantRef | Imm | Slot


class Call(Struct, frozen=True, tag=True):
    """`callee` names a builtin of the machine ("vm."...), a library routine ("lib."...), or a function of the executable."""

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
    num_slots: int
    bounds: tuple[Bound, ...]
    instructions: tuple[Instruction, ...]
    arena_bytes: DimRef = 0  # bytes of the shared arena that a call needs
    signature: str = ""


class ExecutableMeta(Struct, frozen=True, tag=True):
    """Everything but the bulk data; stored as one MessagePack document."""

    format_version: int
    target: str
    functions: dict[str, VMFunction]
    kernels: tuple[Kernel, ...]
    regions: tuple[Region, ...]
    shape_functions: dict[str, str] = {}
    info: dict[str, Any] = {}
