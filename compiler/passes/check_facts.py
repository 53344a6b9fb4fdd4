"""Prove every symbolic fact at compile time, or check it at run time: exactly once, at a named boundary.

    boundary     the fact                                                          its check
    entry        arguments have the annotations of the parameters,                 the virtual machine, in `runtime/vm/matching.py`
                 variables lie within their ranges
    match_cast   the annotation that the program states                            the virtual machine, likewise
    return       the result has the annotation of the signature, on which          a match_cast
                 callers rely
    call         the result of a function that is called as a value (the entry     a match_cast
                 of the callee checks the arguments)
    call_tir     operands and outputs have the extents and types that the loop     match_casts
                 nest declares, its variables lie within their ranges
    call_library operands are tensors                                              match_casts
    annotation   a value has the annotation that its binding states                a match_cast; branches that do not match are refused
    operator     the relations that the operator declares hold                     match_casts
                 operands agree                                                    match_casts, from the operator's legalization
    shape        no extent of a new tensor is negative                             a match_cast of the extent

Before: annotations may promise more than deduction proves. After: deduction proves every annotation, so later passes can rely on
annotations. A fact that is proved needs no check. `legalize` emits the checks of operators through the same `require_` functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.deduce import deduce, type_of
from compiler.ir.graph.function import Binding, Block, Body, Function, If, Value
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallLibrary, CallTir, Launch, MatchCast
from compiler.ir.graph.visit import map_bindings, operands
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.module import IRModule
from compiler.ir.prove import prove_eq, prove_le
from compiler.ir.subsume import Level, subsumes
from compiler.ir.types import FuncType, ObjectType, ScalarType, TensorType, TupleType, Type, dims_of
from compiler.ir.verify.graph import unjoined

Emit = Callable[[MatchCast], Var]  # adds a check to the program, and returns the checked value

# --- requirements of a boundary ----------------------------------------------------------------------------------------


def require_type(emit: Emit, atom: Atom, wanted: Type, boundary: str) -> Atom:
    """Return the atom if its annotation implies `wanted`. Otherwise emit a match_cast of the atom to `wanted`, whose messages name
    `boundary`, and return its result."""
    proved = subsumes(wanted, type_of(atom)).level is Level.PASS
    return atom if proved else emit(MatchCast(atom, wanted, boundary))


def require_tensors(emit: Emit, atoms: Sequence[Atom], boundary: str) -> tuple[Atom, ...]:
    """Require that each atom is a tensor, of any shape and element type. Return the atoms, or the results of their checks."""
    return tuple(require_type(emit, atom, TensorType(None, None), f"{boundary}, operand {i}") for i, atom in enumerate(atoms))


def require_equal(emit: Emit, wanted: Dim, given: Dim, boundary: str) -> None:
    """Require that `given` equals `wanted`. Emit a check unless that is proved."""
    if not prove_eq(wanted, given):
        emit(MatchCast(ScalarValue(given), ScalarType(DType.I64, wanted), boundary))


def require_broadcast(emit: Emit, wanted: Dim, given: Dim, boundary: str) -> None:
    """Require that the extent `given` is 1 or `wanted`."""
    differs = dim_min(1, dim_max(given - 1, 1 - given))  # 0 if `given` is 1, else 1
    require_equal(emit, 1 + (wanted - 1) * differs, given, boundary)


def require_extents(emit: Emit, type_: Type, known: Sequence[Dim], boundary: str) -> None:
    """Require that no extent of a tensor, or of the tensors in a tuple, is negative. `known` are extents of existing tensors, which are
    never negative."""
    for dim in dict.fromkeys(_extents(type_)):
        if dim not in known and not prove_le(0, dim):
            require_equal(emit, dim_max(dim, 0), dim, boundary)


def require_range(emit: Emit, var: DimVar, value: Dim, found: dict[DimVar, Dim], boundary: str, *, extent: bool) -> None:
    """Require that the value of a variable of a loop nest is in its range. `found` has the values of all variables of the nest. `extent`
    says that the value is an extent of a tensor, which is never negative."""
    upper = var.upper.substitute(found) if isinstance(var.upper, Dim) else var.upper
    above = (extent and var.lower <= 0) or prove_le(var.lower, value)
    below = upper is None or prove_le(value, upper)
    if not (above and below and prove_eq(value % var.multiple_of, 0)):
        declared = DimVar(var.name, var.lower, upper, var.multiple_of)
        emit(MatchCast(ScalarValue(value), ScalarType(DType.I64, Dim.of(declared)), boundary))


# --- the pass ------------------------------------------------------------------------------------------------------------


def check_facts(module: IRModule) -> IRModule:
    functions = {name: _checked(module, func) for name, func in module.graph_functions.items()}
    changed = {name: func for name, func in functions.items() if func is not module.functions[name]}
    return module.update(changed) if changed else module


def _checked(module: IRModule, func: Function) -> Function:
    def signature(name: str) -> FuncType:
        return module.graph(name).type

    func = map_bindings(func, lambda binding: _Checks(module).of(binding))
    result = func.body.result
    if subsumes(func.result_type, type_of(result, signature)).level is Level.PASS:
        return func
    checked = Var("result", func.result_type)
    last = Block((Binding(checked, MatchCast(result, func.result_type, "return")),))
    return replace(func, body=Body((*func.body.blocks, last), checked))


@dataclass(slots=True)
class _Checks:
    """Collects the checks that must precede one binding."""

    module: IRModule
    before: list[Binding] = field(default_factory=list[Binding])

    def of(self, binding: Binding) -> list[Binding]:
        """Return the checks of the binding's operands and extents, the binding, and the check of its annotation, in this order."""
        var, value = binding.var, binding.value
        match value:
            case CallTir(func=name, out=out):
                value = self._call(value, self.module.prim(name), out)
            case Launch(func=name, library=False):
                value = self._call(value, self.module.prim(name), ())
            case Alloc(type=type_):
                require_extents(self._emit, type_, (), f"shape of {var.name!r}")
            case Call():
                self._related(value, var)
                require_extents(self._emit, var.type, _existing(value), f"shape of {var.name!r}")
            case CallLibrary(name=name, args=args):
                made = require_tensors(self._emit, args, f"call_library {name}")
                value = value if made == args else replace(value, args=made)
                require_extents(self._emit, var.type, _existing(value), f"shape of {var.name!r}")
            case _:
                pass
        made = binding if value is binding.value else Binding(var, value)
        return [*self.before, *self._annotated(made)]

    def _related(self, call: Call, var: Var) -> None:
        """Check the relations on which the operator's lowering relies."""
        args = tuple(type_of(a, lambda name: self.module.graph(name).type) for a in call.args)
        for relation in call.op.relations(args, {**call.op.attributes, **call.attrs}):
            require_equal(self._emit, relation.expected, relation.given, f"{call.op.name} {var.name!r}, {relation.sentence}")

    def _emit(self, cast: MatchCast) -> Var:
        var = Var("checked", cast.type)
        self.before.append(Binding(var, cast))
        return var

    def _annotated(self, binding: Binding) -> list[Binding]:
        """Return the binding, followed by a check of its annotation if the annotation is not proved. Raise AnnotationError if a branch of
        an If does not match the annotation."""
        var, value = binding.var, binding.value
        if isinstance(value, If) and (problem := unjoined(self.module, var, value)):
            raise AnnotationError(f"binding {var.name!r}: {problem}")
        if isinstance(value, If | Launch):  # a launch has no value
            return [binding]
        deduced, boundary = deduce(value, lambda name: self.module.graph(name).type, set()), f"annotation of {var.name!r}"
        if isinstance(value, CallTir):
            boundary = f"call_tir @{value.func}, result {var.name!r}"
        if isinstance(value, CallFunc) and isinstance(value.callee, Var):
            # Nothing checks that a function that is passed as a value returns what its annotation states, so the result counts as unknown.
            deduced, boundary = ObjectType(), f"result {var.name!r} of calling {value.callee.name!r}"
        if subsumes(var.type, deduced).level is Level.PASS:
            return [binding]
        unchecked = Var(var.name, deduced)
        return [Binding(unchecked, value), Binding(var, MatchCast(unchecked, var.type, boundary))]

    # --- calls of loop nests -------------------------------------------------------------------------------------------

    def _call(self, call: CallTir | Launch, prim: PrimFunc, out: tuple[Type, ...]) -> CallTir | Launch:
        """Return a call of a loop nest whose operands and outputs are proved or checked to be as the nest declares. `out` is empty for a
        launch, whose operands include the outputs."""
        params = [*(p for p in prim.params if p not in prim.outputs), *prim.outputs] if out else list(prim.params)
        args = list(call.args)
        places = [f"{'call_tir' if isinstance(call, CallTir) else 'launch'} @{call.func}, {p.name}" for p in params]
        types: list[Type] = [*map(type_of, args), *out]
        found = self._integers(params, args, places)
        extents = self._extents(params, types, found)
        for i, param in enumerate(params[: len(args)]):
            if isinstance(param, Buffer):
                args[i] = require_type(self._emit, args[i], _wanted(param, found), places[i])
            elif isinstance(param, ScalarParam):
                args[i] = require_type(self._emit, _converted(args[i], param.dtype), ScalarType(param.dtype), places[i])
        made = tuple(self._output(param, type_, found) for param, type_ in zip(params[len(args) :], out, strict=True))
        for i, type_ in enumerate(made):
            reused = call.inplace[i] if isinstance(call, CallTir) and call.inplace else None
            if reused is None:
                require_extents(self._emit, type_, _existing(call), places[len(args) + i])
            else:
                args[reused] = require_type(self._emit, args[reused], type_, places[reused])
        for var in prim.dim_vars:
            require_range(self._emit, var, found[var], found, f"call @{call.func}, {var.name}", extent=var in extents)
        if isinstance(call, CallTir) and any(a is not b for a, b in zip(made, out, strict=True)):
            call = replace(call, out=made)
        same = all(a is b for a, b in zip(args, call.args, strict=True))
        return call if same else replace(call, args=tuple(args))

    def _output(self, param: Buffer | ScalarParam | DimVar, stated: Type, found: dict[DimVar, Dim]) -> Type:
        """Return the stated annotation of an output if it provably matches the type that the loop nest produces. Otherwise return the type
        that the nest produces; `_annotated` then checks the annotation."""
        assert isinstance(param, Buffer)
        wanted = _wanted(param, found)
        return stated if subsumes(wanted, stated).level is Level.PASS else wanted

    def _integers(self, params: Sequence[Buffer | ScalarParam | DimVar], args: list[Atom], places: list[str]) -> dict[DimVar, Dim]:
        """Return the values of a nest's integer variables, and replace their arguments in `args` by these values. An argument of unknown
        value gets a new variable, which a match_cast binds."""
        found: dict[DimVar, Dim] = {}
        for i, param in enumerate(params[: len(args)]):
            if not isinstance(param, DimVar):
                continue
            atom = args[i]
            if not isinstance(atom, ScalarValue) or not isinstance(atom.value, Dim):
                type_ = type_of(atom)
                known = type_.value if isinstance(type_, ScalarType) else None
                if known is None:
                    known = Dim.of(_like(param))
                    self._emit(MatchCast(atom, ScalarType(DType.I64, known), places[i]))
                atom = args[i] = ScalarValue(known)
            assert isinstance(atom.value, Dim)
            found[param] = atom.value
        return found

    def _extents(self, params: Sequence[Buffer | ScalarParam | DimVar], types: Sequence[Type], found: dict[DimVar, Dim]) -> set[DimVar]:
        """Add to `found` the variables that shapes define, and return them. Their values are known extents, or else new variables, which
        the check of the operand defines."""
        shaped: set[DimVar] = set()
        for known in (True, False):
            for param, type_ in zip(params, types, strict=True):
                if not isinstance(param, Buffer):
                    continue
                shape = type_.shape if isinstance(type_, TensorType) else None
                if (shape is not None) is not known:
                    continue
                for mine, theirs in zip(param.shape, shape or [None] * len(param.shape), strict=True):
                    if (var := mine.var) is not None and var not in found:
                        found[var] = Dim.of(_like(var)) if theirs is None else theirs
                        shaped.add(var)
        return shaped


def _like(var: DimVar) -> DimVar:
    """Return a new variable that stands for an argument of a loop nest, an extent or an integer, whose range is not yet checked. It has the
    name of the nest's variable `var`, no upper bound, and a lower bound of at most 0."""
    return DimVar(var.name, min(var.lower, 0))


def _converted(atom: Atom, dtype: DType) -> Atom:
    """Return a literal of type `dtype` if the atom is a literal number that the virtual machine would convert to this type, else the atom
    itself."""
    if not isinstance(atom, ScalarValue) or DType(atom.dtype) is dtype:
        return atom
    number = atom.value.const if isinstance(atom.value, Dim) and atom.value.is_const else atom.value
    match number:
        case bool() | Dim():
            return atom
        case int() | float() if dtype.is_float:
            return ScalarValue(float(number), str(dtype))
        case int() if dtype.is_int and dtype.holds(number):
            return ScalarValue(Dim.of(number), str(dtype))
        case _:
            return atom


def _wanted(param: Buffer, found: dict[DimVar, Dim]) -> TensorType:
    return TensorType(tuple(d.substitute(found) for d in param.shape), param.dtype)


def _existing(value: Value) -> list[Dim]:
    """Return the extents of the operands."""
    return [d for atom in operands(value) for d in _extents(type_of(atom))]


def _extents(type_: Type) -> Iterator[Dim]:
    match type_:
        case TensorType():
            yield from dims_of(type_)
        case TupleType(fields=fields):
            for inner in fields:
                yield from _extents(inner)
        case _:
            return
