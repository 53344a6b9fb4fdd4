"""The helper functions that a WebAssembly module contains besides its kernels."""

from __future__ import annotations

import json
from pathlib import Path

from compiler.backends.wasm.codegen.link import link
from compiler.machine.target import get
from tests.node import run_node

PRODUCT = """
define i64 @overflows(i64 %a, i64 %b) {
  %both = call {i64, i1} @llvm.smul.with.overflow.i64(i64 %a, i64 %b)
  %flag = extractvalue {i64, i1} %both, 1
  %wide = zext i1 %flag to i64
  ret i64 %wide
}
define i64 @product(i64 %a, i64 %b) {
  %both = call {i64, i1} @llvm.smul.with.overflow.i64(i64 %a, i64 %b)
  %result = extractvalue {i64, i1} %both, 0
  ret i64 %result
}
declare {i64, i1} @llvm.smul.with.overflow.i64(i64, i64)
"""
RUN = """
import { readFileSync } from 'node:fs';
const __stack_pointer = new WebAssembly.Global({ value: 'i32', mutable: true }, 32768);
const env = { memory: new WebAssembly.Memory({ initial: 1, maximum: 1 }), __stack_pointer };
const { overflows, product } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(process.argv[1])), { env }).exports;
const pairs = JSON.parse(process.argv[2]).map((pair) => pair.map(BigInt));
console.log(JSON.stringify(pairs.map(([a, b]) => [Number(overflows(a, b)), String(product(a, b))])));
"""
ENDS = [0, 1, -1, 2, -2, 3_037_000_499, 3_037_000_500, -3_037_000_500, 2**31, 2**32, 2**62, -(2**62), 2**63 - 1, -(2**63), 6_700_417 << 24]


def test_products_that_overflow_are_noticed(tmp_path: Path) -> None:
    """The multiplication of two 64-bit integers detects overflow. On other machines LLVM detects overflow by a 128-bit multiplication,
    which WebAssembly lacks."""
    (tmp_path / "m.wasm").write_bytes(link([], get("wasm-simd128"), PRODUCT).object)
    pairs = [(a, b) for a in ENDS for b in ENDS]
    found = json.loads(run_node(RUN, tmp_path / "m.wasm", json.dumps([[str(a), str(b)] for a, b in pairs])))
    for (a, b), (overflows, product) in zip(pairs, found, strict=True):
        assert overflows == (not -(2**63) <= a * b < 2**63), (a, b)
        assert (int(product) - a * b) % 2**64 == 0, (a, b)
