"""The printer of the loop level: `prim` functions, statements and scalars."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, parts
from compiler.ir.loops import scalars
from compiler.ir.loops.attention import Attention, Paged, Ragged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.loops.visit import inside_out, subscalars
from compiler.ir.text.forms import form_of
from compiler.ir.text.names import DimNames, Names
from compiler.ir.text.printer_types import (
    attributes_text,
    dims_text,
    function_name,
    is_plain,
    number_text,
    range_text,
    ranges_text,
    wrap,
)
from compiler.ir.text.syntax import ARITY, COMPARISON, INFIX, PREFIX, PREFIX_PRECEDENCE
from compiler.ir.tiles import stated_fields

_REDUCTION = 0  # precedence of a reduction: looser than any operator, because it extends to the right end
_ATOM = 9  # precedence of an expression that never needs parentheses
# A shared value of at least this many nodes gets a name. A smaller value is written out at each use, unless it is a reduction.
_NAMED_FROM = 16


class LoopPrinter:
    """Prints the loop level. `_kinds` has the function that prints an operand of each kind of a form (forms.py)."""

    def __init__(self, *, canonical: bool = False) -> None:
        self._values = Names("b" if canonical else "")
        self._dims = DimNames("d" if canonical else "")
        self._named: set[Scalar] = set()  # shared values whose names are in scope
        self._lines: list[str] = []
        self._depth = 0
        self._kinds: dict[str, Callable[[Any], str]] = {
            "axes": lambda axes: ", ".join([self._axis(*axis) for axis in axes]),
            "conditions": lambda conditions: ", ".join(map(self._condition, conditions)),
            "dim": self._dims.text,
            "dots": self._bracketed,
            "dtype": str,
            "format": lambda format: format.name,
            "part": self._part,
            "parts": lambda values: ", ".join(map(self._part, values)),
            "reduction": str,
            "whole": self.expression,
            "wholes": self._bracketed,
        }

    def prim(self, name: str, func: PrimFunc) -> list[str]:
        """Return the lines of a loop-level function."""
        outputs = set(func.outputs) if func.num_outputs else set[Buffer]()
        params = ", ".join(self._param(p, out=p in outputs) for p in func.params)
        self.stmt(func.body, depth=1)
        ranges = ranges_text(self._dims)
        tail = f"where {ranges}" if ranges else ""
        if func.attrs:
            tail = f"{tail} attrs {{{attributes_text(func.attrs, self._dims)}}}".strip()
        return [*header(f"prim {function_name(name)}({params})", tail), *self._lines, "}"]

    def _param(self, param: Buffer | scalars.ScalarParam | DimVar, *, out: bool) -> str:
        match param:
            case Buffer(name=name):
                return f"{'out ' if out else ''}{self._values.of(param, name)}: {self._buffer_type(param)}"
            case scalars.ScalarParam(name=name, dtype=dtype):
                return f"{self._values.of(param, name)}: scalar {dtype}"
            case DimVar():
                return f"{self._dims.variable(param)}: dim"

    def _buffer_type(self, buffer: Buffer) -> str:
        return f"{buffer.dtype}[{dims_text(buffer.shape, self._dims)}]"

    # --- statements ----------------------------------------------------------------------------------------------------

    def stmt(self, stmt: Stmt, depth: int = 0) -> list[str]:
        """Add the lines of a statement, and return all lines so far."""
        self._depth = depth
        self._stmt(stmt)
        return self._lines

    def _line(self, text: str) -> None:
        self._lines += wrap(text, self._depth)

    def _block(self, head: str, body: Stmt, tail: str = "}") -> None:
        """Print a statement in braces, with `head` before the opening brace. `tail` is the last line."""
        self._line(f"{head} {{")
        self._depth += 1
        self._stmt(body)
        self._depth -= 1
        self._line(tail)

    def _stmt(self, stmt: Stmt) -> None:
        match stmt:
            case Seq(stmts=stmts):
                for s in stmts:
                    self._stmt(s)
            case Store(buffer=buffer, indices=indices, value=value):
                self._line(f"{self._place(buffer, indices)} = {self.expression(value)}")
            case For():
                self._for(stmt)
            case Let(var=var, value=value, body=body):
                value_text = self.expression(value)
                within = "" if is_plain(var) else f" within {range_text(var, self._dims)}"
                with self._dims.scope():
                    self._block(f"let {self._dims.bind(var)}{within} = {value_text}", body)
            case When(cond=cond, then=then, orelse=orelse):
                self._block(f"when {self.expression(cond)}", then, "}" if orelse is None else "} else {")
                if orelse is not None:
                    self._depth += 1
                    self._stmt(orelse)
                    self._depth -= 1
                    self._line("}")
            case Allocate(buffer=buffer, body=body):
                type_ = self._buffer_type(buffer)
                with self._values.scope():
                    name = self._values.give(buffer, buffer.name)
                    self._block(f"alloc {buffer.scope.value} {name}: {type_}", body)
            case Tile(op=op, operands=operands, dims=dims):
                text = f"tile {json.dumps(op.name)}({', '.join(self._place(o.buffer, o.indices) for o in operands)})"
                text += f" dims({dims_text(dims, self._dims)})" if dims else ""
                fields = stated_fields(op)
                text += f" {{{attributes_text(fields, self._dims)}}}" if fields else ""
                self._line(text)
            case Attention():
                self._line(self._operation("attention", stmt))

    def _operation(self, name: str, node: Attention | Paged | Ragged) -> str:
        """Print a node by its fields: `name(field=operand, ...) {parameter=value, ...}`. Fields at their defaults are left out."""
        held = {part.name: part.what for part in parts(type(node))}
        stated = {f.name: value for f in fields(node) if (value := getattr(node, f.name)) != f.default}
        operands = ", ".join(f"{field}={self._field(held[field], value)}" for field, value in stated.items() if field in held)
        parameters = {field: value for field, value in stated.items() if field not in held}
        return f"{name}({operands})" + (f" {{{attributes_text(parameters, self._dims)}}}" if parameters else "")

    def _field(self, what: Holds, value: Any) -> str:
        match what:
            case Holds.BUFFER:
                return self._values.of(value, value.name)
            case Holds.SCALAR:
                return self.expression(value)
            case _:
                return self._operation(type(value).__name__.lower(), value)

    def _for(self, loop: For) -> None:
        """Print a loop. Loops of the same kind that are directly inside it share its header."""
        with self._dims.scope():
            axes = [self._axis(loop.var, loop.extent)]
            body = loop.body
            while isinstance(body, For) and body.kind is loop.kind:
                axes.append(self._axis(body.var, body.extent))
                body = body.body
            kind = "" if loop.kind is LoopKind.SERIAL else f"{loop.kind.value} "
            self._block(f"for {kind}{', '.join(axes)}", body)

    def _axis(self, var: DimVar, extent: Dim) -> str:
        """Print a variable and its extent, and name the variable. The declared range is printed only if it differs from 0 .. extent - 1."""
        text = self._dims.text(extent)
        usual = var.lower == 0 and var.multiple_of == 1 and var.upper is not None and Dim.of(var.upper) == extent - 1
        within = "" if usual else f" within {range_text(var, self._dims)}"
        return f"{self._dims.bind(var)} in {text}{within}"

    # --- scalars -------------------------------------------------------------------------------------------------------

    def expression(self, scalar: Scalar) -> str:
        """Print a whole expression. The values that need a name (`_shared`) come before it, in a `let`."""
        shared = _shared(scalar, self._named)
        if not shared:
            return self._part(scalar)
        outer = set(self._named)
        with self._values.scope():
            named: list[str] = []
            for value in shared:
                text = self._part(value)
                named.append(f"{self._values.give(value, 't')} = {text}")
                self._named.add(value)
            text = f"let {', '.join(named)} in {self._part(scalar)}"
        self._named = outer
        return text

    def _part(self, scalar: Scalar, loosest: int = _REDUCTION) -> str:
        """Print a part of an expression, in parentheses if its operator is looser than `loosest`."""
        if scalar in self._named:
            return self._values.of(scalar, "t")
        text, precedence = self._scalar(scalar)
        return f"({text})" if precedence < loosest else text

    def _scalar(self, scalar: Scalar) -> tuple[str, int]:
        """Return the text of a scalar and its precedence."""
        match scalar:
            case scalars.Const(value=value, dtype=dtype):
                return number_text(value, dtype), _ATOM
            case scalars.ScalarParam(name=name):
                return self._values.of(scalar, name), _ATOM
            case scalars.Load(buffer=buffer, indices=indices):
                return self._place(buffer, indices), _ATOM
            case scalars.Fold():
                with self._dims.scope():
                    return form_of(scalar).print(scalar, self._kinds), _REDUCTION
            case scalars.DimScalar() | scalars.Guard() | scalars.Cast() | scalars.Element():
                return form_of(scalar).print(scalar, self._kinds), _ATOM
            case scalars.Apply():
                return self._apply(scalar)

    def _bracketed(self, values: Sequence[Scalar]) -> str:
        return f"[{', '.join(map(self.expression, values))}]"

    def _condition(self, condition: tuple[Dim, Dim, Dim]) -> str:
        low, index, high = map(self._dims.text, condition)
        return f"{low} <= {index} < {high}"

    def _apply(self, apply: scalars.Apply) -> tuple[str, int]:
        """Return the text of a function of scalars, as an operator if it has a symbol, and its precedence."""
        fn, args = apply.fn, apply.args
        if len(args) == ARITY[fn] and fn in INFIX:
            symbol, precedence = INFIX[fn]
            left = self._part(args[0], precedence + (precedence == COMPARISON))
            return f"{left} {symbol} {self._part(args[1], precedence + 1)}", precedence
        if len(args) == ARITY[fn] and fn in PREFIX:
            # `-1.0` is a number, so the negation of a number is written `-(1.0)`.
            number = isinstance(args[0], scalars.Const) and args[0].dtype is not DType.BOOL
            operand = self._part(args[0], _ATOM + 1 if number else PREFIX_PRECEDENCE)
            return f"{PREFIX[fn]}{operand}", PREFIX_PRECEDENCE
        return f"{fn.value}({', '.join(self._part(a) for a in args)})", _ATOM

    def _place(self, buffer: Buffer, indices: tuple[Dim, ...]) -> str:
        return f"{self._values.of(buffer, buffer.name)}[{dims_text(indices, self._dims)}]"


def header(head: str, tail: str) -> list[str]:
    """Return the first lines of a function, including the opening brace. `tail` has the clauses after the signature, which begin on a line
    of their own, or is empty."""
    if not tail:
        return wrap(f"{head} {{", 0)
    return [*wrap(head, 0), *wrap(f"{tail} {{", 2)]


def _shared(scalar: Scalar, named: set[Scalar]) -> list[Scalar]:
    """Return the values that need a name, inner ones first: values with several uses that are long when written out, or that are
    reductions. The values in `named` have names already, and values that are used only inside a reduction get their names there."""
    uses: dict[Scalar, int] = {}
    pending, inside = [scalar], {scalar}
    while pending:
        node = pending.pop()
        for inner in () if isinstance(node, scalars.Fold) or node in named else subscalars(node):
            uses[inner] = uses.get(inner, 0) + 1
            if inner not in inside:
                inside.add(inner)
                pending.append(inner)
    if all(count == 1 for count in uses.values()):
        return []
    shared: list[Scalar] = []
    sizes: dict[Scalar, int] = {}  # number of nodes in the text of each scalar
    for node in inside_out(scalar):
        size = 1 if node in named else 1 + sum(sizes[inner] for inner in subscalars(node))
        if uses.get(node, 0) > 1 and (size >= _NAMED_FROM or isinstance(node, scalars.Fold)):
            shared.append(node)
            size = 1
        sizes[node] = size
    return shared
