"""Functions of scalars, and reductions of many scalars to one."""

from __future__ import annotations

from enum import StrEnum


class Fn(StrEnum):
    """Functions of scalars. All operands of a function have the same type, apart from the condition of SELECT. The result has this type,
    too, except that comparisons return bool, BITS returns an i32, and OF_BITS returns an f32. compiler/ir/verify/loops.py says which types
    each function accepts."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"  # floats only
    FLOORDIV = "floordiv"  # integers only, rounds down; a divisor of 0 gives 0
    MOD = "mod"  # integers only: a - floordiv(a, b) * b; a divisor of 0 gives 0
    MIN = "min"  # a NaN operand gives NaN
    MAX = "max"  # a NaN operand gives NaN
    POW = "pow"
    FMA = "fma"  # a * b + c, rounded once
    NEG = "neg"
    ABS = "abs"
    EXP = "exp"
    EXP2 = "exp2"  # 2 to the power of a; a GPU has a larger error than a CPU, and gives 0 instead of a denormal result
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
    AND = "and"  # logical on bools, bitwise on integers
    OR = "or"
    XOR = "xor"
    NOT = "not"
    SHL = "shl"
    SHR = "shr"  # arithmetic shift of signed integers, logical shift of unsigned ones
    BITS = "bits"  # the bits of an f32, as an i32
    OF_BITS = "of_bits"  # the f32 with the bits of an i32
    SELECT = "select"  # cond, a, b; evaluates both a and b, so neither may fault


class ReduceFn(StrEnum):
    """The functions that reduce many values to one. ARGMAX and ARGMIN return the row-major index (i64) of the first extreme value: a NaN is
    the largest value for ARGMAX, and the smallest for ARGMIN."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    ANY = "any"
    ALL = "all"
    ARGMAX = "argmax"
    ARGMIN = "argmin"


COMPARISONS = frozenset({Fn.LT, Fn.LE, Fn.EQ, Fn.NE})
