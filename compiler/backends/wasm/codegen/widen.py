"""Convert bf16 to f32 in one instruction per register: interleave the lanes with zeros, which moves 16 bits to the upper half of 32.

LLVM's code for `shl (zext x), 16` and `shl (sext x), 16` takes two instructions for the lower lanes of a register. For the upper lanes, V8
compiles this code to three instructions.
"""

from __future__ import annotations

import re
from typing import Final

from compiler.llvm.ssa import vector_literal

_SHIFTED: Final = re.compile(
    r"(?P<wide>%\S+) = [sz]ext <(?P<lanes>\d+) x i16> (?P<narrow>%\S+) to <\d+ x i32>\n"
    r"( *)(?P<result>%\S+) = shl <\d+ x i32> (?P=wide), splat \(i32 16\)"
)


def with_interleaving(text: str) -> str:
    """Replace, in a module's text, each conversion of 16-bit lanes to the upper halves of 32-bit lanes by a shuffle with zeros."""
    return _SHIFTED.sub(_interleaved, text)


def _interleaved(found: re.Match[str]) -> str:
    """Return the shuffle that replaces the shift of a conversion. Keep the extension before it, because further code may use its result."""
    extended, shifted = found[0].split("\n")
    lanes, both = int(found["lanes"]), f"{found['result']}.both"
    order = vector_literal("i32", [number for lane in range(lanes) for number in (lane, lanes + lane)])
    kind = f"<{lanes} x i16>"
    shuffle = f"{both} = shufflevector {kind} zeroinitializer, {kind} {found['narrow']}, <{2 * lanes} x i32> {order}"
    return f"{extended}\n{shuffle}\n{shifted.split('=')[0]}= bitcast <{2 * lanes} x i16> {both} to <{lanes} x i32>"
