"""The linked object file: it has no undefined symbols, is reproducible, and uses the vector instructions of its target."""

from __future__ import annotations

import re

import pytest

from compiler.backends.cpu.backend import CPU
from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.registry import backend_of
from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import link
from compiler.ir.dims import Dim, DimVar, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Const, DimScalar, Load, Scalar
from compiler.ir.loops.statements import For, LoopKind, Stmt, Store, When
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED, Target, get

CPUS = [t.name for t in NAMED.values() if backend_of(t) is CPU]


def rowwise(dtype: DType, target: Target, name: str, *fns: Fn) -> KernelCode:
    """Emit a kernel that computes y = fns(x * x + x) in vectors of the target's width; the last vector of a row is masked."""
    n, m = DimVar("n", lower=1), DimVar("m", lower=1)
    width = target.lanes(4)
    x, y = Buffer("x", (n.dim, m.dim), dtype), Buffer("y", (n.dim, m.dim), dtype)
    i, j, v = DimVar("i", upper=n - 1), DimVar("j"), DimVar("v", upper=width - 1)
    at = j * width + v
    item: Scalar = Load(x, (i.dim, at))
    value: Scalar = Apply(Fn.FMA, (item, item, item))
    for fn in fns:
        value = Apply(fn, (value,))
    guarded = When(Apply(Fn.LT, (DimScalar(at), DimScalar(m.dim))), Store(y, (i.dim, at), value))
    columns = For(j, ceil_div(m, width), For(v, Dim.of(width), guarded, LoopKind.VECTOR))
    return emit_kernel(name, PrimFunc((x, y), 1, For(i, n.dim, columns, LoopKind.PARALLEL)), target)


MATH = (Fn.EXP, Fn.LOG, Fn.SIN, Fn.COS, Fn.TANH, Fn.ERF, Fn.SQRT, Fn.FLOOR, Fn.ROUND)


@pytest.mark.parametrize("name", CPUS)
def test_nothing_is_left_to_be_resolved(name: str) -> None:
    target = get(name)
    kernels = [rowwise(dtype, target, f"k_{dtype}", *MATH) for dtype in (DType.F32, DType.BF16, DType.F16)]
    assembly = link(kernels, target).assembly()
    defined = set(re.findall(r"^([\w.]+):", assembly, re.MULTILINE))
    called = set(re.findall(r"^\s+(?:callq?|tail|bl|jmp|b)\s+([A-Za-z_][\w.]*)", assembly, re.MULTILINE))
    assert called <= defined


VECTOR_FMA = {
    "x86-64-v3": r"vfmadd\w+\s.*%ymm",
    "avx512": r"vfmadd\w+\s.*%zmm",
    "avx512-vnni-bf16": r"vfmadd\w+\s.*%zmm",
    "avx512-bf16-amd": r"vfmadd\w+\s.*%zmm",
    "amx": r"vfmadd\w+\s.*%zmm",
    "aarch64-neon": r"fml[as]\s+v\d+\.4s",
    "aarch64-dotprod": r"fml[as]\s+v\d+\.4s",
    "aarch64-i8mm-bf16": r"fml[as]\s+v\d+\.4s",
    "aarch64-android": r"fml[as]\s+v\d+\.4s",
    "riscv64": r"fmadd\.s",
    "riscv64-v": r"vfmadd|vfmacc",
}


@pytest.mark.parametrize("name", CPUS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_vector_instructions_of_the_target(name: str, dtype: DType) -> None:
    target = get(name)
    assembly = link([rowwise(dtype, target, "k", Fn.EXP)], target).assembly()
    assert re.search(VECTOR_FMA[name], assembly)
    if name == "x86-64-v3":
        assert "zmm" not in assembly


def test_code_for_android_keeps_its_platform_register() -> None:
    """Android's ABI reserves x18, in which the system keeps the address of a second stack. Linux leaves it to programs."""

    def uses(name: str) -> bool:
        target = get(name)
        return bool(re.search(r"\b[xw]18\b", link([rowwise(DType.F16, target, "k", *MATH)], target).assembly()))

    assert not uses("aarch64-android") and uses("aarch64-dotprod")


def test_the_same_text_gives_the_same_bytes() -> None:
    target = get("x86-64-v3")
    kernel = rowwise(DType.F32, target, "k", Fn.TANH)
    again = rowwise(DType.F32, target, "k", Fn.TANH)
    assert kernel.text == again.text
    assert link([kernel], target).object == link([again], target).object


def test_constant_loops_do_not_become_library_calls() -> None:
    n = DimVar("n", lower=1)
    x, y = Buffer("x", (n.dim,), DType.F32), Buffer("y", (n.dim,), DType.F32)
    i, j = DimVar("i", upper=n - 1), DimVar("j", upper=n - 1)
    bodies: list[Stmt] = [Store(y, (i.dim,), Const(0.0, DType.F32)), Store(y, (j.dim,), Load(x, (j.dim,)))]
    for var, body in zip((i, j), bodies, strict=True):
        target = get("x86-64-v3")
        assembly = link([emit_kernel("k", PrimFunc((x, y), 1, For(var, n.dim, body)), target)], target).assembly()
        assert "memset" not in assembly
        assert "memcpy" not in assembly


def test_kernels_share_math_functions() -> None:
    target = get("avx512")
    text = link([rowwise(DType.F32, target, name, Fn.EXP) for name in ("a", "b")], target).unoptimised
    assert text.count("@math.exp.16(<16 x float> %x) alwaysinline") == 1


def test_a_kernel_may_have_the_name_of_the_math_functions() -> None:
    prim = parse("prim math(X: f32[n], out Y: f32[n]) { for i in n { Y[i] = pow(X[i], 2.5) } }").prim("math")
    target = get("x86-64-v3")
    assert link([emit_kernel("math", prim, target)], target).object
