"""Products with quantised weights round their rows in the same way on all CPU targets, so all compute the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.machine.products import product_tiles
from compiler.machine.target import BF16_UNITS, GPU, NAMED
from compiler.numeric_class import numeric_class
from compiler.passes.number_schemes import schemes_of

CPUS = [name for name, target in NAMED.items() if target.system != GPU]
FIRST = CPUS[0]
K = 1088  # sums of more than 512 products may not fit in 32 bits; K is no multiple of 512, so the parts of a sum are shorter

# kind of weights -> parameters, the weight, and attributes of the product
WEIGHTS = {
    "8 bits by channel": (f"q: i8[24, {K}], s: f32[24, 1]", "dequantize(q, s)", ""),
    "8 bits, rows of 8": (f"q: i8[24, {K}], s: f32[24, 1]", "dequantize(q, s)", ', tolerates="i8"'),
    "8 bits in groups": (f"q: i8[24, {K}], s: f16[24, {K // 32}]", "dequantize(q, s, group=32)", ""),
    "6 bits": (f"q: i8[24, {K}], s: f32[24, {K // 16}]", "dequantize(q, s, bits=6, group=16)", ""),
    "4 bits": (f"q: u8[24, {K // 2}], s: bf16[24, {K // 32}]", "dequantize(q, s, bits=4, group=32)", ""),
    "4 bits, shifted": (
        f"q: u8[24, {K // 2}], s: f16[24, {K // 32}], o: f16[24, {K // 32}]",
        "dequantize(q, s, o, bits=4, group=32, shifted=true)",
        "",
    ),
    "4 bits by channel": (f"q: u8[24, {K // 2}], s: f32[24, 1]", "dequantize(q, s, bits=4)", ""),
    "4 bits, rows of 8": (
        f"q: u8[24, {K // 2}], s: bf16[24, {K // 32}]",
        "dequantize(q, s, bits=4, group=32)",
        ', tolerates="i8"',
    ),
    "floats of 4 bits": (f"q: u8[24, {K // 2}], s: bf16[24, {K // 32}]", 'dequantize(q, s, bits=4, group=32, kind="e2m1")', ""),
    "iq4": (f"q: u8[24, {K // 2}], s: f16[24, {K // 32}]", 'dequantize(q, s, bits=4, group=32, kind="iq4")', ""),
    "iq3_xxs": (f"q: u8[24, {K // 2}], s: f32[24, {K // 32}]", 'dequantize(q, s, bits=4, group=32, kind="iq3_xxs")', ""),
    "iq2": (f"q: u8[24, {K // 2}], s: f32[24, {K // 16}]", 'dequantize(q, s, bits=4, group=16, kind="iq2")', ""),
    "iq1": (f"q: u8[24, {K // 2}], s: f32[24, {K // 16}]", 'dequantize(q, s, bits=4, group=16, kind="iq1")', ""),
    "nf4": (f"q: u8[24, {K // 2}], s: f32[24, {K // 64}]", 'dequantize(q, s, bits=4, group=64, kind="nf4")', ""),
}


def program(kind: str) -> IRModule:
    params, weight, attrs = WEIGHTS[kind]
    return parse(f"func main(x: f32[n, {K}], {params}) -> f32[n, 24] {{ w = {weight} y = linear(x, w{attrs}) return y }}")


def operands(module: IRModule, kind: str) -> list[Any]:
    rng, found = np.random.default_rng(0), []
    for param in module.graph("main").params:
        shape = [dim.const if dim.is_const else 5 for dim in param.type.shape]
        if param.name == "q":
            low, high = (-32, 32) if kind == "6 bits" else (-127, 128)
            q = rng.integers(low, high, shape).astype(np.int8)
            found.append(q.view(param.type.dtype.numpy))
        else:
            found.append((rng.standard_normal(shape) + 2).astype(param.type.dtype.numpy))
    return found


@pytest.fixture(scope="module")
def computed() -> Callable[[str, str], tuple[set[str], bytes]]:
    """Return a function that returns, for a target and a kind of weights, the operators of the program that the passes make, and the bits
    that the interpreter computes. Equal programs of several targets are interpreted once."""
    known: dict[tuple[str, str], bytes] = {}

    def call(name: str, kind: str) -> tuple[set[str], bytes]:
        module = program(kind)
        after = pipeline(NAMED[name]).until("integer_products")(module)
        key = kind, print_module(after)
        if key not in known:
            known[key] = Interpreter(after).call("main", *operands(module, kind)).tobytes()
        return {b.value.op.name for b in after.graph("main").body.bindings if isinstance(b.value, Call)}, known[key]

    return call


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", CPUS[1:])
def test_every_cpu_computes_the_same_bits(name: str, kind: str, computed: Callable[[str, str], tuple[set[str], bytes]]) -> None:
    """The interpreter runs what the passes make of the program for each target. The bits are equal, and all products are of integers."""
    found: list[bytes] = []
    for target in (FIRST, name):
        operators, bits = computed(target, kind)
        assert "integer_linear" in operators and "linear" not in operators, target
        found.append(bits)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rounding_rows_changes_little(kind: str) -> None:
    module = program(kind)
    given = operands(module, kind)
    exact, found = (Interpreter(m).call("main", *given) for m in (module, pipeline(NAMED[FIRST]).until("integer_products")(module)))
    assert np.abs(exact - found).max() < 1e-2 * np.abs(exact).max()


@pytest.mark.parametrize("name", CPUS)
def test_no_cpu_rounds_rows_without_leave(name: str) -> None:
    """Products of floats round rows to bf16 only if the program tolerates it, and only where the numeric class says so."""
    text = "func main(x: f32[n, 64], w: bf16[32, 64]) -> f32[n, 32] {{ y = linear(x, w{}) return y }}"
    target = NAMED[name]
    for attrs, tolerated in (("", False), (', tolerates="bf16"', True)):
        module = parse(text.format(attrs))
        operators = pipeline(target).until("legalize")
        rounds = any("round_operands" in str(step) or type(step).__name__ == "RoundOperands" for step in operators.passes)
        assert (numeric_class(module, target) in BF16_UNITS) == (tolerated and rounds)
    assert (product_tiles(target).pairs is not None) == rounds


@pytest.mark.parametrize(
    ("name", "exact", "fast"),
    [
        ("x86-64-v3", "portable", "portable"),
        ("avx512-vnni-bf16", "portable", "portable"),
        ("avx512-bf16-amd", "portable", "bf16"),
        ("amx", "portable", "amx"),
        ("aarch64-neon", "portable", "portable"),
        ("riscv64", "portable", "portable"),
        ("wasm-relaxed", "portable", "portable"),
        ("wasm-simd128", "unfused", "unfused"),
        ("sm_90a", "sm_90a", "sm_90a"),
    ],
)
def test_the_numeric_class_names_what_computes_other_bits(name: str, exact: str, fast: str) -> None:
    text = "func main(x: f32[n, 64], w: bf16[32, 64]) -> f32[n, 32] {{ y = linear(x, w{}) return y }}"
    found = [numeric_class(parse(text.format(attrs)), NAMED[name]) for attrs in ("", ', tolerates="bf16"')]
    assert found == [exact, fast]


def test_schemes_are_said_in_words() -> None:
    module = parse("""
        func main(x: f32[n, 64], q: u8[64, 32], s: bf16[64, 2], v: bf16[64, 64]) -> f32[n, 64] {
          w = dequantize(q, s, bits=4, group=32)
          u = dequantize(q, s, bits=4, group=32, kind="iq2")
          a = linear(x, w)
          b = linear(a, w)
          c = linear(b, u)
          d = linear(c, v)
          return d
        }
    """)
    assert schemes_of(module) == {
        "weights of 4 bits and rows of 8 bits, outliers of 16 bits, exact in groups of 32": 2,
        "weights of 4 bits (codes of iq2) and rows of 8 bits, outliers of 16 bits, exact in groups of 32": 1,
        "weights of bf16 and rows of f32": 1,
    }
