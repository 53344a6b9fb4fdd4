"""Elementwise arithmetic on the software GPU gives the CPU's results: the same LLVM function runs on both, or NumPy computes them."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest

from runtime.device.cpu.code import ObjectCode
from runtime.device.cpu.host import ARCH
from runtime.objects import elf
from tests.gpu.kernels import Card, ptx_of

DTYPES = {
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "half": np.float16, "bfloat": ml_dtypes.bfloat16, "float": np.float32, "double": np.float64,
}  # fmt: skip
INTEGERS, FLOATS = ("i8", "i16", "i32", "i64"), ("half", "bfloat", "float", "double")
COUNT = 512


def values(type_: str, random: np.random.Generator) -> np.ndarray:
    """Return values of a type: random bits, small numbers and extreme values."""
    dtype = np.dtype(DTYPES[type_])
    bits = np.frombuffer(random.bytes(COUNT * dtype.itemsize), dtype).copy()
    bits[: COUNT // 2] = random.integers(-9, 10, COUNT // 2).astype(dtype)
    if type_ in INTEGERS:
        bits[:3] = np.iinfo(dtype).min, np.iinfo(dtype).max, -1
    else:
        bits[COUNT // 4 : COUNT // 2] = random.standard_normal(COUNT // 4).astype(dtype)
        bits[:5] = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    return bits


def run(text: str, result: str, operands: tuple[str, ...], arrays: list[np.ndarray], meaning: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run the body of a function on the software GPU. Compute the expected result by the same body on the CPU, or by the NumPy function
    `meaning`. Return both results."""
    names = [f"%{letter}" for letter in "abc"[: len(operands)]]
    declared = "\n".join(line for line in text.splitlines() if line.startswith("declare"))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("declare"))
    declared_operands = ", ".join(f"{t} {n}" for t, n in zip(operands, names, strict=True))
    function = f"define internal {result} @f({declared_operands}) alwaysinline {{\n{body}\nret {result} %r\n}}\n"

    def calls(space: str) -> str:
        lines = []
        for number, type_ in enumerate(operands):
            lines.append(f"%p{number} = getelementptr {type_}, ptr{space} %x{number}, i64 %i")
            lines.append(f"%v{number} = load {type_}, ptr{space} %p{number}")
        arguments = ", ".join(f"{t} %v{n}" for n, t in enumerate(operands))
        lines += [
            f"%y = call {result} @f({arguments})",
            f"%q = getelementptr {result}, ptr{space} %o, i64 %i",
            f"store {result} %y, ptr{space} %q",
        ]
        return "\n".join(lines)

    parameters = [*(f"%x{n}" for n in range(len(operands))), "%o"]
    one = " addrspace(1)"
    kernel = f"""declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @k({", ".join(f"ptr{one} {p}" for p in parameters)}) {{
%t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
%i = zext i32 %t to i64
{calls(one)}
ret void
}}"""
    host = f"""define void @h({", ".join(f"ptr {p}" for p in parameters)}, i64 %i) {{
{calls("")}
ret void
}}"""
    card = Card(1 << 20)
    module = card.load(ptx_of(f"{declared}\n{function}\n{kernel}"))
    out = card.empty(COUNT * np.dtype(DTYPES[result]).itemsize)
    card.run(module, "k", 1, COUNT, *(card.upload(a) for a in arrays), out)
    if meaning is not None:
        return card.read(out, (COUNT,), DTYPES[result]), meaning(*arrays)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    native = machine.emit_object(llvm.parse_assembly(f"{declared}\n{function}\n{host}"))
    code = ObjectCode(native, elf.read(native, ARCH).undefined)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(parameters), ctypes.c_int64)(code.address("h"))
    expected = np.zeros(COUNT, DTYPES[result])
    addresses = [a.ctypes.data for a in (*arrays, expected)]
    for i in range(COUNT):
        call(*addresses, i)
    return card.read(out, (COUNT,), DTYPES[result]), expected


def agree(text: str, result: str, *operands: str, limit: Any = None, meaning: Any = None) -> None:
    random = np.random.default_rng(7)
    arrays = [values(type_, random) for type_ in operands]
    if limit is not None:
        limit(arrays)
    with np.errstate(all="ignore"):
        got, expected = run(text, result, operands, arrays, meaning)
    if result in FLOATS:
        nan = np.isnan(expected)
        assert (np.isnan(got) == nan).all()
        got, expected = np.where(nan, expected, got), expected
    kind = f"u{got.dtype.itemsize}"
    wrong = np.flatnonzero(np.ascontiguousarray(got).view(kind) != expected.view(kind))
    assert wrong.size == 0, [(int(i), [a[i] for a in arrays], got[i], expected[i]) for i in wrong[:5]]


def _no_zero(arrays: list[np.ndarray]) -> None:
    arrays[1][arrays[1] == 0] = 3
    arrays[0][arrays[0] == np.iinfo(arrays[0].dtype).min] = 5  # the lowest integer divided by -1 overflows


def _small(arrays: list[np.ndarray]) -> None:
    arrays[1] %= 8


@pytest.mark.parametrize("type_", INTEGERS)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "and", "or", "xor", "sdiv", "udiv", "srem", "urem", "shl", "lshr", "ashr"])
def test_integers(operation: str, type_: str) -> None:
    limit = _no_zero if "div" in operation or "rem" in operation else _small if operation in ("shl", "lshr", "ashr") else None
    agree(f"%r = {operation} {type_} %a, %b", type_, type_, type_, limit=limit)


@pytest.mark.parametrize("type_", FLOATS)
@pytest.mark.parametrize("operation", ["fadd", "fsub", "fmul", "fdiv"])
def test_floats(operation: str, type_: str) -> None:
    arithmetic = {"fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide}[operation]
    agree(f"%r = {operation} {type_} %a, %b", type_, type_, type_, meaning=arithmetic)


SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}


@pytest.mark.parametrize("type_", ["float", "double"])
def test_a_product_and_a_sum_are_rounded_once(type_: str) -> None:
    name = f"@llvm.fma.{SUFFIX[type_]}"
    agree(
        f"declare {type_} {name}({type_}, {type_}, {type_})\n%r = call {type_} {name}({type_} %a, {type_} %b, {type_} %c)",
        type_,
        *[type_] * 3,
    )


@pytest.mark.parametrize("type_", ["half", "bfloat", "float"])
def test_every_nan_of_a_product_and_a_sum_has_the_same_bits(type_: str) -> None:
    """A result that is NaN is the canonical NaN, as on a card, which keeps neither the sign nor the payload of an operand."""
    name, bits = f"@llvm.fma.{SUFFIX[type_]}", np.dtype(f"u{np.dtype(DTYPES[type_]).itemsize}")
    text = f"declare {type_} {name}({type_}, {type_}, {type_})\n%r = call {type_} {name}({type_} %a, {type_} %b, {type_} %c)"
    random = np.random.default_rng(0)
    arrays = [values(type_, random) for _ in range(3)]
    with np.errstate(all="ignore"):
        found, plain = run(text, type_, (type_,) * 3, arrays, lambda a, b, c: a * b + c)
    is_nan = np.isnan(found)
    assert {int(x) for x in plain.view(bits)[is_nan]} != {int(x) for x in found.view(bits)[is_nan]} == {np.iinfo(bits).max >> 1}


@pytest.mark.parametrize("type_", ["float", "double"])
@pytest.mark.parametrize("name", ["fabs", "sqrt", "floor", "ceil", "trunc", "rint"])
def test_functions_of_a_float(name: str, type_: str) -> None:
    full = f"@llvm.{name}.{SUFFIX[type_]}"
    agree(f"declare {type_} {full}({type_})\n%r = call {type_} {full}({type_} %a)", type_, type_)


@pytest.mark.parametrize("type_", ["float", "double"])
@pytest.mark.parametrize("name", ["minnum", "maxnum", "copysign"])
def test_functions_of_two_floats(name: str, type_: str) -> None:
    def apart(arrays: list[np.ndarray]) -> None:
        arrays[1][arrays[1] == 0] = 1  # LLVM does not specify whether -0 or +0 is the minimum

    full = f"@llvm.{name}.{SUFFIX[type_]}"
    agree(f"declare {type_} {full}({type_}, {type_})\n%r = call {type_} {full}({type_} %a, {type_} %b)", type_, type_, type_, limit=apart)


@pytest.mark.parametrize("type_", ["i16", "i32", "i64"])
@pytest.mark.parametrize("name", ["ctpop", "bitreverse", "bswap"])
def test_bits(name: str, type_: str) -> None:
    full = f"@llvm.{name}.{type_}"
    agree(f"declare {type_} {full}({type_})\n%r = call {type_} {full}({type_} %a)", type_, type_)


@pytest.mark.parametrize("type_", ["i32", "i64"])
@pytest.mark.parametrize("name", ["ctlz", "cttz"])
def test_zeros_are_counted(name: str, type_: str) -> None:
    full = f"@llvm.{name}.{type_}"
    agree(f"declare {type_} {full}({type_}, i1)\n%r = call {type_} {full}({type_} %a, i1 false)", type_, type_)


@pytest.mark.parametrize("type_", ["i32", "i64"])
@pytest.mark.parametrize("name", ["smin", "smax", "umin", "umax", "fshl", "fshr"])
def test_functions_of_integers(name: str, type_: str) -> None:
    count = 3 if name.startswith("fsh") else 2
    full = f"@llvm.{name}.{type_}"
    arguments = ", ".join(f"{type_} %{letter}" for letter in "abc"[:count])
    agree(f"declare {type_} {full}({', '.join([type_] * count)})\n%r = call {type_} {full}({arguments})", type_, *[type_] * count)


@pytest.mark.parametrize("predicate", ["oeq", "une", "olt", "ole", "ogt", "oge", "ult", "uge", "ueq", "one", "ord", "uno"])
@pytest.mark.parametrize("type_", ["float", "double"])
def test_comparisons_of_floats(type_: str, predicate: str) -> None:
    agree(f"%p = fcmp {predicate} {type_} %a, %b\n%r = zext i1 %p to i32", "i32", type_, type_)


@pytest.mark.parametrize("predicate", ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"])
@pytest.mark.parametrize("type_", INTEGERS)
def test_comparisons_of_integers(type_: str, predicate: str) -> None:
    agree(f"%p = icmp {predicate} {type_} %a, %b\n%r = select i1 %p, {type_} %a, {type_} %b", type_, type_, type_)


@pytest.mark.parametrize("conversion", [
    "sext i8 i32", "zext i8 i32", "sext i8 i64", "zext i16 i64", "sext i16 i32", "sext i32 i64", "zext i32 i64",
    "trunc i64 i32", "trunc i64 i8", "trunc i32 i16", "trunc i32 i8",
    "sitofp i32 float", "uitofp i32 float", "sitofp i64 float", "uitofp i64 float", "sitofp i8 float", "sitofp i32 double",
    "uitofp i64 double",
    "sitofp i32 half", "fpext half float", "fpext bfloat float", "fpext float double",
    "fptrunc float half", "fptrunc float bfloat", "fptrunc double float",
])  # fmt: skip
def test_conversions(conversion: str) -> None:
    name, source, target = conversion.split()
    dtype = DTYPES[target]
    narrow = {"half", "bfloat"} & {source, target}  # CPU code calls conversion functions for these types, which may be missing
    agree(f"%r = {name} {source} %a to {target}", target, source, meaning=(lambda a: a.astype(dtype)) if narrow else None)


@pytest.mark.parametrize("target", ["i8", "i32", "i64"])
@pytest.mark.parametrize("name", ["fptosi", "fptoui"])
def test_floats_become_integers(name: str, target: str) -> None:
    """Floats outside the range of the integer type saturate, and NaN becomes 0."""
    full = f"@llvm.{name}.sat.{target}.f32"
    agree(f"declare {target} {full}(float)\n%r = call {target} {full}(float %a)", target, "float")


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x0123, 0x6666, 0x4BA8])
@pytest.mark.parametrize("form", ["immediate", "register"])
def test_bytes_are_picked_or_are_signs(selector: int, form: str) -> None:
    """The selector's digit for each byte of the result names one of the eight bytes of both operands, or their sign from 8 on."""

    def picked(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        both = np.stack([a, b], 1).view(np.int8)
        digits = [selector >> 4 * place & 15 for place in range(4)]
        parts = [both[:, digit & 7] >> 7 if digit & 8 else both[:, digit & 7] for digit in digits]
        return np.stack(parts, 1).view(np.int32)[:, 0]

    given = f"{selector:#06x}" if form == "immediate" else "$3"
    more = ("", "") if form == "immediate" else (",r", f", i32 {selector}")
    text = f'%r = call i32 asm "prmt.b32 $0, $1, $2, {given};", "=r,r,r{more[0]}"(i32 %a, i32 %b{more[1]})'
    random = np.random.default_rng(0)
    found, expected = run(text, "i32", ("i32", "i32"), [values("i32", random) for _ in range(2)], picked)
    np.testing.assert_array_equal(found, expected)
