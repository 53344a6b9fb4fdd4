"""The printer. The printer writes programs in the language described at the top of parser.py. Printing is deterministic and gives variables
unique names, so parsing the text yields an equal program (equal.py)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.function import Binding, BlockKind, Body, Function, If, Value
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallLibrary, CallTir, Copy, Launch, MakeTuple, MatchCast, TupleGet
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar, ScalarParam
from compiler.ir.loops.statements import Allocate, For, Let, Seq, Stmt, Store, Tile, When
from compiler.ir.module import IRModule
from compiler.ir.op import REQUIRED
from compiler.ir.text.forms import form_of
from compiler.ir.text.printer_loops import LoopPrinter, header
from compiler.ir.text.printer_types import (
    attribute_text,
    attributes_text,
    dims_text,
    function_name,
    number_text,
    ranges_text,
    type_text,
)
from compiler.ir.text.syntax import stated_type
from compiler.ir.types import FuncType, ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type

Arrays = dict[str, NDArray[Any]]

_LITERAL_ELEMENTS = 16  # constants of at most this many elements are written out
_DIGEST_BYTES = 1024  # constants of at least this many bytes are written as a digest, if `arrays` was passed
_BASE64_COLUMNS = 96


def print_module(module: IRModule, arrays: Arrays | None = None) -> str:
    """Print a module. With `arrays`, write large constants as digests and add the constants to `arrays`, for `parse` to look up. Without
    `arrays`, write all constants out. Raise TypeError if an attribute has a value that the text cannot express."""
    return "\n\n".join(print_function(name, func, arrays) for name, func in module.functions.items()) + "\n"


def print_function(name: str, func: Function | PrimFunc, arrays: Arrays | None = None) -> str:
    printer = _Printer(arrays)
    return "\n".join(printer.prim(name, func) if isinstance(func, PrimFunc) else printer.function(name, func))


def print_binding(binding: Binding) -> str:
    return "\n".join(_Printer({}).binding(binding))


def print_stmt(stmt: Stmt) -> str:
    return "\n".join(_Printer({}).stmt(stmt))


def print_scalar(scalar: Scalar) -> str:
    return _Printer({}).expression(scalar)


def print_node(node: object) -> str:
    """Print a module or any part of one, for messages. Large constants are written as digests, and variables that are defined outside of
    the part get names as if the part defined them."""
    match node:
        case IRModule():
            return print_module(node, {})
        case Function() | PrimFunc():
            return print_function("_", node, {})
        case Binding():
            return print_binding(node)
        case For() | Let() | Store() | Seq() | When() | Allocate() | Tile() | Attention():
            return print_stmt(node)
        # a bare name could be mistaken for a variable of the graph level, so a ScalarParam prints as its repr
        case _ if isinstance(node, Scalar) and not isinstance(node, ScalarParam):
            return print_scalar(node)
        case TensorType() | ShapeType() | ScalarType() | TupleType() | FuncType() | ObjectType():
            return type_text(node)
        case _ if isinstance(node, Value):
            return _Printer({}).value(node)
        case _:
            return str(node)


def canonical_text(name: str, func: Function | PrimFunc, *, ranges: bool = True) -> str:
    """Print a function so that the text is equal for functions that differ only in the names of variables, or in the boundaries of
    match_casts. Large constants are written as digests. Without `ranges`, the text of a graph-level function has no declared ranges of
    symbolic variables, apart from those in function types."""
    printer = _Printer({}, canonical=True, ranges=ranges)
    return "\n".join(printer.prim(name, func) if isinstance(func, PrimFunc) else printer.function(name, func))


class _Printer(LoopPrinter):
    """Prints functions of both levels. `canonical` and `ranges` mean what `canonical_text` says."""

    def __init__(self, arrays: Arrays | None, *, canonical: bool = False, ranges: bool = True) -> None:
        super().__init__(canonical=canonical)
        self._ranges = ranges
        self._arrays = arrays
        self._kinds |= {
            "arguments": lambda args: f"({self._atoms(args)})",
            "atom": self._atom,
            "attrs": self._attrs,
            "boundary": lambda name: f" at {json.dumps(name)}" if name and not canonical else "",
            "defining": self._type,
            "function": lambda name: f"@{function_name(name)}",
            "outputs": self._outputs,
            "reused": lambda numbers: f"[{', '.join('_' if i is None else str(i) for i in numbers)}]",
            "string": json.dumps,
            "type": self._type,
        }

    # --- functions -----------------------------------------------------------------------------------------------------

    def function(self, name: str, func: Function) -> list[str]:
        """Return the lines of a graph-level function."""
        weights = set(func.weights)
        params = ", ".join(self._func_param(p, weight=p in weights) for p in func.params)
        head = f"{'' if func.pure else 'impure '}func {function_name(name)}({params}) -> {self._type(func.result_type)}"
        self._depth = 1
        self._body(func.body)
        ranges = ranges_text(self._dims) if self._ranges else ""
        clauses = [f"where {ranges}"] if ranges else []
        if func.arena is not None:
            clauses.append(f"arena {self._dims.text(func.arena)}")
        return [*header(head, " ".join(clauses)), *self._lines, "}"]

    def _func_param(self, param: Var, *, weight: bool) -> str:
        return f"{'weight ' if weight else ''}{self._values.of(param, param.name)}: {self._type(param.type)}"

    def _type(self, type_: Type) -> str:
        return type_text(type_, self._dims)

    def _body(self, body: Body) -> None:
        for block in body.blocks:
            if block.kind is BlockKind.PLAIN:
                self._bindings(block.bindings)
            else:
                self._line(f"{block.kind.value} {{")
                self._depth += 1
                self._bindings(block.bindings)
                self._depth -= 1
                self._line("}")
        self._line(f"return {self._atom(body.result)}")

    def _bindings(self, bindings: Sequence[Binding]) -> None:
        for b in bindings:
            self.binding(b)

    # --- bindings ------------------------------------------------------------------------------------------------------

    def binding(self, binding: Binding) -> list[str]:
        """Add the lines of a binding, and return all lines so far."""
        value = binding.value
        if isinstance(value, Launch):
            self._line(self.value(value))
            return self._lines
        # Print the value first, so that the names in the value precede the name that the binding defines.
        text = self.value(value) if not isinstance(value, If) else f"if {self._atom(value.cond)} {{"
        var = binding.var
        type_ = self._type(var.type)
        stated = stated_type(value)
        annotation = "" if stated is not None and self._type(stated) == type_ else f": {type_}"
        self._line(f"{self._values.give(var, var.name)}{annotation} = {text}")
        if isinstance(value, If):
            self._branch(value.then)
            self._line("} else {")
            self._branch(value.orelse)
            self._line("}")
        return self._lines

    def _branch(self, body: Body) -> None:
        self._depth += 1
        self._body(body)
        self._depth -= 1

    def value(self, value: Value) -> str:
        """Return the text of a value; for an If, without its branches."""
        match value:
            case Var() | Constant() | ShapeValue() | ScalarValue() | FuncRef():
                return self._atom(value)
            case Copy(value=atom):
                return self._atom(atom)
            case Call():
                return self._call(value)
            case CallTir() | CallLibrary() | MatchCast() | Alloc() | Launch():
                return form_of(value).print(value, self._kinds)
            case CallFunc(callee=FuncRef(name=name), args=args):
                return f"@{function_name(name)}({self._atoms(args)})"
            case CallFunc(callee=callee, args=args):
                return f"call {self._atom(callee)}({self._atoms(args)})"
            case MakeTuple(fields=fields):
                return f"({self._atoms(fields)})"
            case TupleGet(value=atom, index=index):
                return f"{self._atom(atom)}.{index}"
            case If(cond=cond):
                return f"if {self._atom(cond)}"

    def _call(self, call: Call) -> str:
        """Print an operator call without the attributes that have their defaults."""
        operands = [self._atom(a) for a in call.args]
        for name in sorted(call.attrs):
            text = attribute_text(name, call.attrs[name], self._dims)
            default = call.op.attributes.get(name, REQUIRED)
            if default is REQUIRED or text != attribute_text(name, default, self._dims):
                operands.append(text)
        return f"{call.op.name}({', '.join(operands)})"

    def _attrs(self, attrs: Mapping[str, Any]) -> str:
        return f" {{{attributes_text(attrs, self._dims)}}}" if attrs else ""

    def _outputs(self, out: Sequence[Type]) -> str:
        return self._type(out[0]) if len(out) == 1 else f"({', '.join(map(self._type, out))})"

    # --- atoms ---------------------------------------------------------------------------------------------------------

    def _atoms(self, atoms: Sequence[Atom]) -> str:
        return ", ".join(map(self._atom, atoms))

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var(name=name):
                return self._values.of(atom, name)
            case Constant(data=data):
                return f"const {self._constant(data)}"
            case ShapeValue(dims=dims):
                return f"shape[{dims_text(dims, self._dims)}]"
            case FuncRef(name=name):
                return f"@{function_name(name)}"
            case ScalarValue(value=value, dtype=name):
                dtype = DType(name)
                return self._dim_atom(value, dtype) if isinstance(value, Dim) else number_text(value, dtype)

    def _dim_atom(self, dim: Dim, dtype: DType) -> str:
        """Print a dimension as an atom. A number or a bare variable needs no `dim(...)`, unless a value has the same name."""
        text = self._dims.text(dim)
        bare = dim.is_const or (dim.var is not None and not self._values.is_used(text))
        if dtype is DType.I64 and bare:
            return text
        return f"dim({text})" if dtype is DType.I64 else f"dim({text}):{dtype}"

    def _constant(self, data: NDArray[Any]) -> str:
        """Print the type and the elements of a constant. At most _LITERAL_ELEMENTS elements are written as numbers, if parsing these gives
        the same bits. Any other constant of at least _DIGEST_BYTES bytes is written as a digest, if `arrays` is not None. All others are
        written in base64."""
        dtype = DType.from_numpy(data.dtype)
        type_ = f"{dtype}[{', '.join(map(str, data.shape))}]"
        if data.size <= _LITERAL_ELEMENTS and (literal := _literal(data, dtype)):
            return f"{type_} {literal}"
        content = np.ascontiguousarray(data).tobytes()
        if self._arrays is not None and len(content) >= _DIGEST_BYTES:
            digest = hashlib.sha256(content).hexdigest()
            self._arrays[f"{type_} {digest}"] = data
            return f'{type_} digest "{type_} {digest}"'
        text = base64.b64encode(content).decode()
        pieces = [text[i : i + _BASE64_COLUMNS] for i in range(0, len(text), _BASE64_COLUMNS)] or [""]
        return f"{type_} base64 {' '.join(json.dumps(p) for p in pieces)}"


def _literal(data: NDArray[Any], dtype: DType) -> str | None:
    """Return the elements as a nested list, or None if parsing them would not give the same bits (a NaN with a payload)."""
    numbers = [data[i].item() if not dtype.is_float else float(str(data[i])) for i in np.ndindex(data.shape)]
    if np.array(numbers, data.dtype).tobytes() != np.ascontiguousarray(data).tobytes():
        return None
    texts = iter([number_text(n, DType.F32 if dtype.is_float else DType.I64 if dtype.is_int else dtype) for n in numbers])
    return _nested(data.shape, texts)


def _nested(shape: tuple[int, ...], texts: Iterator[str]) -> str:
    return f"[{', '.join(_nested(shape[1:], texts) for _ in range(shape[0]))}]" if shape else next(texts)
