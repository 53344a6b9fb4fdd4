"""Softmax over rows, computed in blocks of 512 elements, or in larger blocks if a row has more than 32768 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Allocate
from compiler.ir.loops.visit import walk_stmts

NAMES = ("softmax", "log_softmax")


def program(name: str, length: str = "k") -> str:
    return f"func main(x: f32[n, {length}]) -> object {{ y = {name}(x) return y }}"


def rows(*shape: int) -> Any:
    """Return random rows. The maximum of a block is sometimes larger and sometimes smaller than the maximum of the block before."""
    return (np.random.default_rng(sum(shape)).normal(size=shape) * 8).astype(np.float32)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 257, 511, 512, 513, 1025, 4096, 32768, 32769, 40003])
@pytest.mark.parametrize("name", NAMES)
def test_lengths_around_the_blocks(agree: Callable[..., Any], name: str, length: int) -> None:
    agree(program(name), rows(3, length), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_maxima_that_rise_or_fall_all_the_way(agree: Callable[..., Any], name: str) -> None:
    rising = np.linspace(-60, 60, 2100, dtype=np.float32)
    agree(program(name), np.stack([rising, rising[::-1], rising * 0, rising - 1e30]), rtol=1e-5)


@pytest.mark.parametrize("length", [500, 600, 40000])
def test_a_length_known_early_changes_no_bit(agree: Callable[..., Any], length: int) -> None:
    x = rows(2, length)
    np.testing.assert_array_equal(agree(program("softmax", str(length)), x), agree(program("softmax"), x))


@pytest.mark.parametrize("length", [200, 1900])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_any_batch(agree: Callable[..., Any], name: str, length: int) -> None:
    x = rows(9, length)
    whole = agree(program(name), x)
    for some in (slice(0, 1), slice(4, 9), slice(8, 9)):
        np.testing.assert_array_equal(agree(program(name), x[some]), whole[some])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_weighs_nothing(agree: Callable[..., Any], name: str) -> None:
    """Masked elements get probability 0. The cases mask whole blocks with -inf or with the lowest finite number, at the start, at the end
    or in the middle of a row."""
    for mask in (-np.inf, np.finfo(np.float32).min):
        x = rows(6, 1800)
        for row, hidden in enumerate((slice(0, 1200), slice(512, 1024), slice(600, 1800), slice(0, 1799), slice(1, 1800), slice(0, 0))):
            x[row, hidden] = mask
        found = agree(program(name), x, rtol=1e-5)
        assert not np.isnan(found).any()


@pytest.mark.parametrize("length", [100, 1900])
@pytest.mark.parametrize("name", NAMES)
def test_rows_without_an_answer(agree: Callable[..., Any], name: str, length: int) -> None:
    x = rows(8, length)
    x[0] = -np.inf
    x[1, length // 2] = np.inf
    x[2, 0], x[3, length - 1], x[4, length // 3] = np.nan, np.nan, np.nan
    x[5, 1:], x[5, 0] = -np.inf, np.nan
    x[6] = np.inf
    found = agree(program(name), x)
    assert np.isnan(found[:7]).sum(axis=1).min() == length or name == "log_softmax"
    assert np.isfinite(found[7]).all()


def test_what_is_fused_into_the_elements(agree: Callable[..., Any], kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    text = """
    func main(x: bf16[n, k], w: f32[k]) -> object where k in 1.. {
      dataflow { c = cast(x, dtype="f32")  a = add(c, w)  y = softmax(a)  z = multiply(y, w) }
      return z
    }"""
    assert len(kernels(text)) == 1
    agree(text, rows(3, 1300).astype(ml_dtypes.bfloat16), rows(1300), rtol=1e-5)


def test_results_of_another_type(agree: Callable[..., Any]) -> None:
    """With a bf16 result the exponentials are computed twice, because the result's buffer cannot store them in f32 in the meantime."""
    text = "func main(x: bf16[n, k]) -> object { y = softmax(x) return y }"
    agree(text, rows(3, 1300).astype(ml_dtypes.bfloat16), rtol=1e-2)


def test_a_row_that_fits_a_block_is_not_cut(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    def buffers(length: int) -> set[str]:
        kernel = kernels(program("softmax", str(length)))["softmax"]
        return {s.buffer.name for s in walk_stmts(kernel.body) if isinstance(s, Allocate)}

    assert "tops" in buffers(513)
    assert "tops" not in buffers(512)
