"""Build functions binding by binding. The builder deduces each binding's annotation as it is emitted, so an error is raised where the
mistake is made.

builder = Builder()
with builder.function("main", (x, w)):
    with builder.dataflow():
        y = builder.call(MATMUL, x, w)
    builder.returns(y)
module = builder.finish()
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.deduce import deduce, require_alike, type_of
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, If, Value
from compiler.ir.graph.values import Call, MatchCast
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.op import OpDef
from compiler.ir.types import FuncType, Type, binders_of, erase, vars_of


@dataclass(slots=True)
class _Frame:
    """A body under construction. `scope` holds the symbolic variables that parameters mention or that a match_cast has defined so far.
    `blocks` holds the blocks that are complete, and `pending` the bindings of the present block. `result` is None until `returns` is
    called."""

    scope: set[DimVar]
    blocks: list[Block] = field(default_factory=list[Block])
    pending: list[Binding] = field(default_factory=list[Binding])
    result: Atom | None = None

    def close_block(self, kind: BlockKind) -> None:
        if self.pending:
            self.blocks.append(Block(tuple(self.pending), kind))
            self.pending = []

    def body(self) -> Body:
        self.close_block(BlockKind.PLAIN)
        assert self.result is not None, "a body ends with returns()"
        return Body(tuple(self.blocks), self.result)


class Builder:
    """Collects the functions of a module, and builds graph-level functions. The first functions are those of `module`, if that is given.
    Bindings go into the innermost body that is open. Only one function can be built at a time."""

    def __init__(self, module: IRModule | None = None) -> None:
        self._functions: dict[str, Function | PrimFunc] = dict(module.functions) if module else {}
        self._signatures: dict[str, FuncType] = {}
        self._frames: list[_Frame] = []
        self._function = ""
        self._count = 0

    # --- functions and blocks ------------------------------------------------------------------------------------------

    def declare(self, name: str, signature: FuncType) -> None:
        """Declare the signature of a function that is built later, so that functions built before it can call it."""
        self._signatures[name] = signature

    @contextmanager
    def function(
        self, name: str, params: Sequence[Var], *, num_inputs: int | None = None, pure: bool = True, arena: Dim | None = None
    ) -> Generator[None]:
        """Build a graph-level function from the bindings that are emitted inside the `with`, which must call `returns`. The annotation of
        its result is that of the returned atom, without dimensions that no parameter defines. A function with the same name is replaced. If
        the body raises, no function is added."""
        assert not self._frames, f"function {name!r} begins inside {self._function!r}"
        self._function = name
        scope = {v for p in params for v in vars_of(p.type)}
        frame = _Frame(scope)
        self._frames = [frame]
        try:
            yield
            body = frame.body()
            bound = {v for p in params for v in binders_of(p.type)}
            result = erase(type_of(body.result, self.signature), bound)
            self._functions[name] = Function(tuple(params), body, result, pure, num_inputs, arena)
        finally:
            self._frames = []

    @contextmanager
    def dataflow(self) -> Generator[None]:
        with self.block(BlockKind.DATAFLOW):
            yield

    @contextmanager
    def block(self, kind: BlockKind) -> Generator[None]:
        """Put the bindings that are emitted inside the `with` into a block of this kind. Bindings outside such a `with` are in plain
        blocks. A block without bindings is left out."""
        self._frame.close_block(BlockKind.PLAIN)
        yield
        self._frame.close_block(kind)

    @contextmanager
    def branch(self, made: list[Body]) -> Generator[None]:
        """Build one branch of an If, and append its body to `made`. `branches` makes the If from two such bodies."""
        frame = _Frame(set(self._frame.scope))
        self._frames.append(frame)
        try:
            yield
            made.append(frame.body())
        finally:
            self._frames.pop()

    def returns(self, atom: Atom) -> None:
        """Make the atom the result of the innermost body that is open."""
        self._frame.result = atom

    def add(self, name: str, func: Function | PrimFunc) -> str:
        """Add a finished function, and return its name. A function with the same name is replaced."""
        self._functions[name] = func
        return name

    def find(self, name: str) -> Function | PrimFunc:
        """Return a finished function. Raise KeyError if there is none with this name."""
        return self._functions[name]

    def fresh_name(self, base: str) -> str:
        """Return a name that no finished function has: `base`, or else `base` with a number."""
        name, count = base, 0
        while name in self._functions:
            count += 1
            name = f"{base}_{count}"
        return name

    def finish(self) -> IRModule:
        """Return the module with all functions so far. Functions that are only declared are left out."""
        return IRModule(dict(self._functions))

    # --- bindings ------------------------------------------------------------------------------------------------------

    def emit(self, value: Value, name: str = "") -> Var:
        """Add a binding of the value, and return its variable. Without a `name`, the name is `v` and a number. Raise AnnotationError if the
        annotation of the value cannot be deduced."""
        if not name:
            name, self._count = f"v{self._count}", self._count + 1
        frame = self._frame
        try:
            type_ = deduce(value, self.signature, frame.scope)
        except AnnotationError as error:
            raise error.within(self._function, name) from None
        if isinstance(value, MatchCast):
            frame.scope.update(binders_of(type_))
        var = Var(name, type_)
        frame.pending.append(Binding(var, value))
        return var

    def keep(self, binding: Binding) -> None:
        """Add a binding of the function that is being rewritten, unchanged. The operands of the binding have not changed, so its annotation
        is still right."""
        frame = self._frame
        if isinstance(binding.value, MatchCast):
            frame.scope.update(binders_of(binding.var.type))
        frame.pending.append(binding)

    def call(self, op: OpDef, *args: Atom, name: str = "", **attrs: Any) -> Var:
        return self.emit(Call(op, args, attrs), name)

    def match_cast(self, value: Atom, type_: Type, name: str = "") -> Var:
        return self.emit(MatchCast(value, type_), name)

    def branches(self, cond: Atom, then: Body, orelse: Body, name: str = "") -> Var:
        """Add a binding of an If. Raise AnnotationError if the results of the branches differ in kind, element type, rank or number of
        fields."""
        value = If(cond, then, orelse)
        require_alike(value, self.signature)
        return self.emit(value, name)

    def signature(self, name: str) -> FuncType:
        """Return the signature of a graph-level function that is finished or declared. Raise AnnotationError if there is none."""
        func = self._functions.get(name)
        if isinstance(func, Function):
            return func.type
        if name in self._signatures:
            return self._signatures[name]
        known = sorted(n for n, f in self._functions.items() if isinstance(f, Function))
        raise AnnotationError(f"unknown function {name!r}; known: {', '.join([*known, *self._signatures]) or 'none'}")

    @property
    def _frame(self) -> _Frame:
        assert self._frames, "no function is being built"
        return self._frames[-1]
