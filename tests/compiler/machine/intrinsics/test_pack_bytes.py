"""Rows of bytes are packed into panels of integers. The machine code gives the same bytes as the definition in NumPy and as the format."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import For, LoopKind, Tile
from compiler.machine.formats import FOUR, PANEL8, PANEL8_WORDS
from compiler.machine.intrinsics.pack_bytes import PackBytes
from compiler.machine.target import NAMED, Target, host

TARGETS = [t for t in (host(), NAMED["x86-64-v3"]) if t.can_run_here]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(("columns", "width", "stride"), [(16, 16, 16), (16, 16, 80), (32, 32, 96), (64, 32, 128), (64, 16, 64)])
def test_four_rows_become_a_line_of_each_panel(
    run_native: Callable[..., None], target: Target, columns: int, width: int, stride: int, words: bool
) -> None:
    op, panels, panel_stride = PackBytes(columns, width, words=words), columns // width, FOUR * width + 24
    source = np.random.default_rng(0).integers(-128, 128, 4 * stride).astype(np.int8)
    out = np.full(panels * panel_stride, 7, np.uint8)
    meant = out.copy()
    op.meaning([meant, source], (stride, panel_stride))
    buffers = [Buffer(n, (Dim.of(a.size),), DType.from_numpy(a.dtype)) for n, a in (("source", source), ("out", out))]
    places = tuple(Load(b, (Dim.of(0),)) for b in reversed(buffers))
    body = For(DimVar("p", 0, 0), Dim.of(1), Tile(op, places, (Dim.of(stride), Dim.of(panel_stride))), LoopKind.PARALLEL)
    run_native(PrimFunc(tuple(buffers), 1, body), [source, out], target=target)
    np.testing.assert_array_equal(out, meant)
    lines = out.reshape(panels, panel_stride)
    numbers = source.reshape(4, stride)[:, :columns].T
    np.testing.assert_array_equal(lines[:, : FOUR * width], (PANEL8_WORDS if words else PANEL8).packed(numbers, width)[:, 0])
    assert (lines[:, FOUR * width :] == 7).all()
