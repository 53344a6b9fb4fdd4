"""Transcendental functions of f32 in any number of lanes, so that compiled code needs no math library.

Largest errors in units in the last place (ulp) of f32, compared with results in f64 on dense samples of all finite f32, and for pow on
samples of pairs of f32 (tests/compiler/codegen/test_vector_math.py checks these bounds):

    exp 0.9   exp2 1.3   log 0.8   sin 1.6   cos 1.6   tanh 1.3   erf 1.2   pow 0.51

A function has the same bits in every lane, for all numbers of lanes, and on all machines that round a multiply-add once. It has no
branches. Only the multiplication by a power of two uses other instructions on some machines, with the same result (`Lanes.scaled`).
Denormal arguments and results are not flushed to 0. Fused multiply-adds are used only where the error bounds require them. One function is
an exception: on GPUs, exp2 is one instruction (compiler/llvm/ex2.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from compiler.ir.loops.functions import Fn
from compiler.llvm.ex2 import LOG2_E, ex2
from compiler.llvm.ssa import Code, float_literal, multiply_add, splat, suffix, symbol, vec
from compiler.machine.product_steps.avx512 import SCALE_EXPONENT
from compiler.machine.target import GPU, Target

# --- coefficients, lowest first; fit_polynomials.py derives them; the error of ERFC is absolute, all others are relative ------

EXP: Final = (  # largest error of the fitted function: 3.1e-09
    0.4999999341249612,
    0.16666520107832172,
    0.04166839421192406,
    0.008368780410149143,
    0.001381446701148781,
)
LOG: Final = (  # largest error of the fitted function: 7.5e-10
    0.3333331260413482,
    -0.25000009599272205,
    0.2000211865439452,
    -0.16667995857400317,
    0.14219552442678954,
    -0.12405588907096986,
    0.11888161708669098,
    -0.11675651710264266,
    0.06746641560301057,
)
TANH: Final = (  # largest error of the fitted function: 4.8e-09
    -0.33333278058525867,
    0.13331331001398905,
    -0.053730007107980246,
    0.020606176589425595,
    -0.005666977090252562,
)
ERF: Final = (  # largest error of the fitted function: 1.3e-09
    0.12837916563194038,
    -0.3761262506145612,
    0.11283575298004776,
    -0.026853350997302516,
    0.005187360604874906,
    -0.0008000906759211013,
    7.820619171587491e-05,
)
ERFC: Final = (  # largest error of the fitted function: 1.1e-09
    -0.00034310502564619677,
    -1.1270815929536033,
    -0.6381591977010691,
    -0.10309294585855182,
    0.021830908940440128,
    -0.002945756961421171,
    0.00018617625958754645,
)
SIN: Final = (  # largest error of the fitted function: 3.8e-09
    -0.1666665453663022,
    0.008332156053880739,
    -0.00019514631905802264,
)
COS: Final = (  # largest error of the fitted function: 1.2e-10
    0.04166664555448405,
    -0.0013887309867277146,
    2.4432413050423223e-05,
)
LOG2: Final = (  # largest error of the fitted function: 3.8e-14
    2.8853900817778495,
    0.9617966941137245,
    0.5770779422591664,
    0.41220926314737844,
    0.31990524375523227,
    0.28290683929931987,
)
EXP2: Final = (  # largest error of the fitted function: 4.0e-11
    0.999999999961682,
    0.6931471807284456,
    0.24022651198157208,
    0.05550410353453209,
    0.00961802725371138,
    0.0013333922559077417,
    0.00015469291130798155,
    1.5201922641980119e-05,
)

LN2_HIGH: Final = 0.693145751953125  # 15 bits, so that its product with an exponent is exact
LN2_LOW: Final = 1.4286068203094173e-06
HALF_PI: Final = (1.5707963267948966, 6.123233995736766e-17)  # pi / 2 as the sum of two f64: the nearest f64, and the rest
# TWO_OVER_PI_BITS is 2 / pi in binary, in words of 32 bits. The first word is the integer part, 0.
TWO_OVER_PI_BITS: Final = (0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB)
HUGE_ANGLE: Final = 2.0**22  # from this magnitude on, `_reduce_huge` reduces angles
SIGN: Final = -(2**31)
INFINITY: Final = math.inf
NAN: Final = math.nan
ROUND_F32: Final = 1.5 * 2.0**23  # the sum of this and a number has the integer nearest to the number in its low bits
ROUND_F64: Final = 1.5 * 2.0**52
SCALED: Final = "scaled"  # name of the helper function that computes value * 2^n


def definitions(used: Iterable[tuple[Fn, int]], target: Target) -> list[str]:
    """Emit the used functions as LLVM IR, with `scaled` for each number of lanes. LLVM inlines all of them."""
    used = sorted(used)
    scaled = [_definition(SCALED, lanes, _scaled(target, lanes), num_args=2) for lanes in sorted({lanes for _, lanes in used})]
    functions = FUNCTIONS | {Fn.EXP2: _exp2_of_gpu} if target.system == GPU else FUNCTIONS
    return [*scaled, *(_definition(fn, lanes, functions[fn], num_args=2 if fn is Fn.POW else 1) for fn, lanes in used)]


def _definition(fn: str, lanes: int, function: Callable[..., Lanes], *, num_args: int) -> str:
    """Return the definition of a function in LLVM IR. `function` emits its body from the arguments, and returns the result."""
    code = Code()
    kind = vec("float", lanes)
    names = ("%x", "%y")[:num_args]
    result = function(*(Lanes(code, arg, "float", lanes) for arg in names))
    params = ", ".join(f"{kind} {arg}" for arg in names)
    head = f"define internal {kind} {symbol(fn, lanes)}({params}) alwaysinline nounwind"
    return f"{head} {{\nentry:\n{code.text()}\n  ret {kind} {result.name}\n}}"


@dataclass(frozen=True, slots=True)
class Lanes:
    """A vector of numbers, with the operators of their element type: float, double, an integer type, or i1 for conditions. With one lane it
    is a scalar."""

    code: Code
    name: str
    element: str
    lanes: int

    def __add__(self, other: Operand) -> Lanes:
        return self._binary("add", other)

    def __sub__(self, other: Operand) -> Lanes:
        return self._binary("sub", other)

    def __mul__(self, other: Operand) -> Lanes:
        return self._binary("mul", other)

    def __truediv__(self, other: Operand) -> Lanes:
        return self._binary("div", other)

    def __and__(self, other: Operand) -> Lanes:
        return self._binary("and", other)

    def __or__(self, other: Operand) -> Lanes:
        return self._binary("or", other)

    def __xor__(self, other: Operand) -> Lanes:
        return self._binary("xor", other)

    def __lshift__(self, other: Operand) -> Lanes:
        return self._binary("shl", other)

    def __rshift__(self, other: Operand) -> Lanes:
        return self._binary("lshr", other)  # logical shift

    def arithmetic_shift(self, by: int) -> Lanes:
        return self._binary("ashr", by)

    def __neg__(self) -> Lanes:
        return self._new(f"fneg {self.kind} {self.name}")

    def __abs__(self) -> Lanes:
        return self.call("fabs")

    @property
    def kind(self) -> str:
        return vec(self.element, self.lanes)

    @property
    def is_float(self) -> bool:
        return self.element in ("float", "double")

    def const(self, value: Operand) -> Lanes:
        """Return a number as a constant in all lanes, rounded to the element type. A vector is returned as it is."""
        if isinstance(value, Lanes):
            return value
        literal = _float(value, self.element) if self.is_float else str(int(value))
        return Lanes(self.code, splat(literal, self.element, self.lanes), self.element, self.lanes)

    def compare(self, predicate: str, other: Operand) -> Lanes:
        """Compare by an LLVM predicate, such as "olt" or "eq". With a NaN, a predicate on floats is true only if it begins with "u"."""
        how = "fcmp" if self.is_float else "icmp"
        return self._new(f"{how} {predicate} {self.kind} {self.name}, {self.const(other).name}", "i1")

    def where(self, cond: Lanes, otherwise: Operand) -> Lanes:
        """Select self where `cond` is true, and `otherwise` elsewhere."""
        return self._new(f"select {cond.kind} {cond.name}, {self.kind} {self.name}, {self.kind} {self.const(otherwise).name}")

    def fma(self, factor: Operand, addend: Operand) -> Lanes:
        """Return self * factor + addend, rounded once."""
        total = multiply_add(self.code, self.name, self.const(factor).name, self.const(addend).name, self.element, self.lanes)
        return Lanes(self.code, total, self.element, self.lanes)

    def call(self, name: str, *others: Operand) -> Lanes:
        """Call an LLVM intrinsic of this type, named without `llvm.` and the type."""
        args = ", ".join(f"{self.kind} {self.const(o).name}" for o in (self, *others))
        return self._new(f"call {self.kind} @llvm.{name}.{suffix(self.element, self.lanes)}({args})")

    def scaled(self, shifted: Lanes) -> Lanes:
        """Compute self * 2^n, rounded once, where shifted = n + ROUND_F32. Machines differ in the fastest instructions for it, but not in
        the result."""
        return self._new(f"call {self.kind} {symbol(SCALED, self.lanes)}({self.kind} {self.name}, {self.kind} {shifted.name})")

    def scalef(self, whole: Lanes) -> Lanes:
        """Compute self * 2^n with one instruction of AVX-512, rounded once, where n = whole, a float with an integer value."""
        operands = f"{self.kind} {self.name}, {self.kind} {whole.name}, {self.kind} zeroinitializer, i{max(8, self.lanes)} -1"
        return self._new(
            f"call {self.kind} @llvm.x86.avx512.mask.scalef.ps.{32 * self.lanes}({operands}{', i32 4' if self.lanes == 16 else ''})"
        )

    def to(self, how: str, element: str) -> Lanes:
        """Convert by an LLVM instruction: bitcast, zext, sext, trunc, fpext, fptrunc or sitofp."""
        return self._new(f"{how} {self.kind} {self.name} to {vec(element, self.lanes)}", element)

    @property
    def bits(self) -> Lanes:
        """The bits of floats as integers: i32 for float, i64 for double."""
        return self.to("bitcast", "i32" if self.element == "float" else "i64")

    def _binary(self, op: str, other: Operand) -> Lanes:
        prefix = "f" if self.is_float else ""
        return self._new(f"{prefix}{op} {self.kind} {self.name}, {self.const(other).name}")

    def _new(self, text: str, element: str | None = None) -> Lanes:
        return Lanes(self.code, self.code.op(text), element or self.element, self.lanes)


Operand = Lanes | float


def _float(value: float, element: str) -> str:
    return float_literal(float(np.float32(value))) if element == "float" else float_literal(value)


def _polynomial(t: Lanes, coefficients: tuple[float, ...]) -> Lanes:
    """Return the value of a polynomial, by Horner's rule with fused multiply-adds."""
    total = t.const(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total.fma(t, c)
    return total


def _exp(x: Lanes) -> Lanes:
    """Compute e^x as 2^n e^r, where n is the integer nearest to x / log 2. NaN gives NaN."""
    # Clamp x to the range outside of which the result is 0 or infinity. Both comparisons are false for NaN, so NaN stays.
    x = x.const(-104.0).where(x.compare("olt", -104.0), x)
    x = x.const(89.0).where(x.compare("ogt", 89.0), x)
    shifted = x.fma(LOG2_E, ROUND_F32)
    whole = shifted - ROUND_F32
    r = whole.fma(-LN2_HIGH, x)
    r = whole.fma(-LN2_LOW, r)
    return _polynomial(r, (1.0, 1.0, *EXP)).scaled(shifted)


def _exp2(x: Lanes) -> Lanes:
    x = x.const(-151.0).where(x.compare("olt", -151.0), x)
    x = x.const(129.0).where(x.compare("ogt", 129.0), x)
    shifted = x + ROUND_F32
    return _polynomial((x - (shifted - ROUND_F32)) * math.log(2), (1.0, 1.0, *EXP)).scaled(shifted)


def _exp2_of_gpu(x: Lanes) -> Lanes:
    return Lanes(x.code, ex2(x.code, x.name), x.element, x.lanes)


def _scaled(target: Target, lanes: int) -> Callable[[Lanes, Lanes], Lanes]:
    """Return the function that computes value * 2^n, rounded once, from value and n + ROUND_F32."""
    return _scaled_at_once if target.features >= SCALE_EXPONENT and lanes in (4, 8, 16) else _scaled_by_parts


def _scaled_at_once(value: Lanes, shifted: Lanes) -> Lanes:
    """Multiply with the instruction of AVX-512."""
    return value.scalef(shifted - ROUND_F32)


def _scaled_by_parts(value: Lanes, shifted: Lanes) -> Lanes:
    """Multiply by two factors, 2^half and 2^(n - half), because 2^n alone may be denormal or too large. Only the second multiplication
    rounds, and only if the result is denormal or overflows."""
    n = shifted.bits - value.const(ROUND_F32).bits
    half = n.arithmetic_shift(1)
    return value * _power_of_two(half) * _power_of_two(n - half)


def _power_of_two(n: Lanes) -> Lanes:
    """Return 2^n for n (i32) in the range of normal numbers."""
    return ((n + 127) << 23).to("bitcast", "float")


def _log(x: Lanes) -> Lanes:
    """Compute log x as k log 2 + log(1 + f). 0 gives -infinity; a negative number or NaN gives NaN."""
    tiny = x.compare("olt", 2.0**-126)
    scaled = (x * 2.0**23).where(tiny, x)
    # Split x = 2^k (1 + f) into exponent and fraction, where 1 + f is in sqrt(1/2) .. sqrt(2).
    offset = scaled.bits - 0x3F3504F3
    k = offset.arithmetic_shift(23)
    f = (scaled.bits - (k << 23)).to("bitcast", "float") - 1.0
    whole = k.to("sitofp", "float") - x.const(23.0).where(tiny, 0.0)
    square = f * f
    r = f * square * _polynomial(f, LOG)
    r = whole.fma(LN2_LOW, r)
    r = square.fma(-0.5, r)
    result = whole.fma(LN2_HIGH, f + r)
    result = x.const(-INFINITY).where(x.compare("oeq", 0.0), result)
    result = x.where(x.compare("oeq", INFINITY), result)
    return x.const(NAN).where(x.compare("ult", 0.0), result)


def _tanh(x: Lanes) -> Lanes:
    """Compute tanh x: by a polynomial for magnitudes below 0.625, otherwise as 1 - 2 / (e^(2 |x|) + 1) with the sign of x."""
    size = abs(x)
    square = x * x
    near = (size * square).fma(_polynomial(square, TANH), size)
    far = x.const(1.0) - x.const(2.0) / (_exp(size + size) + 1.0)
    return near.where(size.compare("olt", 0.625), far).call("copysign", x)


def _erf(x: Lanes) -> Lanes:
    """Compute erf x: by a polynomial for magnitudes below 1, otherwise as 1 - e^q(|x|) with the sign of x. From 4 on, f32 rounds the result
    to 1."""
    size = abs(x)
    near = x.fma(_polynomial(x * x, ERF), x)
    end = size.const(4.0).where(size.compare("ogt", 4.0), size)
    far = x.const(1.0) - _exp(_polynomial(end, ERFC))
    return near.where(size.compare("olt", 1.0), far.call("copysign", x))


def _sin(x: Lanes) -> Lanes:
    quadrant, r = _reduce_angle(x)
    return _sine(quadrant, r, x.bits & SIGN, x)


def _cos(x: Lanes) -> Lanes:
    quadrant, r = _reduce_angle(x)
    return _sine(quadrant + 1, r, x.bits.const(0), x)


def _sine(quadrant: Lanes, r: Lanes, sign: Lanes, x: Lanes) -> Lanes:
    """Return the sine of quadrant * pi/2 + r, negated where the sign bit in `sign` is set. Return NaN where `x`, the argument of the
    function, is infinite or NaN."""
    square = r * r
    sine = (r * square).fma(_polynomial(square, SIN), r)
    cosine = (square * square).fma(_polynomial(square, COS), square.fma(-0.5, 1.0))
    value = cosine.where((quadrant & 1).compare("ne", 0), sine)
    flip = ((quadrant & 2) << 30) ^ sign
    value = (value.bits ^ flip).to("bitcast", "float")
    return value.where(abs(x).compare("olt", INFINITY), x - x)


def _reduce_angle(x: Lanes) -> tuple[Lanes, Lanes]:
    """Return quadrant and r with |x| = quadrant * pi/2 + r up to whole turns, and r in -pi/4 .. pi/4. The quadrant is an i32, of which the
    lower two bits count."""
    size = abs(x).to("fpext", "double")
    shifted = size.fma(2 / math.pi, ROUND_F64)
    n = shifted - ROUND_F64
    r = n.fma(-HALF_PI[1], n.fma(-HALF_PI[0], size))
    quadrant = shifted.bits.to("trunc", "i32")
    far_quadrant, far = _reduce_huge(x)
    huge = abs(x).compare("oge", HUGE_ANGLE)
    return far_quadrant.where(huge, quadrant), far.where(huge, r).to("fptrunc", "float")


def _reduce_huge(x: Lanes) -> tuple[Lanes, Lanes]:
    """Return what `_reduce_angle` returns, for |x| = m 2^e from HUGE_ANGLE on. Multiply m by those 96 bits of 2/pi that determine the angle
    modulo 2 pi: higher bits contribute only whole turns, and lower bits too little to matter."""
    exponent = (x.bits >> 23) & 0xFF
    start = exponent - 120  # the first bit of 2/pi that changes the angle modulo 2 pi
    word, shift = start >> 5, start & 31
    chosen: list[Lanes] = []
    for i in range(4):
        bits = x.bits.const(_signed(TWO_OVER_PI_BITS[i]))
        for j in range(1, 5):
            bits = bits.const(_signed(TWO_OVER_PI_BITS[i + j])).where(word.compare("eq", j), bits)
        chosen.append(bits)
    high, middle, low = (a.call("fshl", b, shift).to("zext", "i64") for a, b in pairwise(chosen))
    m = ((x.bits & 0x7FFFFF) | 0x800000).to("zext", "i64")
    product = ((high * m) << 32) + middle * m + ((low * m) >> 32)  # in units of 2^-62 quadrants
    quadrant = (product + 2**61) >> 62
    r = (product - (quadrant << 62)).to("sitofp", "double") * (math.pi / 2 * 2.0**-62)
    return quadrant.to("trunc", "i32"), r


def _pow(x: Lanes, y: Lanes) -> Lanes:
    """Compute 2^(y log2 |x|) in f64 and round it to f32 once; then apply the sign and the special values of IEEE 754's pow."""
    size, wide = abs(x), y.to("fpext", "double")
    exponent = _log2(size.to("fpext", "double")) * wide
    exponent = exponent.const(-200.0).where(exponent.compare("olt", -200.0), exponent)
    exponent = exponent.const(200.0).where(exponent.compare("ogt", 200.0), exponent)
    shifted = exponent + ROUND_F64
    fraction = _polynomial(exponent - (shifted - ROUND_F64), EXP2)
    scale = (((shifted.bits - exponent.const(ROUND_F64).bits) + 1023) << 52).to("bitcast", "double")
    value = (fraction * scale).to("fptrunc", "float")
    whole = y.call("floor").compare("oeq", y)
    half = y * 0.5
    odd = whole & half.call("floor").compare("une", half)
    value = (-value).where(odd & (x.bits.compare("slt", 0)), value)
    undefined = x.compare("olt", 0.0) & x.compare("ogt", -INFINITY) & y.call("floor").compare("one", y)
    value = x.const(NAN).where(undefined, value)
    one = y.compare("oeq", 0.0) | x.compare("oeq", 1.0) | (x.compare("oeq", -1.0) & abs(y).compare("oeq", INFINITY))
    return x.const(1.0).where(one, value)


def _log2(x: Lanes) -> Lanes:
    """Compute log2 of an f64 x >= 0 that was converted from f32. NaN gives NaN."""
    offset = x.bits - 0x3FE6A09E667F3BCD
    k = offset.arithmetic_shift(52)
    m = (x.bits - (k << 52)).to("bitcast", "double")
    s = (m - 1.0) / (m + 1.0)
    value = s.fma(_polynomial(s * s, LOG2), k.to("sitofp", "double"))
    value = x.const(-INFINITY).where(x.compare("oeq", 0.0), value)
    return x.where(x.compare("ueq", INFINITY), value)


def _signed(word: int) -> int:
    """Return the number that has the bits of a word of 32 bits as a signed i32."""
    return word - 2**32 if word >= 2**31 else word


FUNCTIONS: Final[dict[Fn, Callable[..., Lanes]]] = {
    Fn.EXP: _exp,
    Fn.EXP2: _exp2,
    Fn.LOG: _log,
    Fn.SIN: _sin,
    Fn.COS: _cos,
    Fn.TANH: _tanh,
    Fn.ERF: _erf,
    Fn.POW: _pow,
}
