"""The language of programs as text, and its parser. `printer.print_module` writes what `parse` reads.

    Module     ::= (Func | Prim)*                                        line breaks are spaces; `#` begins a comment
    Func       ::= ["impure"] "func" Name "(" Param,* ")" "->" Type [Where] ["arena" Dim] "{" Body "}"
    Param      ::= ["weight"] Name ":" Type                              weights come last and are bound once
    Where      ::= "where" (Name "in" Range),+
    Range      ::= Int ".." [Dim] ["by" Int]                             both ends are included

    Type       ::= (DType | "any") "[" Shape "]" | "shape" "[" Shape "]" | "scalar" "[" (DType | "any") ["," Dim] "]"
                 | "tuple" "[" Type,* "]" | "object"
                 | ["impure"] "fn" ["[" (Name "in" Range),+ "]"] "(" (Type,* | "...") ")" "->" Type
    DType      ::= "f32" | "f16" | "bf16" | "e4m3" | "i8" | "i16" | "i32" | "i64" | "u8" | "u32" | "bool"
    Shape      ::= Dim,* | "ndim" "=" Int | "..."
    Dim        ::= Int | Name | "-" Dim | Dim ("+" | "-" | "*" | "//" | "%") Dim | ("min" | "max") "(" Dim,+ ")" | "(" Dim ")"

    Body       ::= (Binding | ("dataflow" | "captured") "{" Binding* "}")* "return" Atom
    Binding    ::= Name [":" Type] "=" Value | Launch                    an annotation that is left out is deduced
    Value      ::= Atom | Name "(" (Atom | Attr),* ")"                   an operator; attributes come last
                 | ("call" Name | "@" Name) "(" Atom,* ")"               a function: a variable, or one of the module
                 | call_tir, call_tir_inplace, call_library, match_cast, alloc: see forms.py
                 | "(" Atom,* ")" | Name "." Int                         a tuple, a field of one
                 | "if" Atom "{" Body "}" "else" "{" Body "}"
    Launch     ::= "launch" ...: see forms.py
    Atom       ::= Name                                                  a variable, or else a dimension as a number
                 | "dim" "(" Dim ")" [":" DType] | Number [":" DType] | "true" | "false"
                 | "shape" "[" Dim,* "]" | "@" Name
                 | "const" DType "[" Int,* "]" (Array | "base64" String+ | "digest" String)
    Array      ::= Number | "true" | "false" | "[" Array,* "]"
    Attr       ::= (Name | String) "=" AttrValue
    AttrValue  ::= Number | String | "true" | "false" | "none" | DType | "dim" "(" Dim ")" | "[" AttrValue,* "]"

    Prim       ::= "prim" Name "(" PrimParam,* ")" [Where] ["attrs" "{" Attr,* "}"] Block
    PrimParam  ::= ["out"] Name ":" DType "[" Dim,* "]" | Name ":" "scalar" DType | Name ":" "dim"
    Block      ::= "{" Stmt* "}"
    Stmt       ::= "for" [Kind] Axis,+ Block                             several axes are nested loops
                 | "let" Name ["within" Range] "=" Scalar Block
                 | Place "=" Scalar
                 | "when" Scalar Block ["else" Block]
                 | "alloc" ("global" | "local" | "shared" | "counters") Name ":" DType "[" Dim,* "]" Block
                 | "tile" String "(" Place,* ")" ["dims" "(" Dim,* ")"] ["{" Attr,* "}"]
                 | "attention" "(" Operand,* ")" ["{" Attr,* "}"]
    Operand    ::= Name "=" (Scalar | ("paged" | "ragged") "(" Operand,* ")" ["{" Attr,* "}"])
    Kind       ::= "serial" | "parallel" | "vector" | "unroll" | "block" | "thread"
    Axis       ::= Name "in" Dim ["within" Range]                        runs over 0 .. Dim - 1
    Place      ::= Name "[" Dim,* "]"
    Scalar     ::= Number [":" DType] | "true" | "false" | Name | Place
                 | dim, cast, guard, stored, contract, contract_groups: see forms.py | Scalar Infix Scalar | ("-" | "~") Scalar | "(" Scalar
                 ")" | Fn "(" Scalar,* ")" | ReduceFn "(" Axis,+ ")" Scalar reaches as far to the right as it can | "let" (Name "="
                 Scalar),+ "in" Scalar reaches as far; each value is computed once
    Infix      ::= "|" | "^" | "&" | "<" "<=" "==" "!=" | "<<" ">>" | "+" "-" | "*" "/" "//" "%"      loosest first

`X,*` stands for any number of X with commas between them, and `X,+` for at least one. A name is a word that may contain dots. The name of a
function may also be any quoted string. A dimension is defined where a parameter or a match_cast first mentions it, or by the loop, the
reduction or the let that names it. A number without a type is an i64 if it is an integer, else an f32.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from compiler.ir.dims import DimVar
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.deduce import deduce, require_alike
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, If, Value
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.text.lexer import Kind, Token
from compiler.ir.text.parser_types import DimScope
from compiler.ir.text.parser_values import Arrays, ValueParser
from compiler.ir.text.syntax import stated_type
from compiler.ir.types import FuncType, TupleType, Type


def parse(text: str, arrays: Arrays | None = None) -> IRModule:
    """Parse the text. `arrays` has the constants of which the text contains only digests. Raise a ParseError that points at a mistake.
    Signatures are read first, so the mistake need not be the first one in the text. The result is not verified."""
    return _Parser(text, arrays or {}).module()


@dataclass(frozen=True, slots=True)
class _Header:
    """The signature of a function, read before its body."""

    params: tuple[Var, ...]
    num_inputs: int | None
    result: Type
    pure: bool
    scope: DimScope


class _Parser(ValueParser):
    """Reads modules, and the bodies of graph-level functions."""

    def __init__(self, source: str, arrays: Arrays) -> None:
        super().__init__(source, arrays)
        self._signatures: dict[str, FuncType] = {}
        self._reading = ""  # name of the function whose body is being read

    # --- modules -------------------------------------------------------------------------------------------------------

    def module(self) -> IRModule:
        """Read the module. The signatures of all graph-level functions are read first, so that the annotation of a call can be deduced even
        if its callee comes later."""
        headers: dict[str, tuple[int, _Header | None, int]] = {}
        while not self.at_kind(Kind.END):
            name, header = self._header(headers)
            start = self.at_token
            self.skip_to("impure", "func", "prim")
            headers[name] = (start, header, self.at_token)
        functions: dict[str, Function | PrimFunc] = {}
        for name, (start, header, end) in headers.items():
            self.at_token, self._reading = start, name
            functions[name] = self.prim() if header is None else self._function_body(header)
            if self.at_token != end:
                raise self.error(f"expected 'func' or 'prim', found {self.peek()}")
        return IRModule(functions)

    def _header(self, known: Collection[str]) -> tuple[str, _Header | None]:
        """Read the name of the next function and, of a graph-level function, the signature. `known` has the names of the functions
        before."""
        pure = not self.accept("impure")
        graph = self.accept("func")
        if not graph and (not pure or not self.accept("prim")):
            raise self.error(f"expected {'func or prim' if pure else 'func'}, found {self.peek()}")
        token = self.peek()
        name = self.function_name()
        if name in known:
            raise self.error(f"function {name} is defined twice", token)
        if not graph:
            return name, None
        header = self._func_header(pure=pure)
        self._signatures[name] = FuncType(tuple(p.type for p in header.params), header.result, pure)
        return name, header

    def _func_header(self, *, pure: bool) -> _Header:
        """Read the ranges that follow the annotation of the result. Then go back, and read the parameters and this annotation."""
        self.scope, self._values = DimScope(), {}
        self.where_ahead()
        self.expect("(", "before the parameters")
        weights: list[Token] = []
        params = tuple(self.items(")", lambda: self.with_undefined(self.define, lambda: self._func_param(weights))))
        self.expect("->", "before the annotation of the result")
        result = self.type()
        num_inputs = len(params) - len(weights) if weights else None
        return _Header(params, num_inputs, result, pure, self.scope)

    def _func_param(self, weights: list[Token]) -> Var:
        """Read a parameter. Add its name to `weights` if it is a weight."""
        weight = self.at("weight") and self.at_kind(Kind.NAME, ahead=1)
        if weight:
            self.take()
        name = self.name("the name of a parameter")
        if weight:
            weights.append(name)
        elif weights:
            raise self.error(f"parameter {name.text} follows a weight; weights come last", name)
        self.expect(":", f"after parameter {name.text}")
        return self._new_value(name, self.type())

    def _function_body(self, header: _Header) -> Function:
        """Read the size of the arena, if it is stated, and the body. The ranges, which precede the arena, were read with the header."""
        self.scope = header.scope
        self._values = {p.name: p for p in header.params}
        self.skip_to("arena", "{")
        arena = self.dim() if self.accept("arena") else None
        self.expect("{", "before the body")
        body = self._body()
        self.check_announced()
        return Function(header.params, body, header.result, header.pure, header.num_inputs, arena)

    # --- bodies --------------------------------------------------------------------------------------------------------

    def _body(self) -> Body:
        """Read a body including its closing brace. Variables that the body defines are not visible after it."""
        with self.nested:
            values, defined = dict(self._values), dict(self.scope.defined)
            blocks: list[Block] = []
            plain: list[Binding] = []
            while not self.at("return"):
                if not self.at("dataflow", "captured"):
                    plain.append(self._binding())
                    continue
                if plain:
                    blocks.append(Block(tuple(plain)))
                    plain = []
                blocks.append(self._block(BlockKind(self.take().text)))
            if plain:
                blocks.append(Block(tuple(plain)))
            self.take()
            result = self.atom()
            self.expect("}", "after the result; 'return' ends a body")
            self._values, self.scope.defined = values, defined
            return Body(tuple(blocks), result)

    def _block(self, kind: BlockKind) -> Block:
        self.expect("{", f"after {kind.value}")
        bindings: list[Binding] = []
        while not self.accept("}"):
            bindings.append(self._binding())
        return Block(tuple(bindings), kind)

    def _if(self) -> If:
        cond = self.atom()
        self.expect("{", "after the condition")
        then = self._body()
        self.expect("else", "after the first branch")
        self.expect("{", "after else")
        return If(cond, then, self._body())

    def _binding(self) -> Binding:
        """Read a binding. An annotation that is neither written nor stated by the value is deduced."""
        if self.at("launch"):
            launch = self.launch()
            return Binding(Var("_", TupleType(())), launch)
        name = self.name("a binding, a block or 'return'")
        announced: list[Token] = []
        type_ = self._annotation(announced) if self.accept(":") else None
        self.expect("=", f"after {name.text}")
        value = self._if() if self.accept("if") else self.value()
        for token in announced:
            if token.text not in self.scope.defined:
                self.reject(token)
        type_ = type_ or stated_type(value) or self._deduced(name, value)
        return Binding(self._new_value(name, type_), value)

    def _annotation(self, announced: list[Token]) -> Type:
        """Read an annotation. It may mention variables that only the match_cast to its right defines; add their names to `announced`, so
        that the caller can check that they are defined."""

        def announce(token: Token) -> DimVar:
            announced.append(token)
            return self.scope.announce(token)

        return self.with_undefined(announce, self.type)

    def _new_value(self, name: Token, type_: Type) -> Var:
        """Define a variable. Its name must be new at this place of the text."""
        if name.text in self._values:
            raise self.error(f"{name.text} is defined twice", name)
        var = self._values[name.text] = Var(name.text, type_)
        return var

    def _deduced(self, name: Token, value: Value) -> Type:
        """Deduce the annotation of the value of binding `name`. Any failure of deduction becomes a ParseError at the name."""
        try:
            if isinstance(value, If):
                require_alike(value, self._signature_of)
            return deduce(value, self._signature_of, set(self.scope.defined.values()))
        except AnnotationError as error:
            raise self.error(f"{name.text}: {error}; in function {self._reading!r}", name) from error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            # An operator's rule may rely on the number and kind of its operands and attributes. The text may state wrong operands or
            # attributes, so the rule may raise any error.
            text = f"{name.text} has no annotation, and its operator cannot take these operands and attributes ({error})"
            raise self.error(text, name) from error

    def _signature_of(self, name: str) -> FuncType:
        if name not in self._signatures:
            raise AnnotationError(f"unknown function {name}; known: {', '.join(self._signatures)}")
        return self._signatures[name]
