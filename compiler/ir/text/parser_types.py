"""The parser of what both levels share: dimensions, annotations, literals and attributes."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.text.lexer import Cursor, Kind, Token
from compiler.ir.types import FuncType, ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type

T = TypeVar("T")


@dataclass(slots=True)
class DimScope:
    """The symbolic variables of one function, by name. `announced` variables were mentioned before their definition, for example in a
    `where` clause, and `awaited` has the names of those that are not yet defined. `defined` variables are visible at this place of the
    text."""

    announced: dict[str, tuple[DimVar, Token]] = field(default_factory=dict[str, tuple[DimVar, Token]])
    defined: dict[str, DimVar] = field(default_factory=dict[str, DimVar])
    awaited: set[str] = field(default_factory=set[str])

    def announce(self, token: Token, var: DimVar | None = None) -> DimVar:
        """Return the announced variable with this name. If there is none, announce `var`, or a new variable without a range."""
        if token.text not in self.announced:
            self.announced[token.text] = (var or DimVar(token.text), token)
            self.awaited.add(token.text)
        return self.announced[token.text][0]

    def define(self, token: Token) -> DimVar:
        """Return the defined variable with this name. If there is none, define the announced one, or else a new variable without a
        range."""
        if token.text not in self.defined:
            self.defined[token.text] = self.announce(token) if token.text in self.announced else DimVar(token.text)
            self.awaited.discard(token.text)
        return self.defined[token.text]


class TypeParser(Cursor):
    """Reads what both levels share. `scope` has the symbolic variables of the function that is being read."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.scope = DimScope()
        self._undefined = self.reject  # handles an undefined variable: rejects, defines or announces it

    # --- dimensions ----------------------------------------------------------------------------------------------------

    def dim(self) -> Dim:
        left = self._product()
        while self.at("+", "-"):
            sign = self.take().text
            right = self._product()
            left = left + right if sign == "+" else left - right
        return left

    def dims(self, close: str) -> tuple[Dim, ...]:
        return tuple(self.items(close, self.dim))

    def _product(self) -> Dim:
        left = self._factor()
        while self.at("*", "//", "%"):
            op = self.take()
            right = self._factor()
            with self._refused(op):
                left = left * right if op.text == "*" else left // right if op.text == "//" else left % right
        return left

    @contextmanager
    def _refused(self, token: Token) -> Generator[None]:
        """Raise a ParseError at the token if the algebra of dimensions refuses an operation."""
        try:
            yield
        except (ZeroDivisionError, ValueError) as error:  # a divisor is always zero, or divisions are nested too deep
            raise self.error(str(error), token) from None

    def _factor(self) -> Dim:
        """Read a number, a variable, a min or max, an expression in parentheses, or the negative of one of these."""
        with self.nested:
            token = self.peek()
            if self.accept("-"):
                return -self._factor()
            if self.accept("("):
                inner = self.dim()
                self.expect(")")
                return inner
            if token.kind is Kind.INT:
                return Dim.of(int(self.take().text))
            if self.at("min", "max") and self.at("(", ahead=1):
                self.take()
                self.take()
                operands = self.dims(")")
                if not operands:
                    raise self.error(f"{token.text} has no operands, expected at least one", token)
                with self._refused(token):
                    return dim_min(*operands) if token.text == "min" else dim_max(*operands)
            return self._variable(self.name("a dimension")).dim

    def _variable(self, token: Token) -> DimVar:
        return self.scope.defined.get(token.text) or self._undefined(token)

    def reject(self, token: Token) -> DimVar:
        raise self.unknown("dimension", token, self.scope.defined)

    def define(self, token: Token) -> DimVar:
        return self.scope.define(token)

    def announce(self, token: Token) -> DimVar:
        return self.scope.announce(token)

    def with_undefined(self, treat: Callable[[Token], DimVar], parse: Callable[[], T]) -> T:
        """Call `parse`, and return its result. Meanwhile, `treat` handles variables that are not defined, for example by `reject`, `define`
        or `announce`."""
        before, self._undefined = self._undefined, treat
        result = parse()
        self._undefined = before
        return result

    # --- ranges --------------------------------------------------------------------------------------------------------

    def where(self) -> None:
        """Read `n in 1..128, m in 0.. by 16`, and announce these variables. An upper end may mention variables that annotations define
        later."""
        while True:
            token = self.name("the name of a dimension")
            if token.text in self.scope.announced:
                raise self.error(f"dimension {token.text} has a range already; state it once, before its first use", token)
            self.expect("in", f"after dimension {token.text}")
            self.scope.announce(token, self.range(token, self.announce))
            if not self.accept(","):
                return

    def check_announced(self) -> None:
        """Raise ParseError if a variable was announced, but is not defined."""
        for name, (_, token) in self.scope.announced.items():
            if name in self.scope.awaited:
                raise self.error(f"dimension {name} has a range, but no parameter or match_cast defines it", token)

    def range(self, name: Token, undefined: Callable[[Token], DimVar]) -> DimVar:
        """Read `lower..upper by k`, where `upper` and `by k` are optional, and return a new variable with this range. `undefined` handles
        undefined variables in the upper end."""
        lower = self.integer("the lower end of a range")
        self.expect("..", "after the lower end of a range")
        upper = self.with_undefined(undefined, self.dim) if self._at_dim() else None
        multiple = 1
        if self.at("by"):
            self.take()
            token = self.peek()
            multiple = self.integer("what the variable is a multiple of")
            if multiple < 1:
                raise self.error(f"dimension {name.text}: its multiple is {multiple}; expected an integer of at least 1", token)
        return DimVar(name.text, lower, upper, multiple)

    def _at_dim(self) -> bool:
        """Return whether the upper end of a range comes next. A range without an upper end may be followed by `by`, `attrs` or `arena`."""
        return self.at_kind(Kind.INT) or self.at("-", "(") or (self.at_kind(Kind.NAME) and not self.at("by", "attrs", "arena"))

    # --- annotations ---------------------------------------------------------------------------------------------------

    def type(self) -> Type:
        """Read an annotation."""
        with self.nested:
            token = self.peek()
            if token.kind is not Kind.NAME:
                raise self.error(f"expected an annotation such as f32[n, 4], found {token}")
            self.take()
            match token.text:
                case "object":
                    return ObjectType()
                case "scalar":
                    self.expect("[", "after scalar")
                    dtype = self._dtype_or_any()
                    value = self.dim() if self.accept(",") else None
                    self.expect("]")
                    return ScalarType(dtype, value)
                case "shape":
                    self.expect("[", "after shape")
                    dims, ndim = self._shape()
                    return ShapeType(dims, ndim)
                case "tuple":
                    self.expect("[", "after tuple")
                    return TupleType(tuple(self.items("]", self.type)))
                case "fn" | "impure":
                    if token.text == "impure":
                        self.expect("fn", "after impure")
                    return self._function(pure=token.text == "fn")
                case _:
                    self.at_token -= 1
                    dtype = self._dtype_or_any()
                    self.expect("[", "after the element type")
                    shape, ndim = self._shape()
                    return TensorType(shape, dtype, ndim)

    def _shape(self) -> tuple[tuple[Dim, ...] | None, int | None]:
        """Read the extents, or `ndim=` and the rank, or `...`, and the closing bracket. Return the extents and the rank, with None for each
        of them that the text does not state."""
        if self.accept("..."):
            self.expect("]")
            return None, None
        if self.at("ndim") and self.at("=", ahead=1):
            self.take()
            self.take()
            ndim = self.integer("a rank")
            if ndim < 0:
                raise self.error(f"the rank is {ndim}, expected at least 0")
            self.expect("]")
            return None, ndim
        dims = self.dims("]")
        return dims, len(dims)

    def _function(self, *, pure: bool) -> FuncType:
        """Read a function type. Its signature has its own variables, and hence a scope of its own."""
        outer, self.scope = self.scope, DimScope()
        if self.accept("["):
            self.where()
            self.expect("]")
        params, result = self.with_undefined(self.define, self._signature)
        self.check_announced()
        self.scope = outer
        return FuncType(params, result, pure)

    def _signature(self) -> tuple[tuple[Type, ...] | None, Type]:
        """Read the parameters and the result of a function type. The parameters are None if the text has `(...)`."""
        self.expect("(", "before the parameters of fn")
        if self.at("...") and self.at(")", ahead=1):
            self.take()
            self.take()
            params = None
        else:
            params = tuple(self.items(")", self.type))
        self.expect("->", "after the parameters of fn")
        return params, self.type()

    def dtype(self) -> DType:
        token = self.take()
        if token.kind is not Kind.NAME or token.text not in set(DType):
            raise self.unknown("element type", token, DType)
        return DType(token.text)

    def _dtype_or_any(self) -> DType | None:
        return None if self.accept("any") else self.dtype()

    # --- literals and attributes ---------------------------------------------------------------------------------------

    def string(self, what: str) -> str:
        """Read a text in quotes. `what` names this text in the message of the error."""
        token = self.peek()
        if token.kind is not Kind.STRING:
            raise self.error(f"expected {what} in quotes, found {token}")
        self.take()
        try:
            return str(json.loads(token.text, strict=False))
        except ValueError:
            raise self.error(f"{token.text} is not a valid string; escapes are those of JSON", token) from None

    def at_number(self) -> bool:
        """Return whether a number comes next, which may be negative, `nan` or `inf`."""
        ahead = int(self.at("-"))
        return self.at_kind(Kind.INT, Kind.FLOAT, ahead=ahead) or self.at("nan", "inf", ahead=ahead)

    def number(self) -> int | float:
        """Read a number, which may be negative, `nan` or `inf`."""
        sign = -1 if self.accept("-") else 1
        token = self.take()
        if token.kind is Kind.INT:
            return sign * int(token.text)
        if token.kind is Kind.FLOAT or token.text in ("nan", "inf"):
            return sign * float(token.text)
        raise self.error(f"expected a number, found {token}", token)

    def attributes(self, close: str) -> dict[str, Any]:
        """Read `name=value, ...` including `close`."""
        attrs: dict[str, Any] = {}
        self.items(close, lambda: self.attribute(attrs))
        return attrs

    def attribute(self, attrs: dict[str, Any]) -> None:
        """Read `name=value` into `attrs`. The name may be a word, also a reserved one, or a string."""
        token = self.peek()
        name = self.string("an attribute") if token.kind is Kind.STRING else self._word("the name of an attribute")
        if name in attrs:
            raise self.error(f"attribute {name} is given twice", token)
        self.expect("=", f"after attribute {name}")
        attrs[name] = self.attribute_value()

    def _word(self, what: str) -> str:
        if not self.at_kind(Kind.NAME):
            raise self.error(f"expected {what}, found {self.peek()}")
        return self.take().text

    def attribute_value(self) -> Any:
        with self.nested:
            token = self.peek()
            if token.kind is Kind.STRING:
                return self.string("a value")
            if self.at_number():
                return self.number()
            if self.accept("["):
                return tuple(self.items("]", self.attribute_value))
            if self.at("dim"):
                return self.bracketed_dim()
            if self.at("true", "false"):
                return self.take().text == "true"
            if self.accept("none"):
                return None
            if token.kind is Kind.NAME and token.text in set(DType):
                return self.dtype()
            raise self.error(f"expected an attribute (a number, string, list, true, false, none, element type or dim(...)), found {token}")

    def bracketed_dim(self) -> Dim:
        """Read `dim(n * 4)`."""
        self.expect("dim")
        self.expect("(", "after dim")
        value = self.dim()
        self.expect(")")
        return value

    # --- lists ---------------------------------------------------------------------------------------------------------

    def items(self, close: str, parse: Callable[[], T]) -> list[T]:
        """Read `a, b, c` including `close`. A trailing comma is allowed."""
        found: list[T] = []
        while not self.accept(close):
            found.append(parse())
            if not self.at(close):
                self.expect(",", f"or {close!r}")
        return found

    def some(self, parse: Callable[[], T]) -> tuple[T, ...]:
        """Read `a, b, c`."""
        found = [parse()]
        while self.accept(","):
            found.append(parse())
        return tuple(found)

    def bracketed(self, parse: Callable[[], T]) -> tuple[T, ...]:
        """Read `[a, b, c]`."""
        self.expect("[")
        return tuple(self.items("]", parse))
