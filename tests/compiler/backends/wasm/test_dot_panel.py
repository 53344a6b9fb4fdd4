"""The WebAssembly code that multiplies bytes is exact, with and without relaxed SIMD."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.backends.wasm.codegen.link import link
from compiler.ir.dtypes import DType
from compiler.ir.numbers import TABLES, Kind
from compiler.machine.formats import TABLE_PANELS
from compiler.machine.product_steps.wasm import LANES
from compiler.machine.target import Target, get
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


@pytest.mark.parametrize(
    ("bits", "rows", "kind"),
    [
        (4, DType.I8, Kind.INT),
        (8, DType.I16, Kind.INT),
        *((TABLE_PANELS[kind].bits, DType.I8, kind) for kind in (Kind.E2M1, Kind.IQ3_XXS, Kind.IQ1, Kind.TERNARY)),
    ],
    ids=["bytes by 4 bits", "words by bytes", "bytes by floats", "bytes by large numbers", "bytes by small numbers", "bytes by 2 bits"],
)
@pytest.mark.parametrize("height", [1, ROWS])
@pytest.mark.parametrize("target", WASM, ids=lambda t: t.name)
def test_it_means_what_the_tile_means(target: Target, height: int, bits: int, rows: DType, kind: Kind, tmp_path: Path) -> None:
    """The compiled tile equals the tile's NumPy meaning, also for the largest numbers of both signs."""
    kernel = emit_kernel("tile", tiled(bits, 4, rows, height, kind=kind), target)
    (tmp_path / "m.wasm").write_bytes(link([kernel], target).object)
    chance, held = np.random.default_rng(4), np.int8 if rows is DType.I8 else np.int16
    a = chance.integers(np.iinfo(held).min, np.iinfo(held).max, (height, K), held, endpoint=True)
    a[0, : K // 2], a[-1, K // 2 :] = np.iinfo(held).min, np.iinfo(held).max
    b = chance.integers(0, 256, K * COLUMNS * bits // 8, np.uint8)
    b[: b.size // 2] = int(TABLES[kind].argmax()) * 0x11 if bits == 4 and kind in TABLES else 255
    (tmp_path / "given").write_bytes(a.tobytes().ljust(4096, b"\0") + b.tobytes())
    c = np.zeros(height * COLUMNS, np.int32)
    op_of(bits, rows, height, kind=kind).meaning([c, a.reshape(-1), b], [K, K])
    assert run_node(RUN, tmp_path / "m.wasm", tmp_path / "given")[: c.nbytes] == c.tobytes()


def test_a_single_row_multiplies_each_load_before_the_next() -> None:
    """The code for a single row multiplies by the weights of one load before it loads the next ones. LLVM would order the products by
    column, and engines would then have to keep the whole row in registers."""
    target = get("wasm-relaxed")
    text = link([emit_kernel("tile", tiled(4, 4, height=1), target)], target).assembly()
    steps = re.findall(r"v128\.load32_splat|i16x8\.relaxed_dot", text)
    per_load = 2 * COLUMNS // LANES  # number of dot products per load: one per vector of each half of the columns
    dots = [i for i, step in enumerate(steps) if "dot" in step]
    assert len(dots) == 4 * per_load
    for load in range(1, 4):
        before, after = steps[: dots[load * per_load - 1]], steps[dots[load * per_load - 1] :]
        assert before.count("v128.load32_splat") == 2 * load, "the loop reads two words of the row per load of its columns"
        assert after.count("v128.load32_splat") == 2 * (4 - load)
    assert text.count(f"v128.const\t{0x0F0F0F0F0F0F0F0F}") == 1, "the mask of four bits stays in a register"
