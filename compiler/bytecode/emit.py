"""Lower a planned module to instructions, the last step from program to executable.

The module contains only views, launches, allocations and operations of the virtual machine itself. A captured block becomes one region, or
several regions if it contains instructions that may use results of launches: such an instruction ends the open region. A launch outside of
captured blocks becomes a separate region. Instructions that only use registers, such as a view of the arena, are emitted before the region
that is still open. Launches refer to memory in the arena by its offset, so a tensor in the arena gets a register only if an instruction
needs one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from compiler.bytecode.kernel import KernelCode
from compiler.bytecode.slots import Slots
from compiler.bytecode.uses import changed, needed
from compiler.ir.dims import Dim, DimVar
from compiler.ir.errors import CompileError
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, If, Value
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallLibrary, CallTir, Copy, Launch, MakeTuple, MatchCast, TupleGet
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.module import IRModule
from compiler.ir.subsume import unify
from compiler.ir.types import ScalarType, TensorType, Type, vars_of
from compiler.ops.ranks import RANKS
from compiler.ops.tables import VIEWS
from runtime import executable as vm
from runtime.executable import (
    Arg,
    Base,
    ConstantRef,
    DimRef,
    Imm,
    Kernel,
    Operand,
    ParamSpec,
    Phase,
    Reg,
    Region,
    Slot,
    VMFunction,
)
from runtime.library import routine

BETWEEN_SHAPES = ("shape_of", "tensor_to_shape")  # operators on shapes that the virtual machine implements
# Builtins that only read and write registers and slots, never results of launches, so they need not end the open region.
WITHOUT_DATA = frozenset(
    f"vm.{name}" for name in ("alloc", "alloc_arena", "copy", "make_scalar", "make_shape", "reshape", "shape_of", "tuple", "tuple_get")
)


@dataclass(slots=True)
class Program:
    """The functions of a program, and the kernels, regions, constants and shape functions that they share."""

    module: IRModule
    kernels: dict[str, int] = field(default_factory=dict[str, int])  # index in `kernel_table`, by the name of a loop nest
    early: dict[str, frozenset[int] | None] = field(default_factory=dict[str, frozenset[int] | None])  # see `KernelCode.early`
    kernel_table: list[Kernel] = field(default_factory=list[Kernel])
    regions: list[Region] = field(default_factory=list[Region])
    constants: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    functions: dict[str, VMFunction] = field(default_factory=dict[str, VMFunction])
    shape_functions: list[str] = field(default_factory=list[str])  # LLVM IR, per function

    def constant(self, data: NDArray[Any]) -> int:
        """Return the index of an array in `constants`. Add the array if this object is not there yet."""
        for index, known in enumerate(self.constants):
            if known is data:
                return index
        self.constants.append(data)
        return len(self.constants) - 1


@dataclass(frozen=True, slots=True)
class Signature:
    """The facts about an entry point that passes do not keep."""

    text: str = ""  # its shape signature
    variables: tuple[DimVar, ...] = ()  # its variables, in the order of the signature
    num_prepared: int = 0  # number of weights that preparations compute; these are the last weights


def lower(module: IRModule, kernels: Mapping[str, KernelCode], signatures: Mapping[str, Signature], symbols: str = "") -> Program:
    """Lower all functions of a module. `kernels` has the code of its loop nests, and `signatures` the facts about its entry points, both by
    name. `symbols` is the prefix of the names of shape functions. Raise CompileError if a parameter mentions a variable that no parameter
    defines, or if an operator has not been lowered."""
    program = Program(module)
    for name, code in kernels.items():
        program.kernels[name], program.early[name] = len(program.kernel_table), code.early
        phases = tuple(Phase(p.body, p.grid, p.threads, p.num_counters, p.shared_bytes) for p in code.phases)
        ranks = tuple(module.prim(name).attrs.get(RANKS, ()))
        program.kernel_table.append(Kernel(name, phases, code.num_buffers, code.num_dims, code.stack_bytes, ranks))
    for name, func in module.graph_functions.items():
        lowering = _Function(program, name, func, Slots(symbols + name))
        program.functions[name] = lowering.lower(signatures.get(name, Signature()))
        program.shape_functions.append(lowering.slots.text())
    return program


class _Function:
    """Lowers one function."""

    def __init__(self, program: Program, name: str, func: Function, slots: Slots) -> None:
        """`slots` is the shape heap of the function, which is still empty. Find the variables that need registers, and the variables whose
        memory launches write."""
        self.program = program
        self.name = name
        self.func = func
        self.slots = slots
        self.code: list[vm.Instruction] = []
        self.registers: dict[Var, int] = {}
        self.places: dict[Var, Operand] = {}  # the memory of each tensor; a tensor that is only in a register has no entry
        self.fields: dict[Var, tuple[Atom, ...]] = {}  # the fields of each tuple that this function makes
        self.scalars: dict[Var, Dim] = {}  # for each scalar whose value no annotation states, the variable whose slot holds it
        self.literals: dict[Var, ScalarValue] = {}  # the number that each name of a literal stands for
        self.num_registers = 0
        self.launches: list[vm.NativeLaunch] = []
        self.needed = needed(func.body)
        self.written = changed(func.body, program.module)

    def lower(self, signature: Signature) -> VMFunction:
        """Lower the function. Raise CompileError if a parameter mentions a variable that no parameter defines, or if an operator has not
        been lowered."""
        num_inputs = self.func.num_inputs
        params: list[ParamSpec] = []
        for i, param in enumerate(self.func.params):
            self._define(param)
            weight = num_inputs is not None and i >= num_inputs
            params.append(ParamSpec(param.name, self._spec(param, param.type, 0), weight, param in self.written))
        missing = [v for p in self.func.params for v in vars_of(p.type) if v not in self.slots.known]
        if missing:
            names = ", ".join(v.name for v in missing)
            raise CompileError(f"function {self.name!r}: no parameter defines {names}; add a parameter of type shape[{names}]")
        self.body(self.func.body)
        self.flush()
        self.code.append(vm.Ret(self.arg(self.func.body.result)))
        arena = self.slots.of(self.func.arena) if self.func.arena is not None else 0
        return VMFunction(
            self.name,
            tuple(params),
            self.num_registers,
            self.slots.names,
            tuple(self.slots.bounds),
            tuple(self._with_symbols()),
            self.slots.symbol(0),
            arena,
            signature.text,
            signature.num_prepared,
            tuple(self.slots.numbers.get(Dim.of(v)) for v in signature.variables),
        )

    def _spec(self, var: Var, type_: Type, point: int) -> vm.Spec:
        """Return the specification to match the value of `var` against. If the value is a scalar, and no annotation states the number, the
        match writes it to a separate slot."""
        if not isinstance(type_, ScalarType) or type_.value is not None:
            return self.slots.spec(type_, point)
        word = DimVar(var.name)
        self.scalars[var] = Dim.of(word)
        return vm.ScalarSpec(type_.dtype and str(type_.dtype), self.slots.word(word, point))

    def _with_symbols(self) -> list[vm.Instruction]:
        """Return the instructions, in which the last argument of each match is now the name of a shape function, or None if the match
        computes no slots. Until then this argument is the number of the match point, because the slots are known only at the end."""

        def named(instruction: vm.Instruction) -> vm.Instruction:
            if isinstance(instruction, vm.Call) and instruction.callee == "vm.match":
                *args, point = instruction.args
                assert isinstance(point, Imm) and isinstance(point.value, int)
                return vm.Call(instruction.dst, instruction.callee, (*args, Imm(self.slots.symbol(point.value))))
            return instruction

        return [named(i) for i in self.code]

    # --- bodies of functions -------------------------------------------------------------------------------------------

    def body(self, body: Body) -> None:
        for block in body.blocks:
            self.block(block)

    def block(self, block: Block) -> None:
        """Lower a block. In a captured block, launches share a region. In any other block, each binding ends its region. The end of the
        block ends the last region."""
        captured = block.kind is BlockKind.CAPTURED
        for binding in block.bindings:
            self.binding(binding)
            if not captured:
                self.flush()
        self.flush()

    def flush(self) -> None:
        """End the open region, and emit the instruction that runs it. Do nothing if the region has no launches."""
        if self.launches:
            self.program.regions.append(Region(tuple(self.launches)))
            self.launches = []
            self.emit(None, "vm.run_region", Imm(len(self.program.regions) - 1))

    def emit(self, dst: int | None, callee: str, *args: Arg) -> None:
        """Append a call. First end the open region, unless the callee uses only registers and slots (`WITHOUT_DATA`)."""
        if callee not in WITHOUT_DATA:
            self.flush()
        self.code.append(vm.Call(dst, callee, args))

    def binding(self, binding: Binding) -> None:
        """Lower a binding. If its value is a scalar in a register, and no annotation states the number, match it to store it in a slot."""
        var = binding.var
        self.value(var, binding.value)
        if var in self.registers and var not in self.scalars and isinstance(var.type, ScalarType) and var.type.value is None:
            point = self.slots.new_point()
            spec = self._spec(var, var.type, point)
            self.emit(None, "vm.match", Reg(self.registers[var]), Imm(f"scalar {var.name!r}"), Imm(spec), Imm(point))

    def value(self, var: Var, value: Value) -> None:
        """Emit the instructions or the launch that compute a value, and make `var` its name. Raise CompileError for an operator that has
        not been lowered."""
        match value:
            case Launch(library=False):
                self.launch(value)
            case Launch(func=name, args=args, attrs=attrs):
                self.library(None, name, args, attrs)
            case CallLibrary(name=name, args=args, attrs=attrs):
                self.library(self._define(var), name, args, attrs)
            case Alloc():
                self.allocate(var, value)
            case Call(op=op, args=args) if op.name in VIEWS:
                self.view(var, args[0])
            case Call(op=op, args=args) if op.name in BETWEEN_SHAPES:
                self.emit(self._define(var), f"vm.{op.name}", self.arg(args[0]))
            case Var() | Constant() | ShapeValue() | ScalarValue() | FuncRef() | Copy():
                self.name_again(var, value.value if isinstance(value, Copy) else value)
            case MakeTuple(fields=fields):
                self.fields[var] = fields
                if var in self.needed:
                    self.emit(self._define(var), "vm.tuple", *map(self.arg, fields))
            case TupleGet(value=atom, index=index):
                if isinstance(atom, Var) and atom in self.fields:
                    self.name_again(var, self.fields[atom][index])
                else:
                    self.emit(self._define(var), "vm.tuple_get", self.arg(atom), Imm(index))
            case CallFunc(callee=FuncRef(name=name), args=args):
                self.emit(self._define(var), name, *map(self.arg, args))
            case CallFunc(callee=callee, args=args):
                self.emit(self._define(var), "vm.invoke", self.arg(callee), *map(self.arg, args))
            case MatchCast():
                self.match_cast(var, value)
            case If():
                self.branches(var, value)
            case Call(op=op):
                raise CompileError(f"function {self.name!r}: operator {op.name} ({var.name}) has neither a loop nest nor a routine")
            case CallTir():
                raise AssertionError(f"{var.name} is a call of a loop nest; an earlier pass must replace it with a launch")

    # --- memory of tensors ---------------------------------------------------------------------------------------------

    def allocate(self, var: Var, alloc: Alloc) -> None:
        """Name the memory of a tensor in the arena, and make an array of it if an instruction needs one. Without an offset in the arena,
        let the virtual machine allocate the memory."""
        type_ = alloc.type
        assert isinstance(type_, TensorType) and type_.shape is not None and type_.dtype is not None
        dims = [self.dim(d) for d in type_.shape]
        if alloc.offset is None:
            self.emit(self._define(var), "vm.alloc", Imm(str(type_.dtype)), *dims)
            return
        self.places[var] = Operand(Base.ARENA, 0, self.slots.of(alloc.offset))
        if var in self.needed:
            register = self._new()
            self.emit(register, "vm.alloc_arena", self.dim(alloc.offset), Imm(str(type_.dtype)), *dims)
            self.registers[var] = register

    def view(self, var: Var, base: Atom) -> None:
        """Let a view have the memory of its base, and make an array of it if an instruction needs one."""
        self.places[var] = self.operand(base)
        if var in self.needed:
            type_ = var.type
            assert isinstance(type_, TensorType) and type_.shape is not None
            register = self._new()
            self.emit(register, "vm.reshape", self.arg(base), *(self.dim(d) for d in type_.shape))
            self.registers[var] = register

    def name_again(self, var: Var, atom: Atom) -> None:
        """Let `var` be another name of an atom. If the atom is a variable, `var` shares its register. For any other atom, `var` gets a
        register if an instruction needs one."""
        if isinstance(atom, Var):
            for table in (self.registers, self.places, self.fields, self.scalars, self.literals):
                if atom in table:
                    table[var] = table[atom]  # type: ignore[assignment]  # one table, one kind of value
            return
        if isinstance(atom, Constant):
            self.places[var] = self.operand(atom)
        if isinstance(atom, ScalarValue):
            self.literals[var] = atom
        if var in self.needed:
            self.emit(self._define(var), "vm.copy", self.arg(atom))

    def operand(self, atom: Atom) -> Operand:
        """Return the operand of launches that names the memory of a tensor."""
        match atom:
            case Constant(data=data):
                return Operand(Base.CONSTANT, self.program.constant(data))
            case Var() if atom in self.places:
                return self.places[atom]
            case Var():
                return Operand(Base.REGISTER, self.registers[atom])
            case _:
                raise AssertionError(f"{atom} is no tensor")

    # --- calls ---------------------------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> None:
        """Add the launch of a kernel to the open region. The launch may overlap earlier launches if the kernel itself waits for their end,
        and if all buffers that it reads before the wait are constant."""
        prim = self.program.module.prim(launch.func)
        buffers: list[Operand] = []
        pairs: list[tuple[TensorType, Any]] = []
        known: dict[DimVar, Dim] = {}
        words: dict[ScalarParam, DimRef] = {}
        for param, atom in zip(prim.params, launch.args, strict=True):
            match param:
                case Buffer():
                    buffers.append(self.operand(atom))
                    pairs.append((TensorType(param.shape, param.dtype), type_of(atom)))
                case DimVar():
                    assert isinstance(atom, ScalarValue) and isinstance(atom.value, Dim)
                    known[param] = atom.value
                case ScalarParam():
                    words[param] = self.word(param, atom)
        known = {**unify(tuple(p for p, _ in pairs), tuple(t for _, t in pairs)), **known}
        dims = (*(self.slots.of(known[v]) for v in prim.dim_vars), *(words[p] for p in _scalars(prim)))
        tensors = [atom for param, atom in zip(prim.params, launch.args, strict=True) if isinstance(param, Buffer)]
        early = self.program.early[launch.func]
        overlaps = early is not None and all(self.is_constant(tensors[number]) for number in early)
        self.launches.append(vm.NativeLaunch(self.program.kernels[launch.func], tuple(buffers), dims, overlaps))

    def is_constant(self, tensor: Atom) -> bool:
        """Return whether the tensor is a constant, or a parameter that no launch in this function writes."""
        return isinstance(tensor, Constant) or (tensor in self.func.params and tensor not in self.written)

    def word(self, param: ScalarParam, atom: Atom) -> DimRef:
        """Return the slot or literal that holds a scalar argument in 64 bits: an integer, or the bits of an f64."""
        match self.literals.get(atom, atom) if isinstance(atom, Var) else atom:
            case Var(type=ScalarType(value=Dim() as dim)):
                return self.slots.of(dim)
            case Var() as scalar:
                return self.slots.of(self.scalars[scalar])
            case ScalarValue(value=Dim() as dim):
                return self.slots.of(dim)
            case ScalarValue(value=bool() | int() | float() as value):
                return _float_bits(float(value)) if param.dtype.is_float else int(value)
            case _:
                raise AssertionError(f"{atom} is no scalar")

    def library(self, dst: int | None, name: str, args: tuple[Atom, ...], attrs: Mapping[str, Any]) -> None:
        """Emit the call of a host routine. Its arguments are the inputs, then the attributes, then the outputs if they are given."""
        known = routine(name)
        given = len(known.inputs)
        values = [self.arg(a) for a in args]
        self.emit(dst, f"lib.{name}", *values[:given], *(self.attribute(attrs[a]) for a in known.attributes), *values[given:])

    def attribute(self, value: Any) -> Arg:
        return self.dim(value) if isinstance(value, Dim) else Imm(value)

    def match_cast(self, var: Var, cast: MatchCast) -> None:
        """Emit a match, which also copies the value to a register of `var`. A literal or a constant is copied to this register before the
        match."""
        point = self.slots.new_point()
        value = self.arg(cast.value)
        spec = self._spec(var, cast.type, point)
        register = self._define(var)
        if isinstance(value, Imm | ConstantRef):
            self.emit(register, "vm.copy", value)
            value = Reg(register)
        self.emit(register, "vm.match", value, Imm(cast.boundary or f"match_cast {var.name!r}"), Imm(spec), Imm(point))
        if isinstance(cast.value, Var) and cast.value in self.places:
            self.places[var] = self.places[cast.value]

    def branches(self, var: Var, choice: If) -> None:
        """Emit the branches of an If. The branch that runs copies its result to the register of `var`."""
        self.flush()
        register = self._define(var)
        cond = self._new()
        self.emit(cond, "vm.read_bool", self.arg(choice.cond))
        test = len(self.code)
        self.code.append(vm.If(Reg(cond), 0))
        with self.slots.branch():
            self.body(choice.then)
            self.emit(register, "vm.copy", self.arg(choice.then.result))
        jump = len(self.code)
        self.code.append(vm.Goto(0))
        self.code[test] = vm.If(Reg(cond), len(self.code))
        with self.slots.branch():
            self.body(choice.orelse)
            self.emit(register, "vm.copy", self.arg(choice.orelse.result))
        self.code[jump] = vm.Goto(len(self.code))

    # --- operands ------------------------------------------------------------------------------------------------------

    def arg(self, atom: Atom) -> Arg:
        """Return an atom as an argument of an instruction. Shapes and symbolic numbers are computed into a new register."""
        match atom:
            case Var():
                return Reg(self.registers[atom])
            case Constant(data=data):
                return ConstantRef(self.program.constant(data))
            case ShapeValue(dims=dims):
                register = self._new()
                self.emit(register, "vm.make_shape", *map(self.dim, dims))
                return Reg(register)
            case ScalarValue(value=Dim() as dim, dtype=dtype):
                register = self._new()
                self.emit(register, "vm.make_scalar", self.dim(dim), Imm(str(dtype)))
                return Reg(register)
            case ScalarValue(value=value):
                assert not isinstance(value, Dim)
                return Imm(value)
            case FuncRef(name=name):
                return Imm(name)

    def dim(self, dim: Dim) -> Arg:
        ref = self.slots.of(dim)
        return ref if isinstance(ref, Slot) else Imm(ref)

    def _define(self, var: Var) -> int:
        self.registers[var] = self._new()
        return self.registers[var]

    def _new(self) -> int:
        self.num_registers += 1
        return self.num_registers - 1


def _scalars(prim: PrimFunc) -> list[ScalarParam]:
    return [p for p in prim.params if isinstance(p, ScalarParam)]


def _float_bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]
