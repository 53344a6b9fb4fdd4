"""The vocabulary that printer and parser share: words, operators and their precedence, and the syntax of names."""

from __future__ import annotations

import re

from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, ScalarValue, ShapeValue
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Value
from compiler.ir.graph.values import Alloc, CallLibrary, CallTir, Copy, Launch, MatchCast
from compiler.ir.loops.functions import Fn
from compiler.ir.types import TupleType, Type

LINE_WIDTH = 120

# The last component of a dotted name contains a letter or `_`, so `tuple.0` is a field of a tuple and `layers.0.bias` is a single name.
NAME = r"[A-Za-z_]\w*(?:(?:\.\w+)*\.\w*[A-Za-z_]\w*)?"
_NAME = re.compile(NAME, re.ASCII)

# Words that cannot be names of variables, buffers and parameters, because the grammar uses them where such a name could stand. Names of
# functions may be any words.
RESERVED = frozenset(
    (
        *("true", "false", "none", "nan", "inf", "const", "shape", "dim"),
        *("call", "call_tir", "call_tir_inplace", "call_library", "match_cast", "alloc", "launch"),
        *("if", "else", "return", "dataflow", "captured"),
        *("for", "let", "when", "tile", "in", "within", "by", "beside", "where", "arena", "attrs"),
        *("impure", "func", "prim"),
        *DType,
    )
)

# fn -> (symbol, precedence); a higher precedence binds tighter. Comparisons do not chain; all other operators are left-associative.
INFIX: dict[Fn, tuple[str, int]] = {
    Fn.OR: ("|", 1),
    Fn.XOR: ("^", 2),
    Fn.AND: ("&", 3),
    Fn.LT: ("<", 4),
    Fn.LE: ("<=", 4),
    Fn.EQ: ("==", 4),
    Fn.NE: ("!=", 4),
    Fn.SHL: ("<<", 5),
    Fn.SHR: (">>", 5),
    Fn.ADD: ("+", 6),
    Fn.SUB: ("-", 6),
    Fn.MUL: ("*", 7),
    Fn.DIV: ("/", 7),
    Fn.FLOORDIV: ("//", 7),
    Fn.MOD: ("%", 7),
}
LOOSEST, COMPARISON = 1, 4  # the lowest precedence, and that of comparisons
PREFIX: dict[Fn, str] = {Fn.NEG: "-", Fn.NOT: "~"}
PREFIX_PRECEDENCE = 8

ARITY: dict[Fn, int] = {
    **dict.fromkeys(Fn, 1),
    **dict.fromkeys(INFIX, 2),
    Fn.MIN: 2,
    Fn.MAX: 2,
    Fn.POW: 2,
    Fn.FMA: 3,
    Fn.SELECT: 3,
}


def is_word(text: str) -> bool:
    """Return whether the lexer reads the text as one word."""
    return _NAME.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Return whether the text can name a variable, a buffer or a parameter."""
    return is_word(text) and text not in RESERVED


def stated_type(value: Value) -> Type | None:
    """Return the annotation that the text of the value states by itself, so that the binding need not repeat it, or None."""
    match value:
        case MatchCast(type=type_) | Alloc(type=type_):
            return type_
        case CallTir(out=out) | CallLibrary(out=out):
            return out[0] if len(out) == 1 else TupleType(out)
        case Launch():
            return TupleType(())
        case Constant() | ShapeValue() | ScalarValue():
            return type_of(value)
        case Copy(value=Constant() | ShapeValue() | ScalarValue() as atom):
            return type_of(atom)
        case _:
            return None
