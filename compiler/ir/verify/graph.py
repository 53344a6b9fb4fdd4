"""The rules of graph-level functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, Var
from compiler.ir.graph.deduce import deduce, type_of
from compiler.ir.graph.function import Binding, BlockKind, Body, Function, If
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallTir, Launch, MatchCast
from compiler.ir.graph.visit import atom_dims, operands, used_vars
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.loops.statements import Stmt
from compiler.ir.module import IRModule
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_ne
from compiler.ir.subsume import Level, subsumes
from compiler.ir.text.printer_types import type_text
from compiler.ir.types import FuncType, ObjectType, ScalarType, TensorType, Type, binders_of, vars_of


class Problem(NamedTuple):
    """A place where a program breaks a rule, and a message."""

    place: Binding | Stmt | None  # None: the function as a whole
    message: str


GraphRule = Callable[[IRModule, Function], Iterator[Problem]]


class Site(NamedTuple):
    """A binding, or the result of a body, and the variables that are defined before it. `binding` is None for a result. The walk changes
    the sets `values` and `dims` when it goes on, so both sets are valid only until the next site is requested."""

    binding: Binding | None
    kind: BlockKind
    values: set[Var]
    dims: set[DimVar]
    result: Atom | None = None

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """The operands of the binding, or the result of the body."""
        if self.binding is not None:
            return operands(self.binding.value)
        assert self.result is not None
        return (self.result,)


def sites(func: Function) -> Iterator[Site]:
    """Yield the bindings and results of all bodies of the function in program order. The sites inside an If follow the If itself, and come
    before its variable is defined."""
    dims = {v for p in func.params for v in binders_of(p.type)}
    yield from _body_sites(func.body, set(func.params), dims)


def _body_sites(body: Body, values: set[Var], dims: set[DimVar]) -> Iterator[Site]:
    for block in body.blocks:
        for binding in block.bindings:
            yield Site(binding, block.kind, values, dims)
            if isinstance(binding.value, If):
                for side in (binding.value.then, binding.value.orelse):
                    yield from _body_sites(side, set(values), set(dims))
            if isinstance(binding.value, MatchCast):
                dims.update(binders_of(binding.value.type))
            values.add(binding.var)
    yield Site(None, BlockKind.PLAIN, values, dims, body.result)


def bound_sites(func: Function) -> Iterator[tuple[Binding, Site]]:
    """Yield the bindings of the function with their sites, without the results of bodies."""
    return ((site.binding, site) for site in sites(func) if site.binding is not None)


# --- definitions and uses ----------------------------------------------------------------------------------------------


def operands_are_atoms(module: IRModule, func: Function) -> Iterator[Problem]:
    for site in sites(func):
        for atom in site.atoms:
            if not isinstance(atom, Atom):  # pyright: ignore[reportUnnecessaryIsInstance]  # a pass may have ignored the type
                yield Problem(site.binding, f"operand {atom} is not an atom; bind it to a variable first")


def values_are_defined_once(module: IRModule, func: Function) -> Iterator[Problem]:
    seen: set[Var] = set()
    for param in func.params:
        if param in seen:
            yield Problem(None, f"parameter {param.name} appears twice in the signature")
        seen.add(param)
    for binding, _ in bound_sites(func):
        if binding.var in seen:
            yield Problem(binding, f"{binding.var.name} is defined a second time")
        seen.add(binding.var)


def values_are_defined_before_use(module: IRModule, func: Function) -> Iterator[Problem]:
    """Each value is defined before its use. A variable defined in a branch is not visible outside the branch."""
    for site in sites(func):
        for atom in site.atoms:
            if isinstance(atom, Var) and atom not in site.values:
                yield Problem(site.binding, f"{atom.name} is used, but not defined before or around this place")


def signature_defines_its_dims(module: IRModule, func: Function) -> Iterator[Problem]:
    """Parameters define all symbolic variables of a signature. A dimension that is an expression only tests its argument, so each variable
    must be a dimension of some parameter by itself."""
    known = {v for p in func.params for v in binders_of(p.type)}
    for param in func.params:
        yield from _unknown_dims(None, f"the annotation of parameter {param.name}", vars_of(param.type), known)
    for var in known:
        if isinstance(var.upper, Dim):
            yield from _unknown_dims(None, f"the range of {var.name}", var.upper.vars(), known)
    yield from _unknown_dims(None, "the annotation of the result", vars_of(func.result_type), known)


def dims_are_defined_before_use(module: IRModule, func: Function) -> Iterator[Problem]:
    """A parameter or a match_cast must define a symbolic variable before its first use."""
    for site in sites(func):
        binding = site.binding
        if binding is None:
            yield from _unknown_dims(None, "the result", atom_dims(site.atoms[0]), site.dims)
            continue
        if isinstance(binding.value, If):
            used = atom_dims(binding.value.cond)
        else:
            used = used_vars(binding.value).dims
        yield from _unknown_dims(binding, "the value", used, site.dims)
        made = set(binders_of(binding.value.type)) if isinstance(binding.value, MatchCast) else set[DimVar]()
        yield from _unknown_dims(binding, "the annotation", vars_of(binding.var.type), site.dims | made)
        for var in made - site.dims:
            if isinstance(var.upper, Dim):
                yield from _unknown_dims(binding, f"the range of {var.name}", var.upper.vars(), site.dims | made)


def _unknown_dims(place: Binding | None, where: str, used: Iterable[DimVar], known: set[DimVar]) -> Iterator[Problem]:
    for var in used:
        if var not in known:
            yield Problem(place, f"{where} mentions dimension {var.name}, which no parameter and no earlier match_cast defines")


def launches_have_no_value(module: IRModule, func: Function) -> Iterator[Problem]:
    launched: set[Var] = set()
    for site in sites(func):
        for atom in site.atoms:
            if isinstance(atom, Var) and atom in launched:
                yield Problem(site.binding, f"{atom.name} is used, but it names a launch, which has no value")
        if site.binding is not None and isinstance(site.binding.value, Launch):
            launched.add(site.binding.var)


def weights_are_parameters(module: IRModule, func: Function) -> Iterator[Problem]:
    if func.num_inputs is not None and not 0 <= func.num_inputs <= len(func.params):
        yield Problem(None, f"num_inputs is {func.num_inputs}, expected 0 to {len(func.params)}, the number of parameters")


# --- blocks ------------------------------------------------------------------------------------------------------------


def blocks_are_straight_lines(module: IRModule, func: Function) -> Iterator[Problem]:
    """A dataflow block may be reordered and a captured one is replayed, so neither may branch."""
    for binding, site in bound_sites(func):
        if site.kind is not BlockKind.PLAIN and isinstance(binding.value, If):
            yield Problem(binding, f"an if is in a {site.kind.value} block, which cannot branch; move it to a plain block")


def dataflow_is_pure(module: IRModule, func: Function) -> Iterator[Problem]:
    for binding, site in bound_sites(func):
        if site.kind is BlockKind.DATAFLOW and (effect := _effect(module, binding)):
            yield Problem(binding, f"{effect} is in a dataflow block")


def pure_functions_do_nothing_impure(module: IRModule, func: Function) -> Iterator[Problem]:
    """A pure function has no effects. Its launches do not count as effects, since they write only memory that the function allocates."""
    for binding, _ in bound_sites(func):
        if func.pure and not isinstance(binding.value, Launch) and (effect := _effect(module, binding)):
            yield Problem(binding, f"{effect} is in a function that is declared pure")


def _effect(module: IRModule, binding: Binding) -> str:
    """Describe the effect of a binding as the subject of a sentence, or return "" if the binding has no effect."""
    match binding.value:
        case Call(op=op) if not op.pure:
            return f"the impure operator {op.name}"
        case CallFunc(callee=callee):
            type_ = callee.type if isinstance(callee, Var) else _signature(module, callee.name)
            return "a call of an impure function" if isinstance(type_, FuncType) and not type_.pure else ""
        case Launch():
            return "a launch, which writes memory,"
        case _:
            return ""


def _signature(module: IRModule, name: str) -> FuncType:
    """Return the signature of a graph-level function. Nothing is known of a function that does not exist; `functions_exist` reports it."""
    func = module.functions.get(name)
    return func.type if isinstance(func, Function) else FuncType(None, ObjectType())


# --- values ------------------------------------------------------------------------------------------------------------


def functions_exist(module: IRModule, func: Function) -> Iterator[Problem]:
    for site in sites(func):
        for atom in site.atoms:
            if isinstance(atom, FuncRef):
                yield from _wrong_kind(module, site.binding, atom.name, Function)
        if site.binding is None:
            continue
        match site.binding.value:
            case CallTir(func=name) | Launch(func=name, library=False):
                yield from _wrong_kind(module, site.binding, name, PrimFunc)
            case _:
                pass


def _wrong_kind(module: IRModule, place: Binding | None, name: str, wanted: type[Function | PrimFunc]) -> Iterator[Problem]:
    found = module.functions.get(name)
    if not isinstance(found, wanted):
        level = "graph-level" if wanted is Function else "loop-level"
        known = ", ".join(n for n, f in module.functions.items() if isinstance(f, wanted)) or "none"
        yield Problem(place, f"{'no' if found is None else 'not a'} {level} function {name!r}; known: {known}")


def attributes_are_known(module: IRModule, func: Function) -> Iterator[Problem]:
    for binding, _ in bound_sites(func):
        if not isinstance(binding.value, Call):
            continue
        op, attrs = binding.value.op, binding.value.attrs
        for name in attrs:
            if name not in op.attributes:
                yield Problem(binding, f"{op.name} has no attribute {name}; it has: {', '.join(op.attributes) or 'none'}")
        for name, default in op.attributes.items():
            if default is REQUIRED and attrs.get(name, REQUIRED) is REQUIRED:
                yield Problem(binding, f"{op.name} needs the attribute {name}")


def scalars_suit_their_type(module: IRModule, func: Function) -> Iterator[Problem]:
    for site in sites(func):
        for atom in site.atoms:
            if isinstance(atom, ScalarValue) and not _suits(atom):
                yield Problem(site.binding, f"scalar {atom.value} does not fit {atom.dtype}")


def _suits(scalar: ScalarValue) -> bool:
    """Return whether the value may have the element type. A symbolic dimension may have any integer type."""
    dtype = DType(scalar.dtype)
    match scalar.value:
        case Dim():
            return dtype.is_int and (not scalar.value.is_const or dtype.holds(scalar.value.const))
        case bool():
            return dtype is DType.BOOL
        case int():
            return dtype.holds(scalar.value)
        case float():
            return dtype.is_float


def annotations_hold(module: IRModule, func: Function) -> Iterator[Problem]:
    """The annotation of a binding, and that of the function's result, must not contradict what deduction finds. These annotations may state
    more than deduction proves. `branches_join` also requires a proof for the annotation of an If."""
    for binding, site in bound_sites(func):
        try:
            deduced = deduce(binding.value, lambda name: _signature(module, name), site.dims)
        except AnnotationError as error:
            yield Problem(binding, str(error))
            continue
        if isinstance(binding.value, Launch):
            continue
        verdict = subsumes(binding.var.type, deduced)
        if verdict.level is Level.DISJOINT:
            yield Problem(binding, f"annotated {_text(binding.var.type)}, but it is {_text(deduced)}: {verdict.reason}")
    verdict = subsumes(func.result_type, type_of(func.body.result, lambda name: _signature(module, name)))
    if verdict.level is Level.DISJOINT:
        yield Problem(None, f"the result contradicts its annotation {_text(func.result_type)}: {verdict.reason}")


def branches_join(module: IRModule, func: Function) -> Iterator[Problem]:
    """The result of a branch is not checked at run time, so it must be proved to match the annotation of the If."""
    for binding, _ in bound_sites(func):
        if isinstance(binding.value, If) and (text := unjoined(module, binding.var, binding.value)):
            yield Problem(binding, text)


def unjoined(module: IRModule, var: Var, value: If) -> str:
    """Return a message about the first branch that is not proved to match the annotation of `var`, or "" if both branches are proved to
    match."""
    for name, side in (("first", value.then), ("second", value.orelse)):
        given = type_of(side.result, lambda name: _signature(module, name))
        verdict = subsumes(var.type, given)
        if verdict.level is not Level.PASS:
            return f"annotated {_text(var.type)}, but the {name} branch gives {_text(given)}: {verdict.reason}"
    return ""


def conditions_are_bool(module: IRModule, func: Function) -> Iterator[Problem]:
    for binding, _ in bound_sites(func):
        if isinstance(binding.value, If):
            match type_of(binding.value.cond):
                case ObjectType() | ScalarType(dtype=DType.BOOL | None):
                    continue
                case TensorType(dtype=DType.BOOL | None, ndim=0 | None):
                    continue
                case other:
                    yield Problem(binding, f"the condition is {_text(other)}, expected a bool scalar or tensor of rank 0")


# --- calls of the loop level -------------------------------------------------------------------------------------------


def calls_fit_their_prims(module: IRModule, func: Function) -> Iterator[Problem]:
    for binding, _ in bound_sites(func):
        match binding.value:
            case CallTir(func=name, args=args, out=out, inplace=inplace):
                prim = module.functions.get(name)
                if isinstance(prim, PrimFunc):
                    outputs = set(prim.outputs) if prim.num_outputs else set[Buffer]()
                    inputs = [p for p in prim.params if p not in outputs]
                    yield from _outputs_fit(binding, prim, out)
                    yield from _arguments_fit(binding, [*inputs, *prim.outputs], [*map(type_of, args), *out], len(out))
                    yield from _inplace_fits(binding, args, out, inplace)
            case Launch(func=name, args=args, library=False):
                prim = module.functions.get(name)
                if isinstance(prim, PrimFunc):
                    yield from _arguments_fit(binding, prim.params, [type_of(a) for a in args], 0)
            case _:
                pass


def _outputs_fit(binding: Binding, prim: PrimFunc, out: tuple[Type, ...]) -> Iterator[Problem]:
    if len(out) != prim.num_outputs:
        yield Problem(binding, f"the loop-level function has {prim.num_outputs} outputs; the call has {len(out)}")
    for i, type_ in enumerate(out):
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is None:
            yield Problem(binding, f"output {i} is {_text(type_)}, expected a tensor of known shape, so that it can be allocated")


def _arguments_fit(
    binding: Binding, params: Sequence[Buffer | ScalarParam | DimVar], args: Sequence[Type], num_outputs: int
) -> Iterator[Problem]:
    """Check the number, kinds, element types and ranks of the arguments, and that no dimension provably differs from that of its parameter.
    An argument of unknown kind or rank is a problem; an unknown element type or extent is not. The last `num_outputs` arguments are the
    outputs of a CallTir; messages do not count them."""
    if len(params) != len(args):
        wanted, given = len(params) - num_outputs, len(args) - num_outputs
        yield Problem(binding, f"the loop-level function takes {wanted} arguments; it is called with {given}")
        return
    found: dict[DimVar, Dim] = {}
    for param, arg in zip(params, args, strict=True):
        match param, arg:
            case DimVar(), ScalarType(dtype=DType.I64 | None, value=Dim() as value):
                found.setdefault(param, value)
            case Buffer(), TensorType(shape=tuple() as shape):
                for mine, theirs in zip(param.shape, shape, strict=False):
                    if mine.var is not None:
                        found.setdefault(mine.var, theirs)
            case _:
                pass
    for param, arg in zip(params, args, strict=True):
        if reason := _misfit(param, arg, found):
            yield Problem(binding, f"argument for {param.name}: {reason}")


def _misfit(param: Buffer | ScalarParam | DimVar, arg: Type, found: dict[DimVar, Dim]) -> str:
    """Return why the argument does not fit the parameter, or "". `found` has the values that arguments give to the variables."""
    match param, arg:
        case _, ObjectType():
            return "nothing is known of the value; check it with match_cast first"
        case DimVar(), ScalarType(dtype=DType.I64 | None):
            return ""
        case ScalarParam(dtype=dtype), ScalarType(dtype=given):
            return "" if given in (dtype, None) else f"a scalar {given}, expected {dtype}"
        case Buffer(dtype=dtype, shape=shape), TensorType(dtype=given, shape=dims, ndim=ndim):
            if given is not None and given != dtype:
                return f"element type {given}, expected {dtype}"
            if ndim is None:
                return "a tensor of unknown rank; check it with match_cast first"
            if ndim != len(shape):
                return f"rank {ndim}, expected {len(shape)}"
            for i, (mine, theirs) in enumerate(zip(shape, dims or (), strict=False)):
                wanted = mine.substitute(found)
                if set(mine.vars()) <= set(found) and prove_ne(wanted, theirs):
                    return f"dimension {i} is {theirs}, expected {wanted}"
            return ""
        case _:
            wanted = {Buffer: "a tensor", ScalarParam: "a scalar", DimVar: "a scalar i64"}[type(param)]
            return f"{_text(arg)}, expected {wanted}"


def _inplace_fits(binding: Binding, args: tuple[Atom, ...], out: tuple[Type, ...], inplace: tuple[int | None, ...]) -> Iterator[Problem]:
    """Check the outputs that reuse memory. Each output must reuse a different tensor among the arguments, whose annotation must not
    contradict that of the output."""
    if inplace and len(inplace) != len(out):
        yield Problem(binding, f"inplace has {len(inplace)} entries for {len(out)} outputs")
        return
    taken = [i for i in inplace if i is not None]
    for i in taken:
        # A constant is allowed: the pass `protect_operands` copies the constant before a call writes to it.
        if not 0 <= i < len(args) or not isinstance(args[i], Var | Constant):
            yield Problem(binding, f"an output reuses argument {i}, expected the index of a tensor among the {len(args)} arguments")
        elif taken.count(i) > 1:
            yield Problem(binding, f"several outputs reuse argument {i}, expected at most one")
    for i, type_ in zip(inplace, out, strict=False):
        if i is not None and 0 <= i < len(args) and subsumes(type_, type_of(args[i])).level is Level.DISJOINT:
            yield Problem(binding, f"output {_text(type_)} reuses argument {i}, which is {_text(type_of(args[i]))}")


def allocations_have_a_size(module: IRModule, func: Function) -> Iterator[Problem]:
    for binding, _ in bound_sites(func):
        if isinstance(binding.value, Alloc):
            type_ = binding.value.type
            if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is None:
                yield Problem(binding, f"{_text(type_)} is allocated, expected a tensor of known shape and element type")


def _text(type_: Type) -> str:
    return type_text(type_)


# The order matters: a rule may rely on the rules before it.
GRAPH_RULES: tuple[GraphRule, ...] = (
    operands_are_atoms,
    values_are_defined_once,
    values_are_defined_before_use,
    signature_defines_its_dims,
    dims_are_defined_before_use,
    launches_have_no_value,
    weights_are_parameters,
    blocks_are_straight_lines,
    functions_exist,
    dataflow_is_pure,
    pure_functions_do_nothing_impure,
    attributes_are_known,
    scalars_suit_their_type,
    annotations_hold,
    branches_join,
    conditions_are_bool,
    calls_fit_their_prims,
    allocations_have_a_size,
)
