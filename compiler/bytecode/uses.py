"""Find the values of a function that need a register, and the values that its launches write."""

from __future__ import annotations

from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.function import Body, If, Value
from compiler.ir.graph.values import Call, Copy, Launch, MakeTuple, TupleGet
from compiler.ir.graph.visit import operands
from compiler.ir.module import IRModule
from compiler.ops.memory import written
from compiler.ops.tables import VIEWS
from runtime.library import routine


def needed(body: Body) -> set[Var]:
    """Return the variables that instructions read, directly or through a view or an alias, and the results of bodies. Operands of launches
    of loop nests need no register and do not count. A tuple counts if a field is taken from it."""
    found: set[Var] = set()
    names: list[tuple[Var, Value]] = []

    def visit(body: Body) -> None:
        """Add to `found` the variables that the instructions of a body read, and its result. Add its views, aliases, tuples and fields to
        `names`, because the operands of such a value are needed only if the value itself is needed."""
        for binding in body.bindings:
            value = binding.value
            if isinstance(value, Launch) and not value.library:
                continue
            if _is_name(value):
                names.append((binding.var, value))
                continue
            found.update(a for a in operands(value) if isinstance(a, Var))
            if isinstance(value, If):
                visit(value.then)
                visit(value.orelse)
        if isinstance(body.result, Var):
            found.add(body.result)

    visit(body)
    for var, value in reversed(names):
        if var in found or isinstance(value, TupleGet):
            found.update(a for a in operands(value) if isinstance(a, Var))
    return found


def _is_name(value: Value) -> bool:
    return isinstance(value, Copy | Var | MakeTuple | TupleGet) or (isinstance(value, Call) and value.op.name in VIEWS)


def changed(body: Body, module: IRModule) -> set[Var]:
    """Return the variables whose memory the body's launches overwrite, including variables that share this memory."""

    def writes(value: Value) -> tuple[Atom, ...]:
        """Return the outputs of a launch, which are its last arguments. Other values have none."""
        match value:
            case Launch(func=name, args=args, library=True):
                return args[len(routine(name).inputs) :]
            case Launch(func=name, args=args):
                return args[len(args) - module.prim(name).num_outputs :]
            case _:
                return ()

    return written(body, writes)
