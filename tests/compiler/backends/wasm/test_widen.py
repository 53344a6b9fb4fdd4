"""In WebAssembly, 16-bit elements are widened to the upper halves of 32-bit lanes by a shuffle that interleaves them with zeros."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compiler.backends.wasm.codegen.link import link
from compiler.backends.wasm.codegen.widen import with_interleaving
from compiler.llvm.ssa import Code, splat, vec
from compiler.machine.target import get
from tests.compiler.backends.wasm.test_multiply_add import RUN
from tests.node import run_node

LANES = (1, 2, 3, 4, 8, 16)


def function(number: int, lanes: int, extend: str) -> str:
    code = Code()
    raw = code.op(f"load {vec('i16', lanes)}, ptr inttoptr (i32 40960 to ptr), align 2")
    wide = code.op(f"{extend} {vec('i16', lanes)} {raw} to {vec('i32', lanes)}")
    bits = code.op(f"shl {vec('i32', lanes)} {wide}, {splat('16', 'i32', lanes)}")
    code.do(f"store {vec('i32', lanes)} {bits}, ptr inttoptr (i32 {49152 + 128 * number} to ptr), align 4")
    return f"define void @f_{number}() {{\nentry:\n{code.text()}\n  ret void\n}}"


@pytest.mark.parametrize("extend", ["zext", "sext"])
def test_it_means_a_shift(extend: str, tmp_path: Path) -> None:
    target, text = get("wasm-simd128"), "\n\n".join(function(i, lanes, extend) for i, lanes in enumerate(LANES))
    assert with_interleaving(text).count("shufflevector") == len(LANES) - 1, "expected one shuffle per vector, and none for the scalar"
    linked = link([], target, text)
    (tmp_path / "m.wasm").write_bytes(linked.object)
    assert "i16x8.extend" not in linked.assembly() and "i32x4.extend" not in linked.assembly()
    given = np.random.default_rng(5).integers(0, 1 << 16, 16, np.uint16)
    (tmp_path / "given").write_bytes(given.tobytes())
    found = run_node(RUN, tmp_path / "m.wasm", tmp_path / "given")
    for i, lanes in enumerate(LANES):
        assert np.frombuffer(found, np.uint32, lanes, 128 * i).tolist() == [int(x) << 16 for x in given[:lanes]]
