"""Fixtures that run one call of an operator as a program, before and after the call becomes a loop nest, and compare the results with
NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.interpret.graph import Interpreter
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal
from compiler.ir.graph.atoms import Atom, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.module import IRModule
from compiler.ir.op import OpDef
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.types import TensorType, TupleType, Type
from compiler.ir.verify.module import verify
from compiler.ops.tables import INTERPRET
from compiler.passes.legalize import legalize
from runtime.executable import Executable
from runtime.session import Session

# Allowed error, relative to the largest element. It covers rounding to the element type and a different order of summation.
TOLERANCE = {DType.F32: 3e-6, DType.F16: 2e-3, DType.BF16: 1.6e-2, DType.E4M3: 2.5e-1}


def close(actual: Any, expected: Any, *, rounds: bool = False) -> None:
    """Require equal types, shapes and values. Floats may differ by TOLERANCE, relative to the largest element. If the program `rounds` its
    operands to integers, they may differ by a thousandth of the largest element."""
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple) and len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            close(a, e, rounds=rounds)
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    dtype = DType.from_numpy(expected.dtype)
    if not dtype.is_float:
        np.testing.assert_array_equal(actual, expected)
        return
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    scale = np.max(np.abs(e), initial=0.0, where=np.isfinite(e))
    relative, absolute = (0.0, 1e-3) if rounds else (TOLERANCE[dtype], TOLERANCE[dtype] * 0.1)
    np.testing.assert_allclose(a, e, rtol=relative, atol=absolute * scale)


def operand(value: Any, shape: str | None, dims: dict[str, DimVar], name: str) -> Atom:
    """Return an operand of a program. An array becomes a parameter, with a symbolic dimension for each letter of `shape`. Any other value
    becomes a literal."""
    match value:
        case np.ndarray():
            letters = shape.split() if shape is not None else [str(n) for n in value.shape]
            extents = [Dim.of(int(s)) if s.isdigit() else Dim.of(dims.setdefault(s, DimVar(s))) for s in letters]
            assert len(extents) == value.ndim, (shape, value.shape)
            return Var(name, TensorType(tuple(extents), DType.from_numpy(value.dtype)))
        case tuple():
            return ShapeValue(tuple(Dim.of(dims.setdefault(v, DimVar(v))) if isinstance(v, str) else Dim.of(v) for v in value))
        case bool():
            return ScalarValue(value, DType.BOOL)
        case int():
            return ScalarValue(Dim.of(value), DType.I64)
        case float():
            return ScalarValue(value, DType.F32)
        case _:
            return value


def program(op: OpDef, atoms: list[Atom], attrs: dict[str, Any]) -> IRModule:
    builder = Builder()
    with builder.function("main", [a for a in atoms if isinstance(a, Var)]):
        builder.returns(builder.call(op, *atoms, **attrs))
    return builder.finish()


def has_type(value: Any, type_: Type, dims: dict[DimVar, int]) -> None:
    """Require that a computed value has the type that was deduced for it."""
    match type_:
        case TensorType(shape=shape, dtype=dtype, ndim=ndim):
            assert dtype is None or value.dtype == dtype.numpy
            assert ndim is None or value.ndim == ndim
            if shape is not None:
                assert value.shape == tuple(d.evaluate(dims) for d in shape)
        case TupleType(fields=fields):
            for item, field in zip(value, fields, strict=True):
                has_type(item, field, dims)
        case _:
            pass


@pytest.fixture
def run(compiled_once: Callable[..., Executable]) -> Callable[..., Any]:
    """`run(op, *values, shapes="n k, m k", **attrs)` computes one call of the operator and returns its value. It requires that the deduced
    annotation holds, that the loop nest computes the same value, and that both programs equal what is parsed from their texts. `shapes`
    names symbolic dimensions, with one entry per tensor. An attribute may be a function of the dimensions. With `compiled=True`, the
    machine code must compute the same value, too."""

    def call(op: OpDef, *values: Any, shapes: str | None = None, compiled: bool = False, **attrs: Any) -> Any:
        given: list[str | None] = [None if s is None else s.strip() for s in shapes.split(",")] if shapes is not None else []
        dims: dict[str, DimVar] = {}
        atoms: list[Atom] = []
        for value in values:
            shape = given.pop(0) if isinstance(value, np.ndarray) and given else None
            atoms.append(operand(value, shape, dims, f"x{len(atoms)}"))
        arrays = [v for v in values if isinstance(v, np.ndarray)]
        module = program(op, atoms, {k: v(dims) if callable(v) else v for k, v in attrs.items()})
        expected = Interpreter(module).call("main", *arrays)
        known = {
            d.var: n
            for v, a in zip(arrays, (a for a in atoms if isinstance(a, Var)), strict=True)
            for d, n in zip(type_of(a).shape or (), v.shape, strict=True)
            if d.var is not None
        }
        has_type(expected, module.graph("main").result_type, known)
        legal = legalize(module)
        verify(legal)
        for stage in (module, legal):
            assert_equal(parse(print_module(stage)), stage)
        before = [v.copy() for v in arrays]
        close(Interpreter(legal).call("main", *arrays), expected)
        for array, copy in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, copy)
        if compiled:
            session = Session(compiled_once(module))
            close(session.call("main", *before), expected)
            session.close()
        return expected

    return call


@pytest.fixture
def meaning() -> Callable[..., Any]:
    """Return a function that evaluates the NumPy definition of an operator, without building a program."""
    return lambda op, *values, **attrs: INTERPRET[op.name](*values, **{**op.attributes, **attrs})


@pytest.fixture
def deduced() -> Callable[..., Type]:
    """`deduced(op, *types, **attrs)` returns the annotation of a call with operands of these types."""

    def call(op: OpDef, *types: Type, **attrs: Any) -> Type:
        module = program(op, [Var(f"x{i}", t) for i, t in enumerate(types)], attrs)
        return module.graph("main").body.bindings[-1].var.type

    return call


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
