"""Functions of scalars, and folds of many scalars into one."""

from __future__ import annotations

from enum import StrEnum


class Fn(StrEnum):
    """Functions of scalars. Operands of an arithmetic function have one type, which is the result's; comparisons give bool."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"  # floats only
    FLOORDIV = "floordiv"
    MOD = "mod"
    MIN = "min"  # a NaN operand gives NaN
    MAX = "max"
    POW = "pow"
    FMA = "fma"  # a * b + c, rounded once
    NEG = "neg"
    ABS = "abs"
    EXP = "exp"
    LOG = "log"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    TANH = "tanh"
    ERF = "erf"
    SIN = "sin"
    COS = "cos"
    FLOOR = "floor"
    ROUND = "round"  # half to even
    LT = "lt"
    LE = "le"
    EQ = "eq"
    NE = "ne"
    AND = "and"  # bool, or bitwise on integers
    OR = "or"
    XOR = "xor"
    NOT = "not"
    SHL = "shl"
    SHR = "shr"  # arithmetic on signed, logical on unsigned
    BITS = "bits"  # of an f32, as an i32
    OF_BITS = "of_bits"  # the f32 whose bits an i32 holds
    SELECT = "select"  # cond, a, b; both sides are evaluated, so both must be safe


class ReduceFn(StrEnum):
    """Associative folds with their identities. ARGMAX and ARGMIN give the first index (i64) that attains the extreme."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    ANY = "any"
    ALL = "all"
    ARGMAX = "argmax"
    ARGMIN = "argmin"


COMPARISONS = frozenset({Fn.LT, Fn.LE, Fn.EQ, Fn.NE})
