"""The parser of the right-hand sides of graph-level bindings: calls, casts, atoms, constants."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.function import Value
from compiler.ir.graph.values import Call, CallFunc, Copy, Launch, MakeTuple, TupleGet
from compiler.ir.op import OPS, REQUIRED
from compiler.ir.text.forms import LAUNCH, LAUNCH_LIBRARY, VALUES
from compiler.ir.text.lexer import Kind, Token
from compiler.ir.text.parser_loops import LoopParser
from compiler.ir.types import Type

# Large constants, for text that contains only their digests. The key is what the text has in quotes: the type and the digest.
Arrays = Mapping[str, NDArray[Any]]


class ValueParser(LoopParser):
    """Reads the values of graph-level bindings, except for an If. `_values` has the variables that are visible at this place of the
    text."""

    def __init__(self, source: str, arrays: Arrays) -> None:
        super().__init__(source)
        self._arrays = arrays
        self._values: dict[str, Var] = {}
        self.kinds |= {
            "arguments": self._arguments,
            "atom": self.atom,
            "attrs": self._optional_attrs,
            "boundary": self._boundary,
            "defining": lambda: self.with_undefined(self.define, self.type),
            "function": self._global,
            "outputs": self._outputs,
            "reused": lambda: self.bracketed(self._reused),
            "string": lambda: self.string("the name of a library routine"),
            "type": self.type,
        }

    def function_name(self) -> str:
        """Read the name of a function: a word, also a reserved one, or a string."""
        if self.at_kind(Kind.STRING):
            return self.string("a function")
        if not self.at_kind(Kind.NAME):
            raise self.error(f"expected the name of a function, found {self.peek()}")
        return self.take().text

    # --- values --------------------------------------------------------------------------------------------------------

    def value(self) -> Value:
        """Read a value other than an If, whose branches are bodies."""
        token = self.peek()
        match token.text if token.kind is not Kind.STRING else "":
            case "(":
                self.take()
                return MakeTuple(self.atoms())
            case "@" if self.at("(", ahead=2):
                callee = FuncRef(self._global())
                return CallFunc(callee, self._arguments())
            case "call":
                self.take()
                callee = self._variable_named(self.name("the variable to call"))
                return CallFunc(callee, self._arguments())
            case word if word in VALUES:
                return self.form(VALUES[word])
            case _ if token.kind is Kind.NAME and self.at(".", ahead=1):
                value = self.atom()
                self.take()
                return TupleGet(value, self.integer("the number of a field"))
            case _ if token.kind is Kind.NAME and self.at("(", ahead=1) and token.text != "dim":
                return self._operator()
            case _:
                return Copy(self.atom())

    def _operator(self) -> Call:
        """Read a call of an operator. Attributes that are not written get their defaults."""
        token = self.take()
        op = OPS.get(token.text)
        if op is None:
            raise self.unknown("operator", token, OPS)
        self.take()
        args: list[Atom] = []
        attrs: dict[str, Any] = {}
        self.items(")", lambda: self._operand_or_attribute(args, attrs))
        for name in attrs:
            if name not in op.attributes:
                known = ", ".join(op.attributes) or "none"
                raise self.error(f"{op.name} has no attribute {name}; it has: {known}", token)
        missing = [name for name, default in op.attributes.items() if default is REQUIRED and name not in attrs]
        if missing:
            raise self.error(f"{op.name} needs the attribute {', '.join(missing)}", token)
        return Call(op, tuple(args), {**op.attributes, **attrs})

    def _operand_or_attribute(self, args: list[Atom], attrs: dict[str, Any]) -> None:
        if self.at_kind(Kind.NAME, Kind.STRING) and self.at("=", ahead=1):
            self.attribute(attrs)
        elif attrs:
            raise self.error("an operand follows an attribute; attributes come last")
        else:
            args.append(self.atom())

    def _outputs(self) -> tuple[Type, ...]:
        """Read the annotation of one output, or the annotations of several outputs in parentheses."""
        return tuple(self.items(")", self.type)) if self.accept("(") else (self.type(),)

    def launch(self) -> Launch:
        return self.form(LAUNCH_LIBRARY if self.at("library", ahead=1) else LAUNCH)

    def _boundary(self) -> str:
        """Read `at "boundary"`, or return "" if no boundary comes next. `at` may also be the name of the next binding."""
        if not (self.at("at") and self.at_kind(Kind.STRING, ahead=1)):
            return ""
        self.take()
        return self.string("the boundary")

    def _reused(self) -> int | None:
        return None if self.accept("_") else self.integer("an argument or '_'")

    def _optional_attrs(self) -> dict[str, Any]:
        return self.attributes("}") if self.accept("{") else {}

    # --- atoms ---------------------------------------------------------------------------------------------------------

    def _arguments(self) -> tuple[Atom, ...]:
        """Read the arguments of a call, with both parentheses."""
        self.expect("(", "before the arguments")
        return self.atoms()

    def atoms(self) -> tuple[Atom, ...]:
        """Read atoms up to the closing parenthesis, and the parenthesis."""
        return tuple(self.items(")", self.atom))

    def _global(self) -> str:
        """Read `@` and the name of a function of the module."""
        self.expect("@", "before the name of a function")
        return self.function_name()

    def atom(self) -> Atom:
        """Read an atom. A name stands for a graph variable, or else for a symbolic variable, which becomes a scalar."""
        if self.at_number():
            return self._number()
        if self.at("@"):
            return FuncRef(self._global())
        if self.at("true", "false"):
            return ScalarValue(self.take().text == "true", DType.BOOL)
        if self.at("dim"):
            dim = self.bracketed_dim()
            dtype = self.dtype() if self.accept(":") else DType.I64
            return ScalarValue(dim, dtype)
        if self.accept("shape"):
            self.expect("[", "after shape")
            return ShapeValue(self.dims("]"))
        if self.accept("const"):
            return self._constant()
        token = self.name("a variable or a constant")
        if token.text not in self._values and token.text in self.scope.defined:
            return ScalarValue(self.scope.defined[token.text].dim, DType.I64)
        return self._variable_named(token)

    def _variable_named(self, token: Token) -> Var:
        if token.text not in self._values:
            raise self.unknown("variable", token, [*self._values, *self.scope.defined])
        return self._values[token.text]

    def _number(self) -> ScalarValue:
        value, dtype = self.typed_number()
        return ScalarValue(Dim.of(value) if isinstance(value, int) and dtype is DType.I64 else value, dtype)

    # --- constants -----------------------------------------------------------------------------------------------------

    def _constant(self) -> Constant:
        """Read what follows `const`: the element type, the shape, and the elements, their bytes or a digest."""
        dtype = self.dtype()
        self.expect("[", "after the element type")
        start = self.peek()
        shape = tuple(self.items("]", lambda: self.integer("a dimension of the constant")))
        if any(n < 0 for n in shape):
            raise self.error(f"the shape {list(shape)} has a negative dimension", start)
        if self.accept("digest"):
            return self._by_digest(dtype, shape)
        if self.accept("base64"):
            return self._by_bytes(dtype, shape)
        numbers: list[int | float | bool] = []
        self._array(shape, dtype, numbers)
        try:
            return Constant(np.array(numbers, dtype.numpy).reshape(shape))
        except OverflowError:
            raise self.error(f"a number of the constant does not fit {dtype}", start) from None

    def _array(self, shape: tuple[int, ...], dtype: DType, numbers: list[int | float | bool]) -> None:
        """Read elements in nested brackets, one level per axis, and append them to `numbers` in row-major order."""
        with self.nested:
            token = self.peek()
            if shape:
                self.expect("[", f"before {shape[0]} elements")
                found = len(self.items("]", lambda: self._array(shape[1:], dtype, numbers)))
                if found != shape[0]:
                    raise self.error(f"expected {shape[0]} elements, found {found}", token)
            elif dtype is DType.BOOL:
                if not self.at("true", "false"):
                    raise self.error(f"expected true or false, found {token}")
                numbers.append(self.take().text == "true")
            else:
                number = self.number()
                if dtype.is_int and isinstance(number, float):
                    raise self.error(f"{number} does not fit {dtype}", token)
                numbers.append(number)

    def _by_bytes(self, dtype: DType, shape: tuple[int, ...]) -> Constant:
        """Read the bytes of a constant: base64 in one string or several."""
        token = self.peek()
        text = self.string("the bytes")
        while self.at_kind(Kind.STRING):
            text += self.string("the bytes")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.error(f"the constant is not valid base64: {error}", token) from None
        expected = math.prod(shape) * dtype.num_bytes
        if len(data) != expected:
            raise self.error(f"the constant has {len(data)} bytes, expected {expected} for {dtype}{list(shape)}", token)
        return Constant(np.frombuffer(data, dtype.numpy).reshape(shape))

    def _by_digest(self, dtype: DType, shape: tuple[int, ...]) -> Constant:
        """Read the digest of a constant, and look the constant up in the argument `arrays` of `parse`."""
        token = self.peek()
        digest = self.string("a digest")
        array = self._arrays.get(digest)
        if array is None:
            raise self.error(f"the array {digest} is not in the text; pass the arrays with which the text was printed", token)
        if array.shape != shape or array.dtype != dtype.numpy:
            raise self.error(f"the array {digest} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}", token)
        return Constant(array)
