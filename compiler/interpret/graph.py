"""The interpreter of the graph level. The NumPy functions of operators are in the table `INTERPRET` of compiler/ops/tables.py, and
`interpret.loops` runs loop nests. The interpreter checks values against the annotations of parameters, bindings, results and match_casts.
The interpreter is slow and simple; every optimisation is tested against its results.

Values are arrays (tensors), tuples of ints (shapes), Python or NumPy numbers (scalars), tuples of values, and `Closure`s (functions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.interpret.loops import InterpretError, run_prim, uninitialised
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError, CompileError
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.deduce import operator_type, require_library, type_of
from compiler.ir.graph.function import Body, If, Value
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallLibrary, CallTir, Copy, Launch, MakeTuple, MatchCast, TupleGet
from compiler.ir.loops.buffers import Buffer
from compiler.ir.module import IRModule
from compiler.ir.types import FuncType, ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type
from compiler.ops.tables import INTERPRET
from runtime.library import routine
from runtime.vm.matching import INT64, described, readable, scalar_word


class MismatchError(CompileError):
    """Raised for values that a program does not accept: a wrong number of arguments, a value that does not match its annotation, a variable
    outside its declared range, a dimension that divides by zero or does not fit 64 bits, operands that an operator refuses, or a tensor
    with a negative extent or outside the arena."""


@dataclass(frozen=True, slots=True)
class Closure:
    """A function of the module as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Runs the functions of a module."""

    module: IRModule

    def call(self, name: str, *args: Any) -> Any:
        """Call a function and return its result. Raise MismatchError for values that the function does not accept, and InterpretError if
        the function does something undefined."""
        func = self.module.graph(name)
        if len(args) != len(func.params):
            raise MismatchError(f"{name} takes {len(func.params)} arguments; it is called with {len(args)}")
        frame = _Frame(self)
        for i, (param, arg) in enumerate(zip(func.params, args, strict=True)):
            match_value(param.type, arg, frame.dims, f"{name}: parameter {i} ({param.name})", last=False)
        for i, (param, arg) in enumerate(zip(func.params, args, strict=True)):
            match_value(param.type, arg, frame.dims, f"{name}: parameter {i} ({param.name})")
            frame.values[param] = arg
        check_bounds(frame.dims, name)
        if func.arena is not None:
            frame.arena = uninitialised((frame.size(func.arena),), DType.U8)
        result = frame.body(func.body)
        match_value(func.result_type, result, frame.dims, f"{name}: return")
        return result


def value_of(dim: Dim, dims: Mapping[DimVar, int], place: str) -> int:
    """Return the value of a dimension. Raise MismatchError, which names `place`, if the dimension divides by zero, or does not fit 64
    bits."""
    try:
        value = dim.evaluate(dims)
    except ZeroDivisionError:
        raise MismatchError(f"{place}: {dim} divides by zero; declare the ranges of its variables") from None
    if value not in INT64:
        raise MismatchError(f"{place}: {dim} does not fit 64 bits; declare the ranges of its variables")
    return value


def match_value(type_: Type, value: Any, dims: dict[DimVar, int], place: str, *, last: bool = True) -> None:
    """Raise MismatchError, which names `place`, if a value does not match an annotation. If a dimension of the annotation is a single
    variable that is not in `dims`, add its value to `dims`. With `last`, `dims` must have all variables of expressions. Without `last`,
    skip expressions over unknown variables, because a later value may define these variables."""

    def match_dim(wanted: Dim, actual: int, where: str) -> None:
        if (var := wanted.var) is not None and var not in dims:
            dims[var] = actual
            return
        missing = [v for v in wanted.vars() if v not in dims]
        if missing and not last:
            return
        expected = value_of(wanted, dims, f"{place}: {where}")
        if expected != actual:
            raise MismatchError(f"{place}: {where} is {actual}, expected {readable(str(wanted), expected)}")

    match type_:
        case TensorType(shape=shape, dtype=dtype, ndim=ndim):
            if not isinstance(value, np.ndarray):
                raise MismatchError(f"{place}: expected a tensor, got {type(value).__name__}")
            if dtype is not None and value.dtype != dtype.numpy:
                raise MismatchError(f"{place}: element type is {value.dtype}, expected {dtype}")
            if ndim is not None and value.ndim != ndim:
                raise MismatchError(f"{place}: rank is {value.ndim}, expected {ndim}")
            for i, (wanted, actual) in enumerate(zip(shape or (), value.shape, strict=shape is not None)):
                match_dim(wanted, actual, f"dimension {i}")
        case ShapeType(dims=wanted_dims, ndim=ndim):
            if not isinstance(value, tuple) or (ndim is not None and len(value) != ndim):
                raise MismatchError(f"{place}: expected a shape of {ndim} dimensions, got {value!r}")
            if unfit := [n for n in value if not isinstance(n, int) or n not in INT64]:
                raise MismatchError(f"{place}: an entry is {described(unfit[0])}, expected a 64-bit integer")
            for i, (wanted, actual) in enumerate(zip(wanted_dims or (), value, strict=wanted_dims is not None)):
                match_dim(wanted, int(actual), f"entry {i}")
        case ScalarType(dtype=dtype, value=wanted):
            word = scalar_word(value, None if dtype is None else dtype.numpy)
            if word is None:
                if isinstance(value, int | float | np.generic):
                    raise MismatchError(f"{place}: expected a scalar of type {dtype}, got {described(value)}")
                raise MismatchError(f"{place}: expected a scalar, got {type(value).__name__}")
            if wanted is not None:
                match_dim(wanted, word, "the value")
        case TupleType(fields=fields):
            if not isinstance(value, tuple) or len(value) != len(fields):
                raise MismatchError(f"{place}: expected a tuple of {len(fields)} fields")
            for i, (field, item) in enumerate(zip(fields, value, strict=True)):
                match_value(field, item, dims, f"{place}, field {i}", last=last)
        case FuncType():
            if not isinstance(value, Closure):
                raise MismatchError(f"{place}: expected a function, got {type(value).__name__}")
        case ObjectType():
            return


def require_relations(call: Call, values: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    """Deduce the annotation of a call again, from the actual sizes of its operands. Raise MismatchError if the operator refuses operands of
    these sizes, as it does during compilation if all sizes are constants. NumPy alone would broadcast some operands that compiled code
    refuses."""
    op, stated = call.op, [type_of(a) for a in call.args]
    types = tuple(_type_of_value(value, type_) for value, type_ in zip(values, stated, strict=True))
    try:
        # Scalars keep their stated annotations: a deduction may refuse a literal that does not fit an element type, but compiled code
        # converts every other scalar.
        operator_type(op, tuple(s if isinstance(s, ScalarType) else t for s, t in zip(stated, types, strict=True)), attrs)
    except AnnotationError as error:
        raise MismatchError(str(error)) from None
    for relation in op.relations(types, attrs):
        if relation.is_violated:
            raise MismatchError(f"{op.name}: {relation.sentence}")


def _type_of_value(value: Any, stated: Type) -> Type:
    """Return the annotation of a value, in which all sizes are constants. Functions, and scalars whose annotation has no value, keep the
    stated annotation."""
    match value:
        case np.ndarray():
            return TensorType(tuple(Dim.of(n) for n in value.shape), DType.from_numpy(value.dtype))
        case tuple() if isinstance(stated, TupleType):
            return TupleType(tuple(_type_of_value(v, t) for v, t in zip(value, stated.fields, strict=True)))
        case tuple() if isinstance(stated, ShapeType) or all(isinstance(n, int) for n in value):
            return ShapeType(tuple(Dim.of(int(n)) for n in value))
        case tuple():
            return TupleType(tuple(_type_of_value(v, ObjectType()) for v in value))
        case _ if isinstance(stated, ScalarType) and stated.value is not None:
            return ScalarType(stated.dtype, Dim.of(int(value)))
        case _:
            return stated


def check_bounds(dims: dict[DimVar, int], place: str) -> None:
    """Raise MismatchError, which names `place`, if a variable is outside its declared range."""
    for var, value in dims.items():
        upper = value_of(var.upper, dims, f"{place}: the range of {var.name}") if isinstance(var.upper, Dim) else var.upper
        if value < var.lower or (upper is not None and value > upper) or value % var.multiple_of:
            declared = f"{var.lower}..{'' if upper is None else upper}" + (f" by {var.multiple_of}" if var.multiple_of > 1 else "")
            raise MismatchError(f"{place}: {var.name} is {value}, outside its declared range {declared}")


class _Frame:
    """The state of one call: the values of graph variables and of symbolic variables."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.values: dict[Var, Any] = {}
        self.dims: dict[DimVar, int] = {}
        self.arena: NDArray[Any] = np.zeros(0, np.uint8)  # planned memory; wrong plans, in which live tensors overlap, give wrong results

    def body(self, body: Body) -> Any:
        """Run the bindings of a body, check each value against its annotation, and return the result of the body."""
        for binding in body.bindings:
            value = self.values[binding.var] = self.value(binding.value)
            match_value(binding.var.type, value, self.dims, f"annotation of {binding.var.name!r}")
        return self.atom(body.result)

    def size(self, dim: Dim) -> int:
        """Return the value of a dimension, as `value_of` does."""
        return value_of(dim, self.dims, "a dimension")

    def atom(self, atom: Atom) -> Any:
        match atom:
            case Var():
                return self.values[atom]
            case Constant(data=data):
                return data
            case ShapeValue(dims=dims):
                return tuple(map(self.size, dims))
            case ScalarValue(value=value, dtype=dtype):
                number = self.size(value) if isinstance(value, Dim) else value
                return DType(dtype).numpy.type(number)
            case FuncRef(name=name):
                return Closure(name)

    def attributes(self, attrs: Mapping[str, Any], number: Callable[[int], Any] = int) -> dict[str, Any]:
        """Return the attributes with each symbolic dimension, also inside lists, replaced by `number(n)`, where n is its integer value.
        Lists become tuples."""

        def known(value: Any) -> Any:
            match value:
                case Dim() | DimVar():
                    return number(self.size(Dim.of(value)))
                case list() | tuple():
                    return tuple(known(item) for item in value)
                case _:
                    return value

        return {name: known(value) for name, value in attrs.items()}

    def value(self, value: Value) -> Any:
        """Compute the value of a binding. Raise MismatchError or InterpretError if the computation fails."""
        match value:
            case Var() | Constant() | ShapeValue() | ScalarValue() | FuncRef():
                return self.atom(value)
            case Copy(value=atom):
                return self.atom(atom)
            case Call(op=op, args=args, attrs=attrs):
                values, given = [self.atom(a) for a in args], {**op.attributes, **attrs}
                require_relations(value, values, self.attributes(given, Dim.of))  # a deduction may treat a Dim and a literal differently
                try:
                    with np.errstate(all="ignore"):
                        result = INTERPRET[op.name](*values, **self.attributes(given))
                except MemoryError as error:
                    raise InterpretError(f"{op.name}: {error}") from None
                return np.asarray(result) if isinstance(result, np.generic) else result  # NumPy turns tensors of rank 0 into scalars
            case CallTir():
                return self._call_tir(value)
            case CallLibrary(name=name, args=args, attrs=attrs):
                require_library(value)
                outs = _compute(name, [self.atom(a) for a in args], self.attributes(attrs))
                return outs[0] if len(outs) == 1 else outs
            case CallFunc(callee=callee, args=args):
                closure = self.atom(callee)
                return self.interpreter.call(closure.name, *map(self.atom, args))
            case MakeTuple(fields=fields):
                return tuple(map(self.atom, fields))
            case TupleGet(value=atom, index=index):
                return self.atom(atom)[index]
            case MatchCast(value=atom, type=type_, boundary=boundary):
                result, place = self.atom(atom), boundary or "match_cast"
                match_value(type_, result, self.dims, place, last=False)
                match_value(type_, result, self.dims, place)
                check_bounds(self.dims, place)
                return result
            case If(cond=cond, then=then, orelse=orelse):
                outer = dict(self.dims)
                result = self.body(then if bool(self.atom(cond)) else orelse)
                self.dims = outer  # a match_cast after the branch may define the same variables again
                return result
            case Alloc(type=type_, offset=offset):
                return self._allocate(type_, offset)
            case Launch():
                return self._launch(value)

    def _allocate(self, type_: Type, offset: Dim | None = None) -> Any:
        """Return a tensor at an offset of the arena, or in new memory. Raise MismatchError if an extent is negative, or if the tensor is
        not inside the arena."""
        assert isinstance(type_, TensorType) and type_.shape is not None and type_.dtype is not None
        shape = list(map(self.size, type_.shape))
        if min(shape, default=0) < 0:
            raise MismatchError(f"{type_} gets the extents {shape}, expected extents of at least 0")
        if offset is None:
            return uninitialised(shape, type_.dtype)
        begin, size = self.size(offset), prod(shape) * type_.dtype.num_bytes
        if begin < 0 or begin + size > len(self.arena):
            raise MismatchError(f"{type_} at {offset} = {begin} needs {size} bytes, but the arena has {len(self.arena)}")
        return np.ndarray(shape, type_.dtype.numpy, self.arena.data, begin)

    def _call_tir(self, call: CallTir) -> Any:
        """Run a loop nest on its operands, and return the outputs: one array, or a tuple. The nest writes an in-place output to a copy of
        the operand."""
        args = [self.atom(a) for a in call.args]
        outs: list[Any] = []
        for i, type_ in enumerate(call.out):
            reused = call.inplace[i] if call.inplace else None
            if reused is None:
                outs.append(self._allocate(type_))
            else:
                args[reused] = np.array(args[reused])  # a call does not change its operands: the nest writes to a copy
                outs.append(args[reused])
        self._run(call.func, [*args, *outs])
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _launch(self, launch: Launch) -> Any:
        """Run a loop nest or a host routine, and write its results into the outputs, which follow the inputs in the arguments."""
        args = [self.atom(a) for a in launch.args]
        if launch.library:
            num_inputs, attrs = len(routine(launch.func).inputs), self.attributes(launch.attrs)
            for array, out in zip(args[num_inputs:], _compute(launch.func, args[:num_inputs], attrs), strict=True):
                array[...] = out
            return ()
        self._run(launch.func, args)
        return ()

    def _run(self, name: str, args: Sequence[Any]) -> None:
        """Run the loop nest `name` on its operands and, after them, its outputs. Every index is checked."""
        prim = self.interpreter.module.prim(name)
        first_output = prim.params.index(prim.outputs[0]) if prim.outputs else len(prim.params)
        assert all(isinstance(p, Buffer) for p in prim.params[first_output:]), "outputs come last"
        try:
            run_prim(prim, args)
        except InterpretError as error:
            raise InterpretError(f"loop nest {name!r}: {error}") from None


def _compute(name: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Call the host routine `name`, which the virtual machine calls too."""
    known = routine(name)
    return known.compute(*inputs, *(attrs[a] for a in known.attributes))
