"""Plan the memory of one of our functions with TVM Relax, the peer of `python -m tests.lab compiler --peer tvm`.

A memory plan depends on shapes, bounds and lifetimes, but not on what a call computes. So the function, before the passes that make memory
explicit, is rebuilt in Relax with the same calls in the same order. Each call becomes a call of an external routine in destination-passing
style with the same results. TVM's own passes then make and plan the allocations, and this module sums their sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from compiler.ir.dims import Atom as DimAtom
from compiler.ir.dims import Dim, DimVar, FloorDiv, Max, Min, Mod
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.function import Function, Value
from compiler.ir.graph.values import Call, CallLibrary, CallTir, Copy, MakeTuple, MatchCast, TupleGet
from compiler.ir.types import TensorType, Type, binders_of
from compiler.ops.tables import VIEWS
from tests.lab.peer import installed


def planned_bytes(func: Function) -> int:
    """Return the bytes that TVM allocates for a call of `func`, enough for all sizes within the bounds of its variables. The result is
    included, as in our plan."""
    tvm, relax = (installed(module, "tvm", "apache-tvm") for module in ("tvm", "tvm.relax"))
    passes = relax.transform
    lower = tvm.transform.Sequential([passes.RemovePurityChecking(), passes.CallTIRRewrite(), passes.StaticPlanBlockMemory()])
    planned = lower(_Translation(tvm, relax).module(func))["step"]
    values = [binding.value for block in planned.body.blocks for binding in block.bindings]
    return sum(_allocated(value) for value in values if isinstance(value, relax.Call))


def _allocated(call: Any) -> int:
    """Return the bytes of an allocation. Storage is counted in bytes. A returned tensor of constant shape has no storage, so its elements
    are counted."""
    match getattr(call.op, "name", None):
        case "relax.memory.alloc_storage":
            item_bytes = 1
        case "relax.builtin.alloc_tensor":
            item_bytes = call.args[1].value.itemsize
        case _:
            return 0
    extents = call.args[0].values
    if not all(hasattr(extent, "value") for extent in extents):
        raise ValueError(f"TVM plans {' * '.join(map(str, extents))} elements, which is not a constant; give the variables upper bounds")
    return item_bytes * math.prod(int(extent) for extent in extents)


@dataclass(slots=True)
class _Translation:
    tvm: Any
    relax: Any
    variables: dict[DimVar, Any] = field(default_factory=dict[DimVar, Any])
    # For each of our variables: the Relax variable, or, if ours is a tuple, the list of the variables of its fields.
    known: dict[Var, Any] = field(default_factory=dict[Var, Any])

    def module(self, func: Function) -> Any:
        own = dict.fromkeys(v for p in func.params for v in binders_of(p.type))
        cast = {v: None for b in func.body.bindings if isinstance(b.value, MatchCast) for v in binders_of(b.value.type) if v not in own}
        for var in (*own, *cast):
            # Relax identifies bounds by name, and our names are not unique.
            self.variables[var] = self.tvm.tirx.Var(f"{var.name}_{var.serial}", "int64")
        params = [self.relax.Var(p.name, self._type(p.type)) for p in func.params]
        self.known.update(zip(func.params, params, strict=True))
        if cast:  # TVM accepts bounds only for variables of the signature, so a parameter is added for the variables that a cast defines
            params.append(self.relax.Var("cast", self.relax.ShapeType([self.variables[v] for v in cast])))
        uppers = {self.variables[v].name: v.upper for v in self.variables if isinstance(v.upper, int)}
        attrs = {"tir_var_upper_bound": uppers, "relax.memory_plan_dynamic_func_output": True}
        builder = self.relax.BlockBuilder()
        with builder.function("step", params, attrs=attrs, pure=False):
            for binding in func.body.bindings:
                self.known[binding.var] = self._value(builder, binding.var, binding.value)
            builder.emit_func_output(self._atom(func.body.result))
        return builder.get()

    def _value(self, builder: Any, var: Var, value: Value) -> Any:
        match value:
            case CallTir(func=name, args=args, out=out, inplace=inplace):
                return self._call(builder, name, args, out, inplace or (None,) * len(out))
            case CallLibrary(name=name, args=args, out=out):
                return self._call(builder, name, args, out, (None,) * len(out))
            case Call(op=op, args=args) if op.name in VIEWS:
                return builder.emit(self.relax.op.reshape(self._atom(args[0]), self._shape(var.type)))
            case MatchCast(value=Var() as atom, type=TensorType() as type_):
                return builder.match_cast(self._atom(atom), self._type(type_))
            case MatchCast(value=ScalarValue()):
                return None  # a check of numbers has no value that takes memory
            case Copy(value=atom):
                return self._atom(atom)
            case MakeTuple(fields=fields):
                return [self._atom(f) for f in fields]
            case TupleGet(value=atom, index=index):
                return self._atom(atom)[index]
            case _:
                raise ValueError(f"{var.name} is a {type(value).__name__}, expected calls of loop nests, views, casts and tuples")

    def _call(self, builder: Any, name: str, args: tuple[Atom, ...], out: tuple[Type, ...], inplace: tuple[int | None, ...]) -> Any:
        """Emit an external call. Only variables are passed, since operands of other kinds take no memory."""
        passed = [self._atom(a) for a in args if isinstance(a, Var)]
        fresh = [self._type(t) for t, reused in zip(out, inplace, strict=True) if reused is None]
        routine = self.relax.ExternFunc(name)
        if fresh:
            made = builder.emit(self.relax.call_dps_packed(routine, self.relax.Tuple(passed), fresh))
            new = iter([made] if len(fresh) == 1 else [builder.emit(self.relax.TupleGetItem(made, i)) for i in range(len(fresh))])
        else:
            builder.emit(self.relax.Call(routine, passed, ty_args=[self.relax.TupleType([])]))
            new = iter(())
        results = [next(new) if reused is None else self._atom(args[reused]) for reused in inplace]
        return results[0] if len(results) == 1 else results

    def _atom(self, atom: Atom) -> Any:
        if not isinstance(atom, Var):
            raise ValueError(f"an operand of a call is {atom}; expected a variable")
        return self.known[atom]

    def _type(self, type_: Type) -> Any:
        assert isinstance(type_, TensorType) and type_.dtype is not None
        return self.relax.TensorType(self._shape(type_), type_.dtype.numpy.name)

    def _shape(self, type_: Type) -> list[Any]:
        assert isinstance(type_, TensorType) and type_.shape is not None
        return [self._dim(d) for d in type_.shape]

    def _dim(self, dim: Dim) -> Any:
        """Translate a dimension. The operators `+` and `*` work on numbers and on Relax expressions alike."""
        return sum(c * math.prod(map(self._dim_atom, factors)) for c, factors in dim.terms)

    def _dim_atom(self, atom: DimAtom) -> Any:
        tirx = self.tvm.tirx
        match atom:
            case DimVar():
                return self.variables[atom]
            case FloorDiv(numerator=x, divisor=d):
                return tirx.floordiv(self._dim(x), self._dim(d))
            case Mod(numerator=x, divisor=d):
                return tirx.floormod(self._dim(x), self._dim(d))
            case Min(operands=operands):
                return reduce(tirx.min, map(self._dim, operands))
            case Max(operands=operands):
                return reduce(tirx.max, map(self._dim, operands))
