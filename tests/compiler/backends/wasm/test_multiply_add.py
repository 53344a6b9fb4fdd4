"""Multiply-add in WebAssembly, for any number of lanes. It rounds only once if the engine has a fused operation."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from compiler.backends.wasm.codegen.link import link
from compiler.llvm.ssa import Code, multiply_add, vec
from compiler.machine.target import NAMED, Target, get
from tests.node import run_node

WASM = [t for t in NAMED.values() if t.arch == "wasm32"]
SHAPES = [("float", lanes) for lanes in (1, 2, 3, 4, 5, 8, 16)] + [("double", lanes) for lanes in (1, 2, 3, 4)]
RUN = """
import { readFileSync } from 'node:fs';
const [file, given] = process.argv.slice(1);
const memory = new WebAssembly.Memory({ initial: 1, maximum: 1 });
const env = { memory, __stack_pointer: new WebAssembly.Global({ value: 'i32', mutable: true }, 32768) };
const { exports } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(file)), { env });
new Uint8Array(memory.buffer).set(readFileSync(given), 40960);
for (const name of Object.keys(exports).filter((name) => name.startsWith('f_'))) exports[name]();
process.stdout.write(new Uint8Array(memory.buffer, 49152, 8192));
"""


def function(number: int, element: str, lanes: int) -> str:
    code, kind = Code(), vec(element, lanes)
    base = 40960 if element == "float" else 45056
    a, b, c = (code.op(f"load {kind}, ptr inttoptr (i32 {base + 128 * i} to ptr), align 4") for i in range(3))
    code.do(f"store {kind} {multiply_add(code, a, b, c, element, lanes)}, ptr inttoptr (i32 {49152 + 128 * number} to ptr), align 4")
    return f"define void @f_{number}() {{\nentry:\n{code.text()}\n  ret void\n}}"


@pytest.mark.parametrize("target", WASM, ids=lambda t: t.name)
def test_it_rounds_as_the_target_says(target: Target, tmp_path: Path) -> None:
    (tmp_path / "m.wasm").write_bytes(link([], target, "\n\n".join(function(i, *shape) for i, shape in enumerate(SHAPES))).object)
    rng = np.random.default_rng(3)
    floats, doubles = (rng.standard_normal((3, 128 // size)).astype(dtype) for size, dtype in ((4, np.float32), (8, np.float64)))
    (tmp_path / "given").write_bytes(floats.tobytes().ljust(4096, b"\0") + doubles.tobytes())
    found = run_node(RUN, tmp_path / "m.wasm", tmp_path / "given")
    for i, (element, lanes) in enumerate(SHAPES):
        (a, b, c), dtype = (floats, np.float32) if element == "float" else (doubles, np.float64)
        fused = [nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), dtype) for x, y, z in zip(a, b, c, strict=True)]
        expected = np.array(fused, dtype) if target.has_fma else a * b + c
        got = np.frombuffer(found, dtype, lanes, 128 * i)
        assert got.tobytes() == expected[:lanes].tobytes(), (element, lanes)


def nearest(value: Fraction, dtype: type[np.floating]) -> float:
    """Return the number of type `dtype` that is nearest to an exact fraction. The candidates are the fraction rounded to f64 and then to
    `dtype`, and the two neighbours of this number."""
    middle = dtype(float(value))
    around = [np.nextafter(middle, dtype(-np.inf)), middle, np.nextafter(middle, dtype(np.inf))]
    return float(min(around, key=lambda x: abs(Fraction(float(x)) - value)))


@pytest.mark.parametrize(("name", "instruction"), [("wasm-relaxed", "f32x4.relaxed_madd"), ("wasm-simd128", "f32x4.mul")])
def test_vectors_take_whole_registers(name: str, instruction: str) -> None:
    assembly = link([], get(name), function(0, "float", 16)).assembly()
    assert assembly.count(instruction) == 4 and "f32.mul" not in assembly
