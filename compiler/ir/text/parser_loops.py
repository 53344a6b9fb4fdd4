"""The loop level of the text: `prim` functions, statements and scalars."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, Field, fields
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, parts
from compiler.ir.loops import scalars
from compiler.ir.loops.attention import Attention, Paged, Ragged
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, Tile, When
from compiler.ir.loops.visit import subscalars
from compiler.ir.text.forms import REDUCE, SCALARS, Form, words_of
from compiler.ir.text.lexer import Kind, Token
from compiler.ir.text.parser_types import DimScope, TypeParser
from compiler.ir.text.syntax import ARITY, COMPARISON, INFIX, LOOSEST, PREFIX, PREFIX_PRECEDENCE
from compiler.ir.tiles import TILE_OPS, from_fields

_INFIX = {symbol: (fn, precedence) for fn, (symbol, precedence) in INFIX.items()}
_PREFIX = {symbol: fn for fn, symbol in PREFIX.items()}
_CALLED = {fn.value: fn for fn in Fn if fn not in INFIX and fn not in PREFIX}
_KEYS: dict[str, type] = {"paged": Paged, "ragged": Ragged}
_SCALARS = sorted([*_CALLED, *ReduceFn, "cast", "contract", "contract_groups", "dim", "guard", "stored"])


class LoopParser(TypeParser):
    """Reads the loop level. `kinds` has the function that reads an operand of each kind of a form (forms.py)."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._buffers: dict[str, Buffer] = {}
        self._scalars: dict[str, Scalar] = {}  # parameters, and named values of the present expression
        self._scopes = ExitStack()  # scopes of the variables that the form being read defines; they end with the form
        self.kinds: dict[str, Callable[[], Any]] = {
            "axes": lambda: tuple(self._scopes.enter_context(self._axes(")"))),
            "conditions": lambda: self.some(self._condition),
            "dim": self.dim,
            "dots": lambda: self.bracketed(self._dot),
            "dtype": self.dtype,
            "format": self._format,
            "part": self.scalar,
            "parts": lambda: self.some(self.scalar),
            "reduction": lambda: ReduceFn(self.take().text),
            "whole": self.scalar,
            "wholes": lambda: self.bracketed(self.scalar),
        }

    # --- forms ---------------------------------------------------------------------------------------------------------

    def form(self, form: Form) -> Any:
        """Read a node by its form. Variables that the form defines are visible until its end. An optional operand that is not in the text
        leaves its field at the default."""
        outer, self._scopes = self._scopes, ExitStack()
        found = dict(form.unsaid)
        with self._scopes:
            self._words(form.first, form)
            for field, word, kind, words in form.operands:
                begins_binding = self.at(":", "=", ahead=1)  # then the word is the name of the next binding
                if not word or (not begins_binding and self.accept(word)):
                    found[field] = self.kinds[kind]()
                self._words(words, form)
        self._scopes = outer
        return form.node(**found)

    def _words(self, text: str, form: Form) -> None:
        for word in words_of(text):
            self.expect(word, f"in {form.name}")

    # --- functions -----------------------------------------------------------------------------------------------------

    def prim(self) -> PrimFunc:
        """Read what follows `prim name`: parameters, ranges, attributes, body. The ranges are read first, and skipped when their place in
        the text comes."""
        self.scope, self._buffers, self._scalars = DimScope(), {}, {}
        self.where_ahead()
        self.expect("(", "before the parameters")
        outputs: list[Token] = []
        params = tuple(self.items(")", lambda: self._param(outputs)))
        self.skip_to("attrs", "{")
        attrs = self._attrs() if self.accept("attrs") else {}
        self.check_announced()
        return PrimFunc(params, len(outputs), self.block(), attrs)

    def where_ahead(self) -> None:
        """Read the ranges that follow the parameters, if there are any, then go back to the parameters: a variable gets its range when it
        is created, and parameters create variables."""
        start = self.at_token
        self.skip_to("where", "{")
        if self.accept("where"):
            self.where()
        self.at_token = start

    def _attrs(self) -> dict[str, object]:
        self.expect("{", "after attrs")
        return self.attributes("}")

    def _param(self, outputs: list[Token]) -> Buffer | scalars.ScalarParam | DimVar:
        """Read a parameter. Add its name to `outputs` if it is an output."""
        out = self.at("out") and self.at_kind(Kind.NAME, ahead=1)
        if out:
            self.take()
        name = self.name("the name of a parameter")
        self.expect(":", f"after parameter {name.text}")
        if out:
            outputs.append(name)
        elif self.at("dim"):
            self.take()
            return self.scope.define(name)
        elif self.at("scalar"):
            self.take()
            self._check_new(name)
            self._scalars[name.text] = param = scalars.ScalarParam(name.text, self.dtype())
            return param
        elif outputs:
            raise self.error(f"buffer {name.text} follows an output; outputs are the last buffers", name)
        return self.with_undefined(self.define, lambda: self._buffer(name, Scope.GLOBAL))

    def _buffer(self, name: Token, scope: Scope) -> Buffer:
        """Read the element type and the shape of a buffer, and define the buffer."""
        self._check_new(name)
        dtype = self.dtype()
        self.expect("[", "after the element type")
        buffer = self._buffers[name.text] = Buffer(name.text, self.dims("]"), dtype, scope)
        return buffer

    def _check_new(self, name: Token) -> None:
        if name.text in self._buffers or name.text in self._scalars:
            raise self.error(f"{name.text} is defined twice", name)

    # --- statements ----------------------------------------------------------------------------------------------------

    def block(self) -> Stmt:
        """Read `{ ... }`. A single statement is returned as it is, several as a sequence."""
        with self.nested:
            self.expect("{")
            stmts: list[Stmt] = []
            while not self.accept("}"):
                stmts.append(self._stmt())
            return stmts[0] if len(stmts) == 1 else Seq(tuple(stmts))

    def _stmt(self) -> Stmt:
        """Read one statement."""
        token = self.peek()
        match token.text if token.kind is Kind.NAME else "":
            case "for":
                self.take()
                return self._for()
            case "let":
                self.take()
                return self._let()
            case "when":
                self.take()
                cond = self._whole_scalar()
                then = self.block()
                return When(cond, then, self.block() if self.accept("else") else None)
            case "alloc":
                self.take()
                return self._allocate()
            case "tile":
                self.take()
                return self._tile()
            case "attention" if self.at("(", ahead=1):
                attention: Attention = self._operation(Attention)
                return attention
            case "":
                raise self.error(f"expected a statement or '}}', found {token}")
            case _:
                buffer = self._known_buffer(self.name("a statement (for, let, when, alloc, tile, attention) or a buffer to store to"))
                indices = self._indices()
                self.expect("=", "after the place to store to")
                return Store(buffer, indices, self._whole_scalar())

    def _for(self) -> For:
        """Read what follows `for`. Several variables give nested loops of the same kind."""
        kind = LoopKind.SERIAL
        if not self.at("in", ahead=1):
            kinds = {k.value for k in LoopKind}
            token = self.take()
            if token.kind is not Kind.NAME or token.text not in kinds:
                raise self.unknown("kind of loop", token, kinds)
            kind = LoopKind(token.text)
        with self._axes("{") as axes:
            body = self.block()
        if not axes:
            raise self.error("the loop has no variable, expected at least one such as `i in n`")
        for var, extent in reversed(axes):
            body = For(var, extent, body, kind)
        assert isinstance(body, For)
        return body

    @contextmanager
    def _axes(self, close: str) -> Generator[list[tuple[DimVar, Dim]]]:
        """Read `i in n, j in m` up to `close`, which is not read. The variables are visible inside the `with`. A later extent may use an
        earlier variable."""
        axes: list[tuple[DimVar, Dim]] = []
        names: list[str] = []
        while True:
            name = self._new_variable()
            self.expect("in", f"after {name.text}")
            extent = self.dim()
            var = self._within(name) or DimVar(name.text, 0, extent - 1)
            axes.append((var, extent))
            names.append(name.text)
            self.scope.defined[name.text] = var
            if not self.at(close):
                self.expect(",", f"or {close!r}")
                continue
            break
        yield axes
        for text in names:
            del self.scope.defined[text]

    def _new_variable(self) -> Token:
        name = self.name("the name of a variable")
        if name.text in self.scope.defined:
            raise self.error(f"{name.text} is a variable here already", name)
        return name

    def _within(self, name: Token) -> DimVar | None:
        """Read the range `within ...` of a variable, and return the variable. Return None if no range is stated."""
        return self.range(name, self.reject) if self.accept("within") else None

    def _let(self) -> Let:
        """Read what follows `let`. The variable is visible in the block, not in its own value."""
        name = self._new_variable()
        var = self._within(name) or DimVar(name.text)
        self.expect("=", f"after {name.text}")
        value = self._whole_scalar()
        self.scope.defined[name.text] = var
        body = self.block()
        del self.scope.defined[name.text]
        return Let(var, value, body)

    def _allocate(self) -> Allocate:
        """Read what follows `alloc`. The buffer is visible in the block."""
        scopes = {s.value for s in Scope}
        token = self.take()
        if token.kind is not Kind.NAME or token.text not in scopes:
            raise self.unknown("scope of memory", token, scopes)
        name = self.name("the name of a buffer")
        self.expect(":", f"after {name.text}")
        buffer = self._buffer(name, Scope(token.text))
        body = self.block()
        del self._buffers[name.text]
        return Allocate(buffer, body)

    def _tile(self) -> Tile:
        """Read what follows `tile`."""
        token = self.peek()
        name = self.string("the name of an intrinsic")
        self.expect("(", "before the operands of the tile")
        operands = tuple(self.items(")", lambda: self._load(self.name("a buffer"))))
        dims: tuple[Dim, ...] = ()
        if self.at("dims") and self.at("(", ahead=1):
            self.take()
            self.take()
            dims = self.dims(")")
        if name not in TILE_OPS:
            raise self.unknown("tile intrinsic", token, TILE_OPS)
        try:
            return Tile(from_fields(name, self.attributes("}") if self.accept("{") else {}), operands, dims)
        except ValueError as error:
            raise self.error(str(error), token) from None

    # --- operations ----------------------------------------------------------------------------------------------------

    def _operation(self, node_type: type) -> Any:
        """Read a node from its fields: `name(field=operand, ...) {parameter=value, ...}`. Missing fields get their defaults."""
        name = self.take()
        self.expect("(", f"after {name.text}")
        held = {part.name: part.what for part in parts(node_type)}
        given: dict[str, Any] = {}
        self.items(")", lambda: self._operand_of(name.text, held, given))
        if self.accept("{"):
            parameters = {f.name: f for f in fields(node_type) if f.name not in held}
            self.items("}", lambda: self._parameter_of(name.text, parameters, given))
        for field in fields(node_type):
            if field.name not in given and field.default is MISSING:
                raise self.error(f"{name.text} needs the field {field.name}", name)
        return node_type(**given)

    def _operand_of(self, operation: str, held: dict[str, Holds], given: dict[str, Any]) -> None:
        """Read `field=operand` into `given`. `held` says what each field holds."""
        field = self._field_of(f"operand of {operation}", held, given)
        match held[field]:
            case Holds.BUFFER:
                given[field] = self._known_buffer(self.name(f"a buffer as {field}"))
            case Holds.SCALAR:
                given[field] = self._whole_scalar()
            case _:
                token = self.peek()
                if token.text not in _KEYS:
                    raise self.unknown(f"kind of {field}", token, _KEYS)
                given[field] = self._operation(_KEYS[token.text])

    def _parameter_of(self, operation: str, parameters: dict[str, Field[Any]], given: dict[str, Any]) -> None:
        """Read `parameter=value` into `given`. The value must have the type of the field: a bool, an integer or a float."""
        field = self._field_of(f"parameter of {operation}", parameters, given)
        token = self.peek()
        if parameters[field].type == "bool":
            if token.text not in ("true", "false"):
                raise self.error(f"{field} is {token}, expected true or false", token)
            given[field] = self.take().text == "true"
            return
        value = self.number()
        if parameters[field].type == "int" and isinstance(value, float):
            raise self.error(f"{field} is {token}, expected an integer", token)
        given[field] = value if parameters[field].type == "int" else float(value)

    def _field_of(self, noun: str, known: Iterable[str], given: Container[str]) -> str:
        """Read `name=` of a known field that is not given yet. `noun` says in messages what the field is."""
        token = self.take()
        if token.text not in known:
            raise self.unknown(noun, token, known)
        if token.text in given:
            raise self.error(f"{token.text} is given twice", token)
        self.expect("=", f"after {token.text}")
        return token.text

    # --- scalars -------------------------------------------------------------------------------------------------------

    def _whole_scalar(self) -> Scalar:
        """Read a scalar and check its depth. A chain of operators is read without recursion, but makes a deep tree, which some functions of
        the compiler walk recursively."""
        start = self.peek()
        scalar = self.scalar()
        level = [scalar]
        for _ in range(self.nesting_left):
            level = list(dict.fromkeys(inner for s in level for inner in subscalars(s)))
            if not level:
                return scalar
        raise self.too_deep(start)

    def scalar(self, loosest: int = LOOSEST) -> Scalar:
        """Read an expression whose infix operators have at least the precedence `loosest`. Infix operators are left-associative, and
        comparisons do not chain."""
        left = self._operand()
        while self.at(*_INFIX):
            fn, precedence = _INFIX[self.peek().text]
            if precedence < loosest:
                break
            self.take()
            left = scalars.Apply(fn, (left, self.scalar(precedence + 1)))
            if precedence == COMPARISON and self.at(*(s for s, (_, p) in _INFIX.items() if p == COMPARISON)):
                raise self.error("comparisons do not chain; join two of them with '&'")
        return left

    def _operand(self) -> Scalar:
        """Read an operand of an infix operator. The operand may be a reduction or a `let`, which extend as far to the right as possible."""
        with self.nested:
            token = self.peek()
            if self.at_number() or self.at("true", "false"):
                return self._const()
            if self.at(*_PREFIX):
                return scalars.Apply(_PREFIX[self.take().text], (self.scalar(PREFIX_PRECEDENCE),))
            if self.accept("let"):
                return self._shared()
            if self.accept("("):
                inner = self.scalar()
                self.expect(")")
                return inner
            if token.kind is not Kind.NAME:
                raise self.error(f"expected a scalar, found {token}")
            if self.at("(", ahead=1):
                return self._function_of_scalars()
            if self.at("[", ahead=1):
                return self._load(self.name("a buffer"))
            return self._named_scalar(self.name("a scalar"))

    def _shared(self) -> Scalar:
        """Read `t = exp(A[i]), u = t * t in t + u` after `let`. The last expression extends as far to the right as possible. Each named
        value is one node."""
        names: list[str] = []
        while not names or self.accept(","):
            name = self.name("the name of a value")
            self._check_new(name)
            self.expect("=", f"after {name.text}")
            self._scalars[name.text] = self.scalar()
            names.append(name.text)
        self.expect("in", "or ','")
        scalar = self.scalar()
        for text in names:
            del self._scalars[text]
        return scalar

    def _named_scalar(self, token: Token) -> Scalar:
        """Return the scalar parameter or the named value with this name."""
        if token.text in self._scalars:
            return self._scalars[token.text]
        if token.text in self.scope.defined:
            raise self.error(f"{token.text} is an index; as a number write dim({token.text})", token)
        raise self.unknown("scalar", token, self._scalars)

    def _load(self, token: Token) -> scalars.Load:
        return scalars.Load(self._known_buffer(token), self._indices())

    def _known_buffer(self, token: Token) -> Buffer:
        if token.text not in self._buffers:
            raise self.unknown("buffer", token, self._buffers)
        return self._buffers[token.text]

    def _indices(self) -> tuple[Dim, ...]:
        self.expect("[", "before the indices")
        return self.dims("]")

    def _const(self) -> scalars.Const:
        if self.at("true", "false"):
            return scalars.Const(self.take().text == "true", DType.BOOL)
        value, dtype = self.typed_number()
        return scalars.Const(value, dtype)

    def typed_number(self) -> tuple[int | float, DType]:
        """Read a number. `3` is an i64 and `3.0` an f32 unless the type is written: `3:i32`, `3.0:bf16`."""
        token = self.peek()
        value = self.number()
        if self.at(":") and self.at(*DType, ahead=1):
            self.take()
            dtype = self.dtype()
        else:
            dtype = DType.F32 if isinstance(value, float) else DType.I64
        if isinstance(value, float) and not dtype.is_float:
            raise self.error(f"{value} does not fit {dtype}", token)
        return (float(value) if dtype.is_float else value), dtype

    def _function_of_scalars(self) -> Scalar:
        """Read a word and what follows it in parentheses: a reduction, a form or a function. `min` and `max` are reductions if a variable
        and `in` follow the parenthesis."""
        token = self.take()
        if token.text in set(ReduceFn) and self.at_kind(Kind.NAME, ahead=1) and self.at("in", ahead=2):
            self.at_token -= 1
            return self.form(REDUCE)
        match token.text:
            case word if word in SCALARS:
                self.at_token -= 1
                return self.form(SCALARS[word])
            case name if name in _CALLED:
                self.expect("(")
                args = tuple(self.items(")", self.scalar))
                fn = _CALLED[name]
                if len(args) != ARITY[fn]:
                    raise self.error(f"{name} takes {ARITY[fn]} operands; it is called with {len(args)}", token)
                return scalars.Apply(fn, args)
            case _:
                raise self.unknown("function of scalars", token, _SCALARS)

    def _dot(self) -> scalars.Contraction:
        """Read the contraction of one plane of contract_groups."""
        start = self.peek()
        scalar = self.scalar()
        if not isinstance(scalar, scalars.Contraction):
            raise self.error("contract_groups sums a scalar, expected `contract`", start)
        return scalar

    def _format(self) -> scalars.Format:
        name = self.name("the name of a format")
        if name.text not in scalars.FORMATS:
            raise self.unknown("format", name, scalars.FORMATS)
        return scalars.FORMATS[name.text]

    def _condition(self) -> tuple[Dim, Dim, Dim]:
        low = self.dim()
        self.expect("<=", "in low <= index < high")
        index = self.dim()
        self.expect("<", "in low <= index < high")
        return low, index, self.dim()
