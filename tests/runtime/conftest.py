"""Kernels for the runtime's tests. They are written in LLVM IR and compiled by LLVM alone, so these tests do not depend on our compiler."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from runtime.device.cpu.host import ARCH

# name -> (number of buffers, element type, code of iteration %i). In the code, %p0, %p1, ... point to element %i of each buffer, and %n,
# %d1, ... are integers of the shape heap.
KERNELS = {
    "add_one": (2, "float", "%x = load float, ptr %p0\n %y = fadd float %x, 1.0\n store float %y, ptr %p1"),
    "scale": (
        2,
        "float",
        """%x = load float, ptr %p0
  %f = bitcast i64 %d1 to double
  %g = fptrunc double %f to float
  %y = fmul float %x, %g
  store float %y, ptr %p1""",
    ),
    "count": (1, "i64", "%old = atomicrmw add ptr %p0, i64 1 seq_cst"),
    # out[i] = 3 * in[i] + in[n - 1 - i]. The result is wrong if this launch starts before all iterations of the previous launch have ended.
    "mix": (
        2,
        "i64",
        """%last = sub i64 %n, 1
  %k = sub i64 %last, %i
  %q = getelementptr i64, ptr %b0, i64 %k
  %x = load i64, ptr %p0
  %y = load i64, ptr %q
  %t = mul i64 %x, 3
  %s = add i64 %t, %y
  store i64 %s, ptr %p1""",
    ),
}

GRID = """
define i64 @grid(ptr %dims) {
  %n = load i64, ptr %dims
  ret i64 %n
}
define i64 @derive(ptr %heap) {
  %n = load i64, ptr %heap
  %bytes = mul i64 %n, 4
  %up = add i64 %bytes, 63
  %aligned = and i64 %up, -64
  %p = getelementptr i64, ptr %heap, i64 1
  store i64 %aligned, ptr %p
  %two = mul i64 %aligned, 2
  %q = getelementptr i64, ptr %heap, i64 2
  store i64 %two, ptr %q
  ret i64 0
}
"""


def kernel_text(name: str, num_buffers: int, element: str, work: str) -> str:
    bases = "".join(f"  %a{b} = getelementptr ptr, ptr %buffers, i64 {b}\n  %b{b} = load ptr, ptr %a{b}\n" for b in range(num_buffers))
    elements = "".join(f"  %p{b} = getelementptr {element}, ptr %b{b}, i64 %i\n" for b in range(num_buffers))
    return f"""
define void @{name}(ptr %buffers, ptr %dims, i64 %begin, i64 %end) {{
entry:
  %n = load i64, ptr %dims
  %d1.p = getelementptr i64, ptr %dims, i64 1
  %d1 = load i64, ptr %d1.p
{bases}
  br label %loop
loop:
  %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
{elements}
  {work}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %exit
exit:
  ret void
}}
"""


def compile_ir(text: str) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=1, reloc="pic", codemodel="small")
    return machine.emit_object(llvm.parse_assembly(text))


@pytest.fixture(scope="session")
def compile_object():
    return compile_ir


@pytest.fixture(scope="session")
def object_code() -> bytes:
    """Compile all kernels and two functions. `grid` returns a kernel's first integer. `derive` reads the number n from slot 0 of the shape
    heap, stores in slot 1 the bytes of n floats, rounded up to the alignment, and in slot 2 twice that size."""
    return compile_ir(GRID + "".join(kernel_text(name, *rest) for name, rest in KERNELS.items()))


@pytest.fixture(scope="session")
def host_target() -> str:
    """Return a target of this machine's architecture that requires no CPU features."""
    return f"{ARCH}:"
