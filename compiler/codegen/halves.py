"""Conversions of f16 for machines without instructions for them, such as WebAssembly. Widening is exact; rounding is to the nearest f16,
ties to even.

For such machines, LLVM would emit calls of conversion functions that nothing defines. So `with_conversions` edits the text of a module: the
type f16 becomes i16, and each conversion between f16 and f32 becomes a call of a function that this file defines.
"""

from __future__ import annotations

import re
from typing import Final

from compiler.codegen.vector_math import Lanes
from compiler.llvm.ssa import Code, vec

_CONVERSION: Final = re.compile(
    r"(?P<how>fpext|fptrunc) (?:<(?P<lanes>\d+) x )?(?:half|float)>? (?P<value>\S+) to (?:<\d+ x )?(?:half|float)>?"
)
_TYPE: Final = re.compile(r"(?<![%@.\w])half(?![.\w])")
_SUFFIX: Final = re.compile(r"(?<=\.)(v\d+)f16\b")  # the type in the names of intrinsics, such as `.v8f16`
_ELEMENTS: Final = {"fpext": ("i16", "float"), "fptrunc": ("float", "i16")}

SHIFT: Final = 13  # the significand of an f32 has this many bits more than that of an f16
INFINITY: Final = 0x7C00  # infinity as f16
QUIET_NAN: Final = 0x7E00  # NaN as f16
INFINITE: Final = 0x7F800000  # infinity as f32
TOO_LARGE: Final = (127 + 16) << 23  # 2^16 as f32; numbers from 2^16 on become infinity (rounding makes those from 65,520 on infinite)
LEAST_NORMAL: Final = (127 - 14) << 23  # the least normal f16, 2^-14, as f32
REBIASED: Final = (127 - 15) << 23  # the difference of the exponents' biases, at the exponent's place in an f32


def with_conversions(text: str) -> str:
    """Replace the type f16 and its conversions in the text of a module. Text without f16 stays as it is."""
    used = sorted({(found["how"], int(found["lanes"] or 1)) for found in _CONVERSION.finditer(text) if "half" in found[0]})
    text = _CONVERSION.sub(_called, text)
    text = _SUFFIX.sub(r"\1i16", _TYPE.sub("i16", text))
    return "\n\n".join([text, *(_definition(how, lanes) for how, lanes in used)])


def _called(found: re.Match[str]) -> str:
    """Return the call that replaces a conversion from or to f16. Return any other conversion unchanged."""
    if "half" not in found[0]:
        return found[0]
    lanes = int(found["lanes"] or 1)
    source, result = (vec(element, lanes) for element in _ELEMENTS[found["how"]])
    return f"call {result} @f16.{found['how']}.{lanes}({source} {found['value']})"


def _definition(how: str, lanes: int) -> str:
    """Return the definition of the function that widens (fpext) or rounds (fptrunc) vectors of `lanes` lanes."""
    code = Code()
    source, result = _ELEMENTS[how]
    x = Lanes(code, "%x", source, lanes)
    converted = _widened(x) if how == "fpext" else _rounded(x)
    head = f"define internal {vec(result, lanes)} @f16.{how}.{lanes}({x.kind} %x) alwaysinline nounwind"
    return f"{head} {{\nentry:\n{code.text()}\n  ret {vec(result, lanes)} {converted.name}\n}}"


def _widened(x: Lanes) -> Lanes:
    """Return f16, given as i16, as f32."""
    wide = x.to("zext", "i32")
    size, sign = (wide & 0x7FFF) << SHIFT, (wide & 0x8000) << 16
    # The shifted bits are an f32 that is too small by a factor of 2^112. It is subnormal if the f16 is, so the product is exact for all
    # finite numbers.
    finite = (size.to("bitcast", "float") * 2.0**112).bits
    found = (size | INFINITE).where(size.compare("uge", INFINITY << SHIFT), finite)
    return (found | sign).to("bitcast", "float")


def _rounded(x: Lanes) -> Lanes:
    """Return f32 rounded to f16, as i16. A NaN becomes QUIET_NAN with its sign."""
    bits = x.bits
    size = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    odd = (size >> SHIFT) & 1
    normal = (size - REBIASED + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    # In an f32 from 0.5 to 1, the last bit is worth 2^-24, as in a subnormal f16. So adding 0.5 rounds to a subnormal f16, and subtracting
    # the bits of 0.5 leaves its significand.
    small = (size.to("bitcast", "float") + 0.5).bits - (126 << 23)
    beyond = size.const(QUIET_NAN).where(size.compare("ugt", INFINITE), INFINITY)
    found = beyond.where(size.compare("uge", TOO_LARGE), small.where(size.compare("ult", LEAST_NORMAL), normal))
    return (found | sign).to("trunc", "i16")
