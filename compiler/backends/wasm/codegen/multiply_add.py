"""a * b + c in WebAssembly: `relaxed_madd`, which rounds once if the CPU can, or, if the target lacks it, a product and a sum.

LLVM's `fma` must round once, for which WebAssembly has no instruction. So the kernels call the functions of this file instead.
`relaxed_madd` multiplies whole registers: longer vectors are split into registers, and a scalar fills one lane of a register.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from compiler.llvm.ssa import MULTIPLY_ADD, Code, suffix, vec, vector_literal
from compiler.machine.product_steps.wasm import RELAXED
from compiler.machine.target import Target

REGISTER_BITS: Final = 128
_WIDTHS: Final = {"f32": ("float", 32), "f64": ("double", 64)}
_CALL: Final = re.compile(rf"@{re.escape(MULTIPLY_ADD)}\.(?:v(\d+))?(f32|f64)\(")
_OURS: Final = "multiply_add"


def with_multiply_add(text: str, target: Target) -> str:
    """Replace calls of LLVM's `fma` in a module's text by calls of functions that this file defines."""
    shapes = sorted({(int(found[1] or 1), found[2]) for found in _CALL.finditer(text)})
    text = _CALL.sub(lambda found: found[0].replace(MULTIPLY_ADD, _OURS), text)
    return "\n\n".join([text, *(_definition(lanes, kind, target) for lanes, kind in shapes)])


def _definition(lanes: int, kind: str, target: Target) -> str:
    """Define the function for vectors of `lanes` floats, f32 or f64."""
    element, bits = _WIDTHS[kind]
    code, type_ = Code(), vec(element, lanes)
    if target.features >= RELAXED:
        result = _relaxed(code, element, lanes, REGISTER_BITS // bits)
    else:
        result = code.op(f"fadd {type_} {code.op(f'fmul {type_} %a, %b')}, %c")
    head = f"define internal {type_} @{_OURS}.{suffix(element, lanes)}({type_} %a, {type_} %b, {type_} %c) alwaysinline nounwind"
    return f"{head} {{\nentry:\n{code.text()}\n  ret {type_} {result}\n}}"


def _relaxed(code: Code, element: str, lanes: int, per: int) -> str:
    """Multiply and add `per` lanes at a time. If the lanes do not fill the last register, its other lanes may hold anything; they are
    dropped at the end."""
    whole = -(-lanes // per) * per
    operands = [_widened(code, x, element, lanes, whole) for x in ("%a", "%b", "%c")]
    part, all_ = vec(element, per), vec(element, whole)
    names = suffix(element, per), suffix(element, whole)
    result = "poison"
    for begin in range(0, whole, per):
        cut = [code.op(f"call {part} @llvm.vector.extract.{names[0]}.{names[1]}({all_} {x}, i64 {begin})") for x in operands]
        made = code.op(f"call {part} @llvm.wasm.relaxed.madd.{names[0]}({', '.join(f'{part} {x}' for x in cut)})")
        result = code.op(f"call {all_} @llvm.vector.insert.{names[1]}.{names[0]}({all_} {result}, {part} {made}, i64 {begin})")
    if lanes == 1:
        return code.op(f"extractelement {all_} {result}, i64 0")
    return result if lanes == whole else _chosen(code, result, element, whole, range(lanes))


def _widened(code: Code, x: str, element: str, lanes: int, whole: int) -> str:
    """Return x with `whole` lanes. The further lanes may hold anything."""
    if lanes == 1:
        return code.op(f"insertelement {vec(element, whole)} poison, {element} {x}, i64 0")
    return x if lanes == whole else _chosen(code, x, element, lanes, (min(i, lanes - 1) for i in range(whole)))


def _chosen(code: Code, x: str, element: str, lanes: int, numbers: Iterable[int]) -> str:
    """Return the lanes of x that have these numbers."""
    mask = vector_literal("i32", numbers)
    kind = vec(element, lanes)
    return code.op(f"shufflevector {kind} {x}, {kind} poison, <{mask.count('i32')} x i32> {mask}")
