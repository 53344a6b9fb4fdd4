"""Emit scalar expressions at a place in a loop nest. A reduction inside an expression becomes a loop here; schedules replace the reductions
that need to be fast."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from compiler.codegen.memory import MemoryAccess
from compiler.codegen.scalars import Scalars, Value, constant, register
from compiler.ir.dims import Dim, DimVar, row_major
from compiler.ir.dtypes import DType
from compiler.ir.loops import scalars
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.scalars import Scalar, dtype_of, identity
from compiler.ir.loops.visit import walk_scalar
from compiler.ir.prove import bounds
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code, splat, suffix, vec
from compiler.machine.target import Target

TRUE, FALSE = Value("true", DType.BOOL), Value("false", DType.BOOL)


class Expressions:
    """Emits expressions. `memory` has the storage of buffers, and the lanes of the vector loop around the current place. `indices` has the
    values of the variables."""

    def __init__(self, code: Code, params: dict[scalars.ScalarParam, Value], target: Target) -> None:
        self.code = code
        self.params = params
        self.indices = Indices(code)
        self.scalars = Scalars(code, rounds_bf16=target.rounds_bf16)
        self.memory = MemoryAccess(code, self.indices, self.scalars)
        # values of the nodes of the current expression; nodes can have several users after fusion
        self._known: dict[Scalar, Value] = {}

    def value(self, scalar: Scalar) -> Value:
        """Emit an expression of a statement, and return its value. Values of earlier expressions are not reused."""
        self._known = {}
        return self._eval(scalar)

    def _eval(self, scalar: Scalar) -> Value:
        """Return the value of a node. Emit the node only if the current expression has not emitted an equal one before."""
        value = self._known.get(scalar)
        if value is None:
            value = self._known[scalar] = self._compute(scalar)
        return value

    def _compute(self, scalar: Scalar) -> Value:
        """Emit a node and its operands, and return its value. `_below` emits a comparison of two dimensions, since the dimensions may
        differ between lanes."""
        match scalar:
            case scalars.Const(value=value, dtype=dtype):
                return Value(constant(value, dtype), dtype)
            case scalars.DimScalar(dim=dim):
                index = self.indices.value(dim)
                return Value(str(index.value), DType.I64, index.lanes)
            case scalars.ScalarParam():
                given = self.params[scalar]  # a smaller float is given as an f32 that is not yet rounded to its type
                return self.scalars.rounded(given.operand, given.dtype, given.lanes) if given.dtype.is_float else given
            case scalars.Load(buffer=buffer, indices=indices):
                return self.memory.load(buffer, indices)
            case scalars.Apply(fn=Fn.LT, args=(scalars.DimScalar(dim=low), scalars.DimScalar(dim=high))):
                return self._below(low, high)
            case scalars.Apply(fn=Fn.LE, args=(scalars.DimScalar(dim=low), scalars.DimScalar(dim=high))):
                return self._below(low, high + 1)
            case scalars.Apply(fn=fn, args=args):
                return self.scalars.apply(fn, [self._eval(a) for a in args])
            case scalars.Cast(value=value, dtype=dtype):
                return self.scalars.cast(self._eval(value), dtype)
            case scalars.Guard():
                return self._guard(scalar)
            case scalars.Reduce(fn=ReduceFn.ARGMAX | ReduceFn.ARGMIN):
                return self._extreme_place(scalar)
            case scalars.Reduce():
                return self._fold(scalar)
            case scalars.Contraction() | scalars.GroupedContraction():
                return self._eval(scalar.fold)
            case scalars.Element():
                return self._eval(scalar.decoded)

    # --- conditions ----------------------------------------------------------------------------------------------------

    def _below(self, low: Dim, high: Dim) -> Value:
        """Emit low < high. If the result is a constant, return TRUE or FALSE."""
        below = self.memory.below(low, high)
        return below if isinstance(below, Value) else TRUE if below else FALSE

    def _guard(self, guard: scalars.Guard) -> Value:
        """Emit a guard: its `value` where all conditions hold, and `otherwise` elsewhere. If the conditions are constants, emit only one of
        the two. If they are the same in all lanes, emit a branch. If they differ between lanes, `otherwise` is computed in all lanes. Then
        `value` is computed in the lanes where the conditions hold, and skipped if there are none."""
        inside = TRUE
        for low, dim, high in guard.conditions:
            for cond in (self._below(low, dim + 1), self._below(dim, high)):
                if FALSE in (cond, inside):
                    inside = FALSE
                elif cond != TRUE:
                    inside = cond if inside == TRUE else self.scalars.apply(Fn.AND, [inside, cond])
        if inside in (TRUE, FALSE):
            return self._eval(guard.value if inside == TRUE else guard.otherwise)
        dtype = dtype_of(guard)
        lanes = self.memory.num_lanes if self.varies(guard) else 1
        if inside.lanes == 1:
            arms = (self._arm(guard.value, lanes), self._arm(guard.otherwise, lanes))
            return Value(self.code.choose(inside.operand, vec(register(dtype), lanes), *arms), dtype, lanes)
        otherwise = self.scalars.spread(self._eval(guard.otherwise), lanes)
        with self.memory.narrowed(inside.operand) as some:
            kind = vec(register(dtype), lanes)
            value = self.code.choose(some, kind, self._arm(guard.value, lanes), lambda: otherwise.operand)
        return self.scalars.select(inside, Value(value, dtype, lanes), otherwise)

    def _arm(self, scalar: Scalar, lanes: int) -> Callable[[], str]:
        """Return a function that emits `scalar` as one side of a branch, and returns its value in `lanes` lanes. Nodes that it emits are
        not reused after the branch."""

        def run() -> str:
            with self._branch():
                return self.scalars.spread(self._eval(scalar), lanes).operand

        return run

    @contextmanager
    def _branch(self) -> Generator[None]:
        """Save the known values, and restore them after the branch: values computed inside do not dominate the code after it."""
        outer, self._known = self._known, dict(self._known)
        yield
        self._known = outer

    def varies(self, scalar: Scalar) -> bool:
        """Return whether the value may differ between lanes."""
        return any(self._differs(node) for node in walk_scalar(scalar))

    def _differs(self, node: Scalar) -> bool:
        """Return whether the node itself differs between lanes, even if all its operands are the same in every lane."""
        memory = self.memory
        match node:
            case scalars.Const() | scalars.ScalarParam() | scalars.Apply() | scalars.Cast():
                return False
            case scalars.DimScalar(dim=dim) | scalars.Element(k=dim):
                return memory.varies(dim.atoms())
            case scalars.Load(buffer=buffer, indices=indices):
                return memory.storage[buffer].lane is not None or any(memory.varies(i.atoms()) for i in indices)
            case scalars.Guard(conditions=conditions):
                return any(memory.varies(d.atoms()) for cond in conditions for d in cond)
            case scalars.Fold():
                return any(memory.varies(extent.atoms()) for _, extent in node.axes)

    # --- reductions ----------------------------------------------------------------------------------------------------

    def _fold(self, reduce: scalars.Reduce) -> Value:
        """Emit loops that combine all elements of a reduction, beginning with the identity of its function."""
        dtype = dtype_of(reduce.value)
        lanes = self.memory.num_lanes if self.varies(reduce) else 1
        kind = vec(register(dtype), lanes)
        total = self.code.alloca(kind)
        self.code.do(f"store {kind} {splat(constant(identity(reduce.fn, dtype).value, dtype), register(dtype), lanes)}, ptr {total}")

        def step(active: str | None) -> None:
            """Combine the current element with the total, in the active lanes."""
            old = Value(self.code.op(f"load {kind}, ptr {total}"), dtype, lanes)
            item = self.scalars.spread(self._eval(reduce.value), lanes)
            new = self.scalars.apply(_FOLD[reduce.fn], [old, item])
            if active is not None:
                new = self.scalars.select(Value(active, DType.BOOL, lanes), new, old)
            self.code.do(f"store {kind} {new.operand}, ptr {total}")

        self._loops(reduce.axes, step)
        return Value(self.code.op(f"load {kind}, ptr {total}"), dtype, lanes)

    def _extreme_place(self, reduce: scalars.Reduce) -> Value:
        """Emit the row-major index (i64) of the first largest or first smallest element. A NaN counts as the largest and as the smallest.
        If there are no elements, the index is 0."""
        dtype, apply = dtype_of(reduce.value), self.scalars.apply
        lanes = self.memory.num_lanes if self.varies(reduce) else 1
        kind, place_kind = vec(register(dtype), lanes), vec("i64", lanes)
        best, place = self.code.alloca(kind), self.code.alloca(place_kind)
        self.code.do(f"store {kind} {splat(constant(identity(reduce.fn, dtype).value, dtype), register(dtype), lanes)}, ptr {best}")
        self.code.do(f"store {place_kind} {splat('0', 'i64', lanes)}, ptr {place}")
        position = row_major([var.dim for var, _ in reduce.axes], [extent for _, extent in reduce.axes])

        def step(active: str | None) -> None:
            """If the current element is better than the best one so far, store it and its index, in the active lanes."""
            old = Value(self.code.op(f"load {kind}, ptr {best}"), dtype, lanes)
            item = self.scalars.spread(self._eval(reduce.value), lanes)
            better = apply(Fn.LT, [old, item] if reduce.fn is ReduceFn.ARGMAX else [item, old])
            if dtype.is_float:
                first_nan = apply(Fn.AND, [apply(Fn.NE, [item, item]), apply(Fn.EQ, [old, old])])
                better = apply(Fn.OR, [better, first_nan])
            if active is not None:
                better = apply(Fn.AND, [better, Value(active, DType.BOOL, lanes)])
            old_place = Value(self.code.op(f"load {place_kind}, ptr {place}"), DType.I64, lanes)
            index = self.indices.value(position)
            here = Value(self.indices.spread(index, lanes), DType.I64, lanes)
            self.code.do(f"store {kind} {self.scalars.select(better, item, old).operand}, ptr {best}")
            self.code.do(f"store {place_kind} {self.scalars.select(better, here, old_place).operand}, ptr {place}")

        self._loops(reduce.axes, step)
        return Value(self.code.op(f"load {place_kind}, ptr {place}"), DType.I64, lanes)

    def _loops(self, axes: tuple[tuple[DimVar, Dim], ...], step: Callable[[str | None], None], active: str | None = None) -> None:
        """Emit loops that run `step` for all combinations of indices of the axes, in row-major order. If an extent differs between lanes,
        `step` receives the mask of the lanes that have the combination, otherwise None. `active` is this mask for the outer axes."""
        if not axes:
            with self._branch():
                step(active)
            return
        (var, extent), *rest = axes
        end = self.indices.value(extent)
        if end.lanes == 1:
            with self.code.loop("0", str(end.value), runs=runs(extent)) as counter:
                self.indices.env[var] = Index(counter, self.code.level)
                self._loops(tuple(rest), step, active)
            return
        # If lanes have different extents, the loop runs to the largest extent, and the mask stops each lane at its own extent.
        lanes, kind = end.lanes, vec("i64", end.lanes)
        longest = self.code.op(f"call i64 @llvm.vector.reduce.smax.{suffix('i64', lanes)}({kind} {end.value})")
        with self.code.loop("0", longest) as counter:
            self.indices.env[var] = Index(counter, self.code.level)
            cond = self.memory.below(var.dim, extent)
            assert isinstance(cond, Value)
            with self.memory.masked(cond.operand):
                inner = cond.operand if active is None else self.code.op(f"and <{lanes} x i1> {active}, {cond.operand}")
                self._loops(tuple(rest), step, inner)


def runs(extent: Dim) -> bool:
    """Return whether the extent is provably at least 1."""
    low, _ = bounds(extent)
    return low is not None and low >= 1


_FOLD = {
    ReduceFn.SUM: Fn.ADD,
    ReduceFn.PROD: Fn.MUL,
    ReduceFn.MAX: Fn.MAX,
    ReduceFn.MIN: Fn.MIN,
    ReduceFn.ANY: Fn.OR,
    ReduceFn.ALL: Fn.AND,
}
