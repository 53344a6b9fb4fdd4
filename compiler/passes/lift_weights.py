"""Move work that depends only on weights out of the step, into functions that run once, when weights are bound.

Before: an entry point `step(inputs..., weights...)`. After: `step(inputs..., kept..., prepared...)`, where `kept` are the weights that the
step still reads, and all weights with symbolic extents, because the step may use or check these extents. The functions
`step.weights.0(weights...)`, `step.weights.1(weights...)`, ... are called preparations. Together they return the `prepared` values (packed,
transposed, quantised or folded weights) in the order of the parameters, each function as a tuple. They are compiled like any function, so
packing loops are fast. The results of one function have at most PART_BYTES, unless a single result has more, or results share a computed
value and cannot be separated. So memory need not hold the whole checkpoint and all prepared weights at once. A function that other
functions call stays as it is.

A preparation checks nothing but its own parameters. So work on weights with symbolic extents moves only if no other parameter mentions the
variables of these extents, and no check of the step before the work mentions them. Work on a weight that is a number stays, because the
step checks the number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import chain, count
from math import prod

from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import Atom, Constant, ShapeValue, Var
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function
from compiler.ir.graph.values import Call, CallTir, Copy, MakeTuple, MatchCast, TupleGet
from compiler.ir.graph.visit import free_vars, fresh_function, map_atoms, operands, used_vars
from compiler.ir.module import IRModule
from compiler.ir.types import ScalarType, TensorType, TupleType, Type, binders_of, vars_of
from compiler.ops.ranks import RANKS
from compiler.passes.eliminate_dead_code import has_effect, with_nests
from compiler.passes.memory.protect_operands import destroyed, taken_in
from compiler.passes.rewrite import called_functions, count_uses
from runtime.executable import PREPARATION

PART_BYTES = 128 << 20
_MOVABLE = (Call, CallTir, Copy, TupleGet, MakeTuple)


def lift_weights(module: IRModule) -> IRModule:
    lifted: dict[str, Function] = {}
    called = called_functions(module)  # callers pass the weights themselves, so these functions keep their parameters
    for name, func in module.graph_functions.items():
        if func.weights and name not in called and not any(other.startswith(name + PREPARATION) for other in module.functions):
            lifted |= _lift(name, func, module)
    return module.update(lifted) if lifted else module


def _lift(name: str, func: Function, module: IRModule) -> dict[str, Function]:
    """Return the step and the preparations that replace an entry point, by name, or nothing if no work can move."""
    early: dict[Var, None] = dict.fromkeys(func.weights)  # values that only weights determine; a dict, because their order matters
    alone = _own_variables(func)  # variables of weights alone that no check so far mentions
    fresh = destroyed(func.body, taken_in(module))  # values whose memory every call overwrites, so every call must compute them again
    moved: list[Binding] = []
    for binding in func.body.bindings:
        if isinstance(binding.value, MatchCast):
            alone.difference_update(_variables(binding))
        if binding.var in fresh:
            continue
        if _movable(binding, early, module) and alone.issuperset(_variables(binding)):
            early[binding.var] = None
            moved.append(binding)
    if not moved:
        return {}
    stays = set(moved)
    rest = [Block(tuple(b for b in block.bindings if b not in stays), block.kind) for block in func.body.blocks]
    body = Body(tuple(b for b in rest if b.bindings), func.body.result)
    used = count_uses(body)
    parts = _parts(moved, used)
    results = [[b.var for b in part if b.var in used] for part in parts]
    wanted = [var for result in results for var in result]
    assert func.num_inputs is not None
    inputs = func.params[: func.num_inputs]
    kept = [v for v in func.weights if v in used or vars_of(v.type)]
    own = _own_names(wanted, [p.name for p in func.params])
    params = (*inputs, *kept, *(own[v] for v in wanted))
    body = map_atoms(body, lambda atom: own.get(atom, atom) if isinstance(atom, Var) else atom)
    step = Function(params, body, func.result_type, func.pure, func.num_inputs, func.arena)
    prepare = {f"{name}{PREPARATION}{i}": _preparation(parts[i], results[i], func.weights) for i in range(len(parts))}
    return {name: step, **prepare}


def _own_variables(func: Function) -> set[DimVar]:
    """Return the symbolic variables of each weight whose shape defines all of its variables, if no other parameter mentions any of them,
    and none of their ranges mentions a variable."""
    counts = Counter(d for p in func.params for d in set(vars_of(p.type)))
    own = {d for w in func.weights for d in binders_of(w.type) if counts[d] == 1 and not isinstance(d.upper, Dim)}
    return {d for w in func.weights if own.issuperset(vars_of(w.type)) for d in vars_of(w.type)}


def _variables(binding: Binding) -> set[DimVar]:
    """Return the symbolic variables in the binding and in the annotations of its operands."""
    types = [atom.type for atom in operands(binding.value) if isinstance(atom, Var)]
    return {*used_vars(binding.value).dims, *(d for type_ in (binding.var.type, *types) for d in vars_of(type_))}


def num_prepared(module: IRModule, entry: str) -> int:
    """Return the number of weights that an entry point's preparations return. The entry point gets them as its last weights."""
    results = [func.result_type for name, func in module.graph_functions.items() if name.startswith(entry + PREPARATION)]
    return sum(len(result.fields) for result in results if isinstance(result, TupleType))


def parted(module: IRModule) -> tuple[IRModule | None, IRModule]:
    """Split the module into a module of preparations (None if there are none) and a module of all other functions. No call crosses the
    split."""
    prepares = {name: func for name, func in module.graph_functions.items() if PREPARATION in name}
    if not prepares:
        return None, module

    rest = {name: func for name, func in module.graph_functions.items() if name not in prepares}
    return with_nests(prepares, module), with_nests(rest, module)


def _own_names(wanted: Sequence[Var], given: Sequence[str]) -> dict[Var, Var]:
    """Return a variable for each wanted value, with a new name if its name is in `given` or taken. Weights are bound by name, so their
    names must differ."""
    taken, own = set(given), dict[Var, Var]()
    for var in wanted:
        name = next(n for n in chain([var.name], (f"{var.name}_{i}" for i in count(1))) if n not in taken)
        taken.add(name)
        own[var] = var if name == var.name else Var(name, var.type)
    return own


def _parts(bindings: Sequence[Binding], used: Container[Var]) -> list[list[Binding]]:
    """Group the bindings that prepare values in `used`, which the step reads, into parts. The results of a part have at most PART_BYTES. A
    connected group of bindings whose results have more is a part by itself. So there are few functions, and each is small."""
    parts: list[list[Binding]] = []
    part_bytes = PART_BYTES
    for group in _connected(bindings):
        results = [b.var for b in group if b.var in used]
        num_bytes = sum(_num_bytes(var.type) for var in results)
        if not results:
            continue
        if part_bytes + num_bytes > PART_BYTES or not parts:
            parts.append([])
            part_bytes = 0
        parts[-1] += group
        part_bytes += num_bytes
    return parts


def _num_bytes(type_: Type) -> int:
    """Return the size of a value in bytes. A value with symbolic extents counts as 0."""
    if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype is None:
        return 0
    return prod(d.const if d.is_const else 0 for d in type_.shape) * type_.dtype.num_bytes


def _connected(bindings: Sequence[Binding]) -> list[list[Binding]]:
    """Group bindings so that no group uses a value of another group. Groups and their bindings are in program order."""
    above: dict[Var, Var] = {}

    def top(var: Var) -> Var:
        while above[var] is not var:
            var = above[var]
        return var

    for binding in bindings:
        above[binding.var] = binding.var
        for atom in operands(binding.value):
            if isinstance(atom, Var) and atom in above:
                above[top(atom)] = binding.var
    groups: dict[Var, list[Binding]] = {}
    for binding in bindings:
        groups.setdefault(top(binding.var), []).append(binding)
    return list(groups.values())


def _preparation(bindings: Sequence[Binding], results: Sequence[Var], weights: Sequence[Var]) -> Function:
    """Return the function that computes `results`, as one tuple, from those weights that the bindings need."""
    prepared = Var("prepared", TupleType(tuple(v.type for v in results)))
    block = Block((*bindings, Binding(prepared, MakeTuple(tuple(results)))), BlockKind.DATAFLOW)
    body = Body((block,), prepared)
    needs = free_vars(body)
    sources = [v for v in weights if v in needs.values or not set(needs.dims).isdisjoint(binders_of(v.type))]
    return fresh_function(Function(tuple(sources), body, prepared.type))


def _movable(binding: Binding, early: Container[Var], module: IRModule) -> bool:
    """Whether only weights determine the value and a file of tensors can store it. Shapes and numbers are computed again at every call, and
    so is a value with a number among its operands (a `ScalarValue`, or a variable that is a scalar)."""
    value = binding.value
    if isinstance(value, CallTir) and RANKS in module.prim(value.func).attrs:  # preparations run on one rank
        return False
    if not isinstance(value, _MOVABLE) or not isinstance(binding.var.type, TensorType | TupleType) or has_effect(value, module):
        return False
    atoms = operands(value)
    return any(isinstance(a, Var) for a in atoms) and all(_early(a, early) for a in atoms)


def _early(atom: Atom, early: Container[Var]) -> bool:
    """Whether the operand is known when weights are bound. Numbers do not count as known: the step checks a number, and the call reads the
    number itself, not the result of the check."""
    if isinstance(atom, Var):
        return atom in early and not isinstance(atom.type, ScalarType)
    return isinstance(atom, Constant | ShapeValue)
