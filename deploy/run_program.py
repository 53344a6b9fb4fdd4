"""Run a program on random inputs, and compare its result with the interpreter's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.graph.atoms import Var
from compiler.ir.module import IRModule
from compiler.ir.types import ScalarType, ShapeType, TensorType, TupleType, Type, vars_of
from runtime.session import Session

INTEGERS = 8  # random integers are less than this, so that they can index small tables


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a compiled program, and the result of the interpreter for the same inputs."""

    result: Any
    expected: Any | None  # result of the interpreter, or None if it was not run

    @property
    def largest_error(self) -> float:
        """The largest error of any element, relative to the largest finite element that the interpreter expects in its tensor. It is
        infinite if a shape or an element type is wrong, or if only one of two elements is NaN. It needs the interpreter's result."""
        return max((_error(a, e) for a, e in zip(leaves(self.result), leaves(self.expected), strict=True)), default=0.0)


def run_program(
    module: IRModule, entry: str, dims: Mapping[str, int], *, seed: int = 0, check: bool = False, check_bounds: bool = False
) -> Ran:
    """Compile and call the function `entry` with random arguments. `dims` has the values of the function's dimensions, and `seed` decides
    the arguments. With `check` or `check_bounds`, interpret the program first, including its hand-written loop nests. The interpreter
    raises an error for an index outside its buffer; compiled code would access other memory. Raise CompileError if there is no such
    function, if `dims` lacks a dimension or has an unknown one, or if no random value can be drawn for a parameter."""
    if entry not in module.graph_functions:
        raise CompileError(f"there is no function {entry!r}; known: {', '.join(module.graph_functions) or 'none'}")
    func = module.graph(entry)
    random = np.random.default_rng(seed)
    values = _values(func.params, dims)
    arguments = {p: _random(p, p.type, values, random) for p in func.params}
    interpreted = check or check_bounds
    expected = Interpreter(module).call(entry, *(_own(arguments[p]) for p in func.params)) if interpreted else None
    executable = compile_module(module)
    num_inputs = len(func.params) - len(func.weights)
    session = Session(executable)
    try:
        bind_values(session, executable, entry, {w.name: arguments[w] for w in func.weights})
        result = session.call(entry, *(_own(arguments[p]) for p in func.params[:num_inputs]))
    finally:
        session.close()
    return Ran(result, expected)


def leaves(value: Any) -> list[NDArray[Any]]:
    """Return the arrays of a result in order: tuples are flattened, and a number becomes an array without axes."""
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [np.asarray(value)]


def _values(params: tuple[Var, ...], dims: Mapping[str, int]) -> dict[DimVar, int]:
    """Return the values of all variables in the types of the parameters. Raise CompileError if a variable has no value, or if `dims` has a
    name that is no variable."""
    variables = dict.fromkeys(v for p in params for v in vars_of(p.type))
    known = {v.name for v in variables}
    if unknown := sorted(set(dims) - known):
        raise CompileError(f"the program has no dimension {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}")
    if missing := sorted(known - set(dims)):
        raise CompileError(f"dimension {', '.join(missing)} has no value; give one with {' '.join(f'--dim {m}=7' for m in missing)}")
    return {v: dims[v.name] for v in variables}


def _random(param: Var, type_: Type, dims: Mapping[DimVar, int], random: np.random.Generator) -> Any:
    """Draw a value of a type. Raise CompileError, which names the parameter, if the type leaves the shape or the element type open, or if
    there can be no array of the shape, because a size is negative or divides by zero, or the array does not fit into memory."""
    match type_:
        case TensorType(shape=shape, dtype=dtype) if shape is not None and dtype is not None:
            sizes = [_evaluated(param, d, dims) for d in shape]
            try:
                return _array(sizes, dtype, random)
            except (ValueError, MemoryError) as error:
                raise CompileError(f"parameter {param.name} cannot have the shape {sizes}: {error}; give --dim other values") from error
        case ShapeType(dims=wanted) if wanted is not None:
            return tuple(_evaluated(param, d, dims) for d in wanted)
        case ScalarType(value=Dim() as value):
            return _evaluated(param, value, dims)
        case ScalarType(dtype=dtype) if dtype is not None:
            return _array([], dtype, random).item()
        case TupleType(fields=fields):
            return tuple(_random(param, f, dims, random) for f in fields)
        case _:
            raise CompileError(
                f"parameter {param.name} is {type_}, for which no random value can be drawn; state its shape and element type"
            )


def _evaluated(param: Var, dim: Dim, dims: Mapping[DimVar, int]) -> int:
    """Return the value of a size. Raise CompileError, which names the parameter, if the size divides by zero."""
    try:
        return dim.evaluate(dims)
    except ZeroDivisionError as error:
        raise CompileError(f"parameter {param.name} has the size {dim}, which divides by zero; give --dim other values") from error


def _array(shape: list[int], dtype: DType, random: np.random.Generator) -> NDArray[Any]:
    if dtype.is_float:
        return np.asarray(random.normal(size=shape)).astype(dtype.numpy)
    return np.asarray(random.integers(0, 2 if dtype is DType.BOOL else INTEGERS, shape)).astype(dtype.numpy)


def _own(value: Any) -> Any:
    """Copy an argument that is an array, because a program may change its arguments in place."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference between two arrays relative to the largest finite magnitude that is expected. Two elements that are NaN
    count as equal. Return infinity if shapes or element types differ, or if only one of two elements is NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    if same.all():
        return 0.0
    scale = max(np.max(np.abs(e), initial=0.0, where=np.isfinite(e)), np.finfo(np.float32).tiny)
    worst = np.max(np.abs(np.subtract(a, e, out=np.zeros_like(a), where=~same))) / scale
    return float("inf") if np.isnan(worst) else float(worst)
