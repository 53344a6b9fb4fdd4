"""Compile kernels to one WebAssembly module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from compiler.backends.wasm.codegen.module import linked
from compiler.backends.wasm.codegen.multiply_add import with_multiply_add
from compiler.backends.wasm.codegen.object import read_object
from compiler.backends.wasm.codegen.widen import with_interleaving
from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import LinkedCode, module_text
from compiler.codegen.machine_code import Emit, emitted
from compiler.machine.target import Target

# The product of two 128-bit integers. LLVM calls this function to find out whether a 64-bit product overflows. Each factor is passed as two
# halves, the lower one first.
WIDE_PRODUCT: Final = """
define hidden void @__multi3(ptr %result, i64 %a, i64 %a.high, i64 %b, i64 %b.high) nounwind {
  %a0 = and i64 %a, 4294967295
  %a1 = lshr i64 %a, 32
  %b0 = and i64 %b, 4294967295
  %b1 = lshr i64 %b, 32
  %p00 = mul i64 %a0, %b0
  %p01 = mul i64 %a0, %b1
  %p10 = mul i64 %a1, %b0
  %p11 = mul i64 %a1, %b1
  %c0 = lshr i64 %p00, 32
  %c1 = and i64 %p01, 4294967295
  %c2 = and i64 %p10, 4294967295
  %c3 = add i64 %c0, %c1
  %middle = add i64 %c3, %c2
  %low = mul i64 %a, %b
  %h0 = lshr i64 %p01, 32
  %h1 = lshr i64 %p10, 32
  %h2 = lshr i64 %middle, 32
  %h3 = add i64 %p11, %h0
  %h4 = add i64 %h3, %h1
  %h5 = add i64 %h4, %h2
  %x0 = mul i64 %a, %b.high
  %x1 = mul i64 %a.high, %b
  %h6 = add i64 %h5, %x0
  %high = add i64 %h6, %x1
  store i64 %low, ptr %result
  %above = getelementptr i64, ptr %result, i32 1
  store i64 %high, ptr %above
  ret void
}
"""


def link(kernels: Iterable[KernelCode], target: Target, extra: str = "", emit: Emit = emitted) -> LinkedCode:
    """Link all kernels. `extra` is LLVM IR of further functions, such as those that compute shapes. If any function tests a product for
    overflow, add the function that LLVM calls for this."""
    text = with_interleaving(with_multiply_add(module_text(kernels, target, extra), target))
    if "smul.with.overflow.i64" in text:
        text += WIDE_PRODUCT
    return LinkedCode(linked(read_object(emit(text, target))), text, target)
