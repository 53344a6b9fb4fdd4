"""Products of bytes in WebAssembly are exact, with relaxed SIMD and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.wasm.codegen.link import link
from compiler.ir.dtypes import DType
from compiler.machine.target import Target
from tests.compiler.backends.wasm.test_multiply_add import WASM
from tests.compiler.machine.intrinsics.test_dot_panel import COLUMNS, ROWS, K, op_of, tiled
from tests.node import run_node

RUN = """
import { readFileSync } from 'node:fs';
const [file, given] = process.argv.slice(1);
const memory = new WebAssembly.Memory({ initial: 1, maximum: 1 });
const env = { memory, __stack_pointer: new WebAssembly.Global({ value: 'i32', mutable: true }, 32768) };
const { exports } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(file)), { env });
new Uint8Array(memory.buffer).set(readFileSync(given), 40960);
new Uint32Array(memory.buffer, 36864).set([40960, 45056, 49152]);
const body = Object.entries(exports).find(([, value]) => value.length === 4)[1];
body(36864, 0, 0n, 1n);
process.stdout.write(new Uint8Array(memory.buffer, 49152, 4096));
"""


@pytest.mark.parametrize(("bits", "rows"), [(4, DType.I8), (8, DType.I16)], ids=["bytes by 4 bits", "words by bytes"])
@pytest.mark.parametrize("target", WASM, ids=lambda t: t.name)
def test_it_means_what_the_tile_means(target: Target, bits: int, rows: DType, tmp_path: Path) -> None:
    """With the largest numbers of both signs among them."""
    (tmp_path / "m.wasm").write_bytes(link([emit_kernel("tile", tiled(bits, 4, rows), target)], target).object)
    chance, kind = np.random.default_rng(4), np.int8 if rows is DType.I8 else np.int16
    a = chance.integers(np.iinfo(kind).min, np.iinfo(kind).max, (ROWS, K), kind, endpoint=True)
    a[0], a[1] = np.iinfo(kind).min, np.iinfo(kind).max
    b = chance.integers(0, 256, K * COLUMNS * bits // 8, np.uint8)
    b[: b.size // 2] = 255
    (tmp_path / "given").write_bytes(a.tobytes().ljust(4096, b"\0") + b.tobytes())
    c = np.zeros(ROWS * COLUMNS, np.int32)
    op_of(bits, rows).meaning([c, a.reshape(-1), b], [K, K])
    assert run_node(RUN, tmp_path / "m.wasm", tmp_path / "given")[: c.nbytes] == c.tobytes()
