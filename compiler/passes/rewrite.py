"""The traversal that most graph passes share. It rebuilds functions binding by binding, and deduces the annotations of changed bindings
again.

A pass provides a function that maps a binding to the value that replaces the binding's value. The function gets the old binding, and its
value with operands that are replaced already. It may emit bindings before this binding through the builder. If it returns an atom or a
`Copy` of an atom, the atom replaces the variable everywhere. If a graph function changes, each variable in it
that is bound to an atom, or to a `Copy` of one, is replaced by that atom, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Atom, FuncRef, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, If, Value
from compiler.ir.graph.values import Copy
from compiler.ir.graph.visit import map_operands, operands
from compiler.ir.module import IRModule

Replace = Callable[[Builder, Binding, Value], Value | None]  # returns the value that replaces the binding's value, or None to keep it


def rewrite_module(module: IRModule, replace: Replace, *, kind: BlockKind | None = None) -> IRModule:
    """Apply `replace` to every binding of every graph function. A function without a replacement stays the same object. `kind`, if given,
    becomes the kind of all blocks."""
    builder = Builder(module)
    changed = False
    for name, func in module.graph_functions.items():
        changed |= rewrite_function(builder, name, func, replace, kind=kind)
    return builder.finish() if changed else module


def rewrite_function(
    builder: Builder, name: str, func: Function, replace: Replace, *, arena: Dim | None = None, kind: BlockKind | None = None
) -> bool:
    """Rebuild one function with the builder. `arena`, if given, becomes the size of its arena. Return whether anything was replaced. If
    nothing was replaced, the builder keeps the function as it is."""
    walker = _Walker(builder, replace, kind)
    with builder.function(name, func.params, num_inputs=func.num_inputs, pure=func.pure, arena=arena or func.arena):
        walker.body(func.body)
    if not walker.changed:
        builder.add(name, func)
    return walker.changed


def rewrite_bodies(module: IRModule, body_of: Callable[[Function], Body], builder: Builder | None = None) -> IRModule:
    """Give each graph function the body that `body_of` returns for it. A function that keeps its body stays the same object. `builder` has
    the functions that new bodies call."""
    changed: dict[str, Function] = {}
    for name, func in module.graph_functions.items():
        body = body_of(func)
        if body is not func.body:
            changed[name] = Function(func.params, body, func.result_type, func.pure, func.num_inputs, func.arena)
    if not changed:
        return module
    return (module if builder is None else builder.finish()).update(changed)


def rewrite_dataflow(body: Body, block_of: Callable[[Block], Block]) -> Body:
    """Replace each dataflow block of a body. If all blocks stay the same objects, so does the body."""
    blocks = tuple(block_of(b) if b.kind is BlockKind.DATAFLOW else b for b in body.blocks)
    return body if all(a is b for a, b in zip(blocks, body.blocks, strict=True)) else Body(blocks, body.result)


class _Walker:
    """Rebuilds the body of one function. `changed` says whether a value was replaced so far."""

    def __init__(self, builder: Builder, replace: Replace, kind: BlockKind | None) -> None:
        self._builder = builder
        self._replace = replace
        self._kind = kind
        self._atoms: dict[Var, Atom] = {}
        self.changed = False

    def body(self, body: Body) -> None:
        for block in body.blocks:
            with self._builder.block(self._kind or block.kind):
                for binding in block.bindings:
                    self._binding(binding)
        self._builder.returns(self._atom(body.result))

    def _binding(self, binding: Binding) -> None:
        value = self._value(binding.value)
        new = self._replace(self._builder, binding, value)
        if new is not None:
            self.changed = True
            value = new
        if isinstance(value, Copy):
            self._atoms[binding.var] = value.value
        elif isinstance(value, Atom):
            self._atoms[binding.var] = value
        elif value is binding.value:
            self._builder.keep(binding)
        else:
            self._atoms[binding.var] = self._builder.emit(value, binding.var.name)

    def _value(self, value: Value) -> Value:
        if not isinstance(value, If):
            return map_operands(value, self._atom)
        sides: list[Body] = []
        for side in (value.then, value.orelse):
            with self._builder.branch(sides):
                self.body(side)
        return If(self._atom(value.cond), sides[0], sides[1])

    def _atom(self, atom: Atom) -> Atom:
        return self._atoms.get(atom, atom) if isinstance(atom, Var) else atom


def count_uses(body: Body, counts: dict[Var, int] | None = None) -> Mapping[Var, int]:
    """Count how often each variable is an operand or a result in the body, including branches. The counts are added to `counts`, if it is
    given."""
    counts = {} if counts is None else counts
    for binding in body.bindings:
        for atom in operands(binding.value):
            if isinstance(atom, Var):
                counts[atom] = counts.get(atom, 0) + 1
        if isinstance(binding.value, If):
            count_uses(binding.value.then, counts)
            count_uses(binding.value.orelse, counts)
    if isinstance(body.result, Var):
        counts[body.result] = counts.get(body.result, 0) + 1
    return counts


def called_functions(module: IRModule) -> set[str]:
    """Return the graph functions that a function of the module may call, by name or through a reference."""
    return {a.name for func in module.graph_functions.values() for a in _atoms(func.body) if isinstance(a, FuncRef)}


def _atoms(body: Body) -> Iterator[Atom]:
    """Yield the operands and results of the body, including branches."""
    for binding in body.bindings:
        yield from operands(binding.value)
        if isinstance(binding.value, If):
            yield from _atoms(binding.value.then)
            yield from _atoms(binding.value.orelse)
    yield body.result
