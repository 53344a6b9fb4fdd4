"""Emit functions of scalars, in any number of lanes.

Registers hold bf16, f16 and e4m3 as f32. Arithmetic of floats is in f32, and every result is rounded to the value's own type. bf16 is
rounded with integer instructions, or by an instruction of a GPU (`Target.rounds_bf16`). Both ways keep denormals, and give the same bits
for a number; the bits of a NaN differ on a GPU. No instruction has a fast-math flag: LLVM may not contract or reorder, so every lane of a
vector gets the bits of the scalar function. On a GPU, exp2 is less exact, and flushes denormals (compiler/llvm/ex2.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from compiler.codegen import e4m3
from compiler.codegen.vector_math import Lanes
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.functions import COMPARISONS, Fn
from compiler.llvm.ssa import Code, broadcast, float_literal, multiply_add, splat, suffix, vec


@dataclass(frozen=True, slots=True)
class Value:
    """A value in a register: an operand of LLVM IR, and its type. With more than one lane, the operand is a vector."""

    operand: str
    dtype: DType
    lanes: int = 1


_REGISTER: Final = {
    DType.F32: "float",
    DType.F16: "float",
    DType.BF16: "float",
    DType.E4M3: "float",
    DType.I8: "i8",
    DType.I16: "i16",
    DType.I32: "i32",
    DType.I64: "i64",
    DType.U8: "i8",
    DType.U32: "i32",
    DType.BOOL: "i1",
}
_MEMORY: Final = {**_REGISTER, DType.F16: "half", DType.BF16: "i16", DType.E4M3: "i8", DType.BOOL: "i8"}


def register(dtype: DType) -> str:
    """Return the LLVM type of a number in a register."""
    return _REGISTER[dtype]


def memory(dtype: DType) -> str:
    """Return the LLVM type of a number in memory."""
    return _MEMORY[dtype]


def constant(value: float, dtype: DType) -> str:
    """Return a number, rounded to `dtype`, as a constant of LLVM IR for a register. A number that is too large for a float type becomes
    infinity, or NaN as e4m3, which has no infinity."""
    with np.errstate(over="ignore"):
        exact = dtype.numpy.type(value)
    if dtype.is_float:
        return float_literal(float(exact))
    return ("true" if exact else "false") if dtype is DType.BOOL else str(int(exact))


class Scalars:
    """Emits functions of values into `code`."""

    def __init__(self, code: Code, *, rounds_bf16: bool) -> None:
        """`rounds_bf16` says whether the target has an instruction that rounds to bf16."""
        self.code = code
        self._rounds_bf16 = rounds_bf16  # whether an instruction rounds to bf16

    # --- memory and registers ------------------------------------------------------------------------------------------

    def loaded(self, raw: str, dtype: DType, lanes: int) -> Value:
        """Convert numbers from their form in memory to values in registers: small floats become f32, and a bool is true if its byte is not
        0."""
        op, v = self.code.op, partial(_lanes, lanes)
        match dtype:
            case DType.BF16:
                raw = self._widened(raw, lanes)
            case DType.F16:
                raw = op(f"fpext {v('half')} {raw} to {v('float')}")
            case DType.E4M3:
                raw = e4m3.decoded(Lanes(self.code, raw, "i8", lanes)).name
            case DType.BOOL:
                raw = op(f"icmp ne {v('i8')} {raw}, zeroinitializer") if lanes > 1 else op(f"icmp ne i8 {raw}, 0")
            case _:
                pass
        return Value(raw, dtype, lanes)

    def stored(self, value: Value) -> str:
        """Convert a value to its representation in memory. A bf16 must be rounded already; f16 and e4m3 are rounded here."""
        op, v = self.code.op, partial(_lanes, value.lanes)
        match value.dtype:
            case DType.BF16:
                bits = op(f"bitcast {v('float')} {value.operand} to {v('i32')}")
                high = op(f"lshr {v('i32')} {bits}, {splat('16', 'i32', value.lanes)}")
                return op(f"trunc {v('i32')} {high} to {v('i16')}")
            case DType.F16:
                return op(f"fptrunc {v('float')} {value.operand} to {v('half')}")
            case DType.E4M3:
                return e4m3.encoded(Lanes(self.code, value.operand, "float", value.lanes)).name
            case DType.BOOL:
                return op(f"zext {v('i1')} {value.operand} to {v('i8')}")
            case _:
                return value.operand

    def spread(self, value: Value, lanes: int) -> Value:
        """Return the value in `lanes` lanes. A value with one lane is repeated. Any other value must have this number of lanes already."""
        if value.lanes == lanes:
            return value
        return Value(broadcast(self.code, value.operand, register(value.dtype), lanes), value.dtype, lanes)

    def _widened(self, raw: str, lanes: int) -> str:
        """Convert bf16, given as integers of 16 bits, to f32."""
        op, v = self.code.op, partial(_lanes, lanes)
        wide = op(f"zext {v('i16')} {raw} to {v('i32')}")
        bits = op(f"shl {v('i32')} {wide}, {splat('16', 'i32', lanes)}")
        return op(f"bitcast {v('i32')} {bits} to {v('float')}")

    def rounded(self, operand: str, dtype: DType, lanes: int) -> Value:
        """Round an f32 to the float type `dtype`: to nearest, ties to even; NaN stays NaN. The register still holds an f32."""
        op, v = self.code.op, partial(_lanes, lanes)
        match dtype:
            case DType.F16 | DType.E4M3:
                return self.loaded(self.stored(Value(operand, dtype, lanes)), dtype, lanes)
            case DType.BF16 if self._rounds_bf16:
                short = op(f"fptrunc {v('float')} {operand} to {v('bfloat')}")
                operand = self._widened(op(f"bitcast {v('bfloat')} {short} to {v('i16')}"), lanes)
            case DType.BF16:
                const = partial(_integers, "i32", lanes)
                bits = op(f"bitcast {v('float')} {operand} to {v('i32')}")
                high = op(f"lshr {v('i32')} {bits}, {const(16)}")
                odd = op(f"and {v('i32')} {high}, {const(1)}")
                half = op(f"add {v('i32')} {bits}, {const(0x7FFF)}")
                bumped = op(f"add {v('i32')} {half}, {odd}")
                quiet = op(f"or {v('i32')} {bits}, {const(0x400000)}")
                nan = op(f"fcmp uno {v('float')} {operand}, {operand}")
                chosen = op(f"select {v('i1')} {nan}, {v('i32')} {quiet}, {v('i32')} {bumped}")
                cut = op(f"and {v('i32')} {chosen}, {const(-65536)}")
                operand = op(f"bitcast {v('i32')} {cut} to {v('float')}")
            case _:
                pass
        return Value(operand, dtype, lanes)

    # --- functions -----------------------------------------------------------------------------------------------------

    def apply(self, fn: Fn, args: list[Value]) -> Value:
        """Emit a function of values and return its result. Raise CompileError if the type of the values does not support the function."""
        lanes = max(a.lanes for a in args)
        if fn is Fn.SELECT:
            # If the condition is the same in all lanes, it selects whole vectors and stays a scalar.
            lanes = max(a.lanes for a in args[1:]) if args[0].lanes == 1 else lanes
            a, b = (self.spread(x, lanes) for x in args[1:])
            return self.select(args[0], a, b)
        operands = [self.spread(a, lanes).operand for a in args]
        dtype = args[0].dtype
        if fn in COMPARISONS:
            return Value(self._compare(fn, dtype, lanes, *operands), DType.BOOL, lanes)
        if fn in (Fn.BITS, Fn.OF_BITS):
            result = DType.I32 if fn is Fn.BITS else DType.F32
            source, target = (vec(register(d), lanes) for d in (dtype, result))
            return Value(self.code.op(f"bitcast {source} {operands[0]} to {target}"), result, lanes)
        if dtype.is_float:
            return self.rounded(self._float(fn, dtype, lanes, operands), dtype, lanes)
        if dtype is DType.BOOL:
            return Value(self._bool(fn, lanes, operands), dtype, lanes)
        return Value(self._int(fn, dtype, lanes, operands), dtype, lanes)

    def select(self, cond: Value, a: Value, b: Value) -> Value:
        """Select `a` where `cond` is true, and `b` elsewhere. `a` and `b` have equally many lanes; `cond` has as many, or one."""
        kind = vec(register(a.dtype), a.lanes)
        text = f"select {vec('i1', cond.lanes)} {cond.operand}, {kind} {a.operand}, {kind} {b.operand}"
        return Value(self.code.op(text), a.dtype, a.lanes)

    def _compare(self, fn: Fn, dtype: DType, lanes: int, a: str, b: str) -> str:
        """Compare values of one type. A NaN is different from everything, and neither less nor greater."""
        kind = vec(register(dtype), lanes)
        if dtype.is_float:
            return self.code.op(f"fcmp {'une' if fn is Fn.NE else f'o{fn}'} {kind} {a}, {b}")
        sign = "" if fn in (Fn.EQ, Fn.NE) else "u" if dtype.is_unsigned else "s"
        return self.code.op(f"icmp {sign}{fn} {kind} {a}, {b}")

    def _float(self, fn: Fn, dtype: DType, lanes: int, args: list[str]) -> str:
        """Emit a function of floats in f32, before the result is rounded. Raise CompileError if floats do not have the function."""
        kind = vec("float", lanes)
        match fn:
            case Fn.ADD | Fn.SUB | Fn.MUL | Fn.DIV:
                return self.code.op(f"f{fn} {kind} {args[0]}, {args[1]}")
            case Fn.NEG:
                return self.code.op(f"fneg {kind} {args[0]}")
            case Fn.MIN | Fn.MAX:
                return self._extreme("olt" if fn is Fn.MIN else "ogt", lanes, *args)
            case Fn.FMA:
                return multiply_add(self.code, args[0], args[1], args[2], "float", lanes)
            case Fn.ABS | Fn.SQRT | Fn.FLOOR | Fn.ROUND:
                return self._call(_FLOAT_INTRINSIC[fn], "float", lanes, args)
            case Fn.RSQRT:
                root = self._call("sqrt", "float", lanes, args)
                return self.code.op(f"fdiv {kind} {splat(float_literal(1.0), 'float', lanes)}, {root}")
            case Fn.EXP | Fn.EXP2 | Fn.LOG | Fn.TANH | Fn.ERF | Fn.SIN | Fn.COS | Fn.POW:
                return self.code.call_math(fn, args, lanes)
            case _:
                raise _unsupported(fn, dtype)

    def _extreme(self, beats: str, lanes: int, a: str, b: str) -> str:
        """Return `a` unless `b` is better, and NaN if either is NaN. `beats` is the comparison that makes `b` better. A reduction passes
        its accumulator as `a`, because only one comparison waits for `a`."""
        op, kind, flag = self.code.op, vec("float", lanes), vec("i1", lanes)
        better = op(f"select {flag} {op(f'fcmp {beats} {kind} {b}, {a}')}, {kind} {b}, {kind} {a}")
        return op(f"select {flag} {op(f'fcmp uno {kind} {b}, {b}')}, {kind} {b}, {kind} {better}")

    def _bool(self, fn: Fn, lanes: int, args: list[str]) -> str:
        """Emit a function of bools: `min` is `and`, `max` is `or`. Raise CompileError if bools do not have the function."""
        kind = vec("i1", lanes)
        match fn:
            case Fn.AND | Fn.OR | Fn.XOR:
                return self.code.op(f"{fn} {kind} {args[0]}, {args[1]}")
            case Fn.NOT:
                return self.code.op(f"xor {kind} {args[0]}, {splat('true', 'i1', lanes)}")
            case Fn.MIN:
                return self.code.op(f"and {kind} {args[0]}, {args[1]}")
            case Fn.MAX:
                return self.code.op(f"or {kind} {args[0]}, {args[1]}")
            case _:
                raise _unsupported(fn, DType.BOOL)

    def _int(self, fn: Fn, dtype: DType, lanes: int, args: list[str]) -> str:
        """Emit a function of integers. A result that does not fit wraps around. Raise CompileError if integers do not have the function."""
        op, element = self.code.op, register(dtype)
        kind, sign = vec(element, lanes), "u" if dtype.is_unsigned else "s"
        match fn:
            case Fn.ADD | Fn.SUB | Fn.MUL | Fn.AND | Fn.OR | Fn.XOR:
                return op(f"{fn} {kind} {args[0]}, {args[1]}")
            case Fn.NEG:
                return op(f"sub {kind} {splat('0', element, lanes)}, {args[0]}")
            case Fn.NOT:
                return op(f"xor {kind} {args[0]}, {splat('-1', element, lanes)}")
            case Fn.MIN | Fn.MAX:
                return self._call(f"{sign}{fn}", element, lanes, args)
            case Fn.ABS:
                return args[0] if dtype.is_unsigned else op(f"call {kind} @llvm.abs.{suffix(element, lanes)}({kind} {args[0]}, i1 false)")
            case Fn.FLOORDIV | Fn.MOD:
                return self._divide(fn, dtype, lanes, *args)
            case Fn.SHL | Fn.SHR:
                return self._shift(fn, dtype, lanes, *args)
            case _:
                raise _unsupported(fn, dtype)

    def _divide(self, fn: Fn, dtype: DType, lanes: int, x: str, d: str) -> str:
        """Divide and round down. Division by 0 gives 0 as quotient and as remainder, and the smallest integer divided by -1 wraps around.
        In both cases the division instruction of a CPU could end the process, so it gets another divisor."""
        op, element = self.code.op, register(dtype)
        kind, flag = vec(element, lanes), vec("i1", lanes)
        const = partial(_integers, element, lanes)
        none = op(f"icmp eq {kind} {d}, {const(0)}")
        if dtype.is_unsigned:
            safe = op(f"select {flag} {none}, {kind} {const(1)}, {kind} {d}")
            result = op(f"{'udiv' if fn is Fn.FLOORDIV else 'urem'} {kind} {x}, {safe}")
            return op(f"select {flag} {none}, {kind} {const(0)}, {kind} {result}")
        minus = op(f"icmp eq {kind} {d}, {const(-1)}")
        special = op(f"or {flag} {none}, {minus}")
        safe = op(f"select {flag} {special}, {kind} {const(1)}, {kind} {d}")
        rest = op(f"srem {kind} {x}, {safe}")
        differ = op(f"icmp slt {kind} {op(f'xor {kind} {rest}, {safe}')}, {const(0)}")
        wrong = op(f"and {flag} {differ}, {op(f'icmp ne {kind} {rest}, {const(0)}')}")
        if fn is Fn.MOD:  # divisors -1 and 0 were replaced by 1 above, so these remainders are 0
            return op(f"add {kind} {rest}, {op(f'select {flag} {wrong}, {kind} {safe}, {kind} {const(0)}')}")
        quotient = op(f"sdiv {kind} {x}, {safe}")
        quotient = op(f"add {kind} {quotient}, {op(f'sext {flag} {wrong} to {kind}')}")
        quotient = op(f"select {flag} {minus}, {kind} {op(f'sub {kind} {const(0)}, {x}')}, {kind} {quotient}")
        return op(f"select {flag} {none}, {kind} {const(0)}, {kind} {quotient}")

    def _shift(self, fn: Fn, dtype: DType, lanes: int, x: str, by: str) -> str:
        """Shift. A shift by the type's width or more gives the result of shifting all bits out."""
        op, element = self.code.op, register(dtype)
        kind, width = vec(element, lanes), dtype.num_bytes * 8
        instruction = "shl" if fn is Fn.SHL else "lshr" if dtype.is_unsigned else "ashr"
        if by in (splat(str(bits), element, lanes) for bits in range(width)):
            return op(f"{instruction} {kind} {x}, {by}")
        const = partial(_integers, element, lanes)
        capped = self._call("umin", element, lanes, [by, const(width - 1)])
        shifted = op(f"{instruction} {kind} {x}, {capped}")
        if instruction == "ashr":
            return shifted
        inside = op(f"icmp ult {kind} {by}, {const(width)}")
        return op(f"select {vec('i1', lanes)} {inside}, {kind} {shifted}, {kind} {const(0)}")

    def _call(self, name: str, element: str, lanes: int, args: list[str]) -> str:
        """Call an LLVM intrinsic, named without `llvm.` and the type."""
        kind = vec(element, lanes)
        return self.code.op(f"call {kind} @llvm.{name}.{suffix(element, lanes)}({', '.join(f'{kind} {a}' for a in args)})")

    # --- casts ---------------------------------------------------------------------------------------------------------

    def cast(self, value: Value, dtype: DType) -> Value:
        """Convert a value to another type. A number becomes true if it is not 0. A float becomes an integer by rounding toward zero and
        saturating. An integer that does not fit another integer type wraps around."""
        source, lanes = value.dtype, value.lanes
        if source is dtype:
            return value
        old, new = vec(register(source), lanes), vec(register(dtype), lanes)
        if dtype is DType.BOOL:
            zero = splat(constant(0, source), register(source), lanes)
            compare = "fcmp une" if source.is_float else "icmp ne"
            return Value(self.code.op(f"{compare} {old} {value.operand}, {zero}"), dtype, lanes)
        if dtype.is_float:
            if source.is_float:
                # Widening is exact. A cast between bf16 and f16 goes through f32, which holds both exactly.
                return self.rounded(value.operand, dtype, lanes)
            convert = "uitofp" if source.is_unsigned else "sitofp"
            return self.rounded(self.code.op(f"{convert} {old} {value.operand} to {new}"), dtype, lanes)
        if source.is_float:
            return Value(self._float_to_int(value, dtype), dtype, lanes)
        return Value(self._int_to_int(value, dtype), dtype, lanes)

    def _float_to_int(self, value: Value, dtype: DType) -> str:
        """Convert toward zero and saturate; NaN gives 0. LLVM has an intrinsic for this, but it splits vectors into scalars, so vectors use
        comparisons."""
        op, lanes, how = self.code.op, value.lanes, f"fpto{'u' if dtype.is_unsigned else 's'}i"
        old, new = vec("float", lanes), vec(register(dtype), lanes)
        if lanes == 1:
            return op(f"call {new} @llvm.{how}.sat.{register(dtype)}.f32({old} {value.operand})")
        (low, high), flag = dtype.ends, vec("i1", lanes)
        least, most = (splat(float_literal(float(end)), "float", lanes) for end in (low, high + 1))
        above = op(f"fcmp ogt {old} {value.operand}, {least}")
        below = op(f"fcmp olt {old} {value.operand}, {most}")
        safe = op(f"select {flag} {op(f'and {flag} {above}, {below}')}, {old} {value.operand}, {old} zeroinitializer")
        result = op(f"{how} {old} {safe} to {new}")
        for compare, limit, end in (("ole", least, low), ("oge", most, high)):
            beyond = op(f"fcmp {compare} {old} {value.operand}, {limit}")
            result = op(f"select {flag} {beyond}, {new} {splat(str(end), register(dtype), lanes)}, {new} {result}")
        return result

    def _int_to_int(self, value: Value, dtype: DType) -> str:
        """Convert between integer types. A value that does not fit wraps around."""
        have, want = register(value.dtype), register(dtype)
        if have == want:
            return value.operand
        shrinks = int(want[1:]) < int(have[1:])
        how = "trunc" if shrinks else "zext" if value.dtype.is_unsigned else "sext"
        return self.code.op(f"{how} {vec(have, value.lanes)} {value.operand} to {vec(want, value.lanes)}")


_FLOAT_INTRINSIC: Final = {
    Fn.ABS: "fabs",
    Fn.SQRT: "sqrt",
    Fn.FLOOR: "floor",
    Fn.ROUND: "roundeven",
}


def _lanes(lanes: int, element: str) -> str:
    return vec(element, lanes)


def _integers(element: str, lanes: int, value: int) -> str:
    return splat(str(value), element, lanes)


def _unsupported(fn: Fn, dtype: DType) -> CompileError:
    return CompileError(f"no machine code for {fn} of {dtype}; cast to a type that supports it, or express it with other functions")
