"""Multiply pages: queries by keys, and weights by values, for a register tile of `n` rows.

  F32Products     one element of the summed axis at a time, in f32; each multiply-add is rounded once
  PairProducts    two elements at a time, in bf16 (`dot_bf16_rows`), where this is faster; queries and weights are rounded to bf16

The two rows of a page that form pairs are interleaved when they are loaded, once for all rows of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.attention.pages import F32, Cache, HeadPage
from compiler.ir.dims import Dim, dim_max, dim_min, product_of
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.intrinsics.dot_bf16 import DotBf16Rows
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.ops.attention.kv_cache import KEYS, PAGE


@dataclass(frozen=True, slots=True)
class KeyStep:
    """A step over the keys of a page that begins at key `at`. Only keys `begin` to `end` - 1 are seen."""

    at: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True, slots=True)
class _Products:
    cache: Cache
    queries: Array  # [rows, size], scaled
    weights: Array  # [rows, pages of a block, PAGE]


@dataclass(frozen=True, slots=True)
class F32Products(_Products):
    step: ClassVar[int] = 1

    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        """Add the products of element `r` of queries and keys to the scores of each page."""
        with k.scope():
            keys = k.local("keys", len(pages), PAGE)
            for v, page in enumerate(pages):
                with k.vector(PAGE) as lane:
                    keys[v, lane] = cast(self.cache.element(page, KEYS, r * PAGE + lane), F32)
            for v, page in enumerate(pages):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    score[v, m, lane] += self.queries[page.row + m, r] * keys[v, lane]

    def weigh(self, k: Kernel, row: Dim, slot: Dim, exponentials: Array) -> Array:
        """Return the weights of a row, for the page at `slot`. They are the exponentials themselves."""
        return exponentials

    def multiply_values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted value of one key to `total`, which has the elements of values from element `first`."""
        _, parts, width = (d.const for d in total.shape)
        with k.scope():
            value = k.local("value", parts, width)
            for c in range(parts):
                with k.vector(width) as lane:
                    value[c, lane] = cast(self.cache.value(page, keys.at, first + c * width + lane), F32)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] += self.weights[page.row + m, page.slot, keys.at] * value[c, lane]


@dataclass(frozen=True, slots=True)
class PairProducts(_Products):
    step: ClassVar[int] = 2

    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        for v, page in enumerate(pages):
            _dot_rows(k, n, score[v, 0, 0], self.queries[page.row, r], self.cache.element(page, KEYS, r * PAGE), columns=PAGE)

    def weigh(self, k: Kernel, row: Dim, slot: Dim, exponentials: Array) -> Array:
        """Round the exponentials."""
        k.tile(RoundBf16(), self.weights[row, slot, 0], exponentials[row, slot, 0])
        return self.weights

    def multiply_values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted values of a pair of keys. A key that is not seen has weight 0, but 0 * NaN is not 0, so read the seen key of the
        pair twice."""
        _, parts, width = (d.const for d in total.shape)
        weights = self.weights[page.row, page.slot, keys.at]
        pair = dim_max(keys.at, keys.begin), dim_min(keys.at + 1, keys.end - 1)
        values = (self.cache.value(page, key, first) for key in pair)
        _dot_rows(k, n, total[0, 0, 0], weights, *values, columns=parts * width)


def _dot_rows(k: Kernel, n: int, total: Load, factors: Load, *pair: Load, columns: int) -> None:
    stride = product_of(factors.buffer.shape[1:])
    k.tile(DotBf16Rows(n, columns, touching=len(pair) == 1), total, factors, *pair, dims=(stride,))
