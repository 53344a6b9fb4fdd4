"""Random programs in which one annotation is false, at one of the boundaries that `compiler/passes/check_facts.py` lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Atom, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Body, Function, If, Value
from compiler.ir.graph.values import CallFunc, CallTir, MakeTuple, MatchCast
from compiler.ir.graph.visit import fresh_function, map_operands
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.write import Kernel
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.prove import prove_eq, prove_ne
from compiler.ir.types import FuncType, ShapeType, TensorType, TupleType, Type, binders_of
from tests.compiler.random_programs.programs import Program, Unfit

Lie = Callable[[Builder, Value, Var, TensorType, "tuple[DimVar, ...]"], Var]


def falsified(program: Program, boundary: str, random: Random) -> IRModule:
    """Return a copy of the program in which one value has a false shape at `boundary`. All later calls rely on the false shape."""
    main = program.module.graph("main")
    dims = tuple(dict.fromkeys(v for p in main.params for v in binders_of(p.type)))
    targets = [b for b in main.body.bindings if isinstance(b.var.type, TensorType) and b.var.type.shape and b.var.type.dtype]
    if not targets or any(isinstance(b.value, If) for b in main.body.bindings):
        raise Unfit
    target = random.choice(targets)
    builder = Builder(program.module)
    atoms: dict[Atom, Atom] = {}
    with builder.function("main", main.params, num_inputs=main.num_inputs):
        for binding in main.body.bindings:
            value = map_operands(binding.value, lambda a: atoms.get(a, a))
            if binding is target and boundary in LIES:
                stated = other(binding.var.type, dims, random)
                atoms[binding.var] = LIES[boundary](builder, value, binding.var, stated, dims)
            else:
                atoms[binding.var] = builder.emit(value, binding.var.name)
        result = atoms.get(main.body.result, main.body.result)
        # The function also returns the value, because the compiler would remove a call whose result is unused.
        builder.returns(builder.emit(MakeTuple((result, atoms[target.var]))) if boundary in LIES else result)
    module = builder.finish()
    if boundary != "return":
        return module
    made = module.graph("main")
    assert isinstance(made.result_type, TupleType)
    fields = list(made.result_type.fields)
    wrong = random.choice([i for i, field in enumerate(fields) if isinstance(field, TensorType) and field.shape] or [0])
    fields[wrong] = other(fields[wrong], dims, random)
    return module.update({"main": replace(made, result_type=TupleType(tuple(fields)))})


def other(type_: Type, dims: tuple[DimVar, ...], random: Random) -> TensorType:
    """Return the type with one extent replaced. The compiler can prove neither that the new extent equals the old one nor that it
    differs."""
    if not isinstance(type_, TensorType) or not type_.shape:
        raise Unfit
    axis = random.randrange(len(type_.shape))
    own, var = type_.shape[axis], Dim.of(random.choice(dims))
    choices = [var, var + 5, 64 * var, own + var, 3 * own, 64 * own, own - var, Dim.of(1024)]
    unknown = [dim for dim in choices if not prove_eq(dim, own) and not prove_ne(dim, own)]
    if not unknown:
        raise Unfit
    return TensorType((*type_.shape[:axis], random.choice(unknown), *type_.shape[axis + 1 :]), type_.dtype)


# --- false annotations ---------------------------------------------------------------------------------------------------


def annotation(builder: Builder, value: Value, var: Var, stated: TensorType, _: tuple[DimVar, ...]) -> Var:
    liar = Var(var.name, stated)
    builder.keep(Binding(liar, value))
    return liar


def match_cast(builder: Builder, value: Value, var: Var, stated: TensorType, _: tuple[DimVar, ...]) -> Var:
    return builder.emit(MatchCast(builder.emit(value), stated))


def returned(builder: Builder, value: Value, var: Var, stated: TensorType, dims: tuple[DimVar, ...]) -> Var:
    """Call a function whose signature promises another shape than the function returns."""
    x = builder.emit(value)
    return builder.emit(CallFunc(_identity(builder, x, stated, dims), (x, _sizes(dims))))


def called(builder: Builder, value: Value, var: Var, stated: TensorType, dims: tuple[DimVar, ...]) -> Var:
    """Call a function with a function argument. The declared type of that argument promises another result shape than the passed function
    returns."""
    x = builder.emit(value)
    assert isinstance(x.type, TensorType)
    honest = _identity(builder, x, x.type, dims)
    parameters = Var("f", FuncType((x.type, _sizes_type(dims)), stated)), Var("x", x.type), Var("sizes", _sizes_type(dims))
    inner = Builder(builder.finish())
    with inner.function("apply", parameters):
        inner.returns(inner.emit(CallFunc(parameters[0], parameters[1:])))
    name = builder.add(builder.fresh_name("apply"), fresh_function(inner.finish().graph("apply")))
    return builder.emit(CallFunc(FuncRef(name), (honest, x, _sizes(dims))))


def made(builder: Builder, value: Value, var: Var, stated: TensorType, _: tuple[DimVar, ...]) -> Var:
    """Call a loop nest, with an annotation of its output whose extents differ from those that the nest computes."""
    x = builder.emit(value)
    return builder.emit(CallTir(_copy(builder, x, 1), (x,), (stated,)))


def read(builder: Builder, value: Value, var: Var, stated: TensorType, _: tuple[DimVar, ...]) -> Var:
    """Call a loop nest that requires two operands of equal extents, with operands of different extents."""
    x = builder.emit(value)
    assert stated.shape is not None and stated.dtype is not None
    whole = builder.call(OPS["full"], ShapeValue(stated.shape), ScalarValue(Dim.of(0)), dtype=stated.dtype)
    return builder.emit(CallTir(_copy(builder, x, 2), (whole, x), (stated,)))


LIES: dict[str, Lie] = {
    "annotation": annotation,
    "match_cast": match_cast,
    "call": returned,
    "call of a value": called,
    "call_tir output": made,
    "call_tir operand": read,
}
BOUNDARIES = (*LIES, "return", "entry")  # at "entry", an argument of the call has the wrong shape; no annotation is false


def _sizes(dims: tuple[DimVar, ...]) -> ShapeValue:
    return ShapeValue(tuple(map(Dim.of, dims)))


def _sizes_type(dims: tuple[DimVar, ...]) -> ShapeType:
    return ShapeType(tuple(map(Dim.of, dims)))


def _identity(builder: Builder, x: Var, result: TensorType, dims: tuple[DimVar, ...]) -> FuncRef:
    params = Var("x", x.type), Var("sizes", _sizes_type(dims))
    func = Function(params, Body((), params[0]), result)
    return FuncRef(builder.add(builder.fresh_name("identity"), fresh_function(func)))


def _copy(builder: Builder, x: Var, num_operands: int) -> str:
    """Add a loop nest that declares equal extents for all operands and copies its last operand."""
    assert isinstance(x.type, TensorType) and x.type.shape is not None and x.type.dtype is not None
    shape = tuple(Dim.of(DimVar(f"a{i}")) for i in range(len(x.type.shape)))
    *operands, out = (Buffer(name, shape, x.type.dtype) for name in "ABC"[: num_operands + 1])
    k = Kernel()
    copy, last = k.arrays(out, operands[-1])
    with k.nest(shape) as at:
        copy[at] = last[at]
    return builder.add(builder.fresh_name("copy"), PrimFunc((*operands, out), 1, k.body()))
