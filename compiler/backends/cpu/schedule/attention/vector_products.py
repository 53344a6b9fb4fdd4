"""Multiply pages: queries by keys, and weights by values, for a register tile of `n` rows.

  F32Products     one element of the summed axis at a time, in f32; each multiply-add is rounded once
  PairProducts    two elements at a time, in bf16 (`dot_bf16_rows`), where this is faster; queries and weights are rounded to bf16

The two rows of a page that form pairs are interleaved when they are loaded, once for all rows of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compiler.backends.cpu.schedule.attention.rows import F32, HeadPage, Rows
from compiler.backends.cpu.schedule.attention.turned import TurnedValues
from compiler.ir.dims import Dim, dim_max, dim_min, product_of
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.intrinsics.dot_bf16 import DotBf16Rows
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES


@dataclass(frozen=True, slots=True)
class KeyStep:
    """A step over the keys of a page that begins at key `at`. Only keys `begin` to `end` - 1 are visible."""

    at: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True, slots=True)
class _Products:
    rows: Rows
    cache: Array
    layer: Dim
    size: int
    turned: TurnedValues | None  # the values, if pages have only keys

    def element(self, page: HeadPage, half: int, index: Dim) -> Load:
        return self.cache[self.layer, half, page.page, page.kv_head, index]

    def value(self, page: HeadPage, key: Dim, element: Dim) -> Load:
        if self.turned is not None:
            return self.turned.element(page, key, element)
        return self.element(page, VALUES, key * self.size + element)


@dataclass(frozen=True, slots=True)
class F32Products(_Products):
    step: ClassVar[int] = 1

    def scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        """Add the products of element `r` of queries and keys to the scores of each page."""
        with k.scope():
            keys = k.local("keys", len(pages), PAGE)
            for v, page in enumerate(pages):
                with k.vector(PAGE) as lane:
                    keys[v, lane] = cast(self.element(page, KEYS, r * PAGE + lane), F32)
            for v, page in enumerate(pages):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    score[v, m, lane] += self.rows.queries[page.row + m, r] * keys[v, lane]

    def values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted value of one key to `total`, which has the elements of values from element `first`."""
        _, parts, width = (d.const for d in total.shape)
        with k.scope():
            value = k.local("value", parts, width)
            for c in range(parts):
                with k.vector(width) as lane:
                    value[c, lane] = cast(self.value(page, keys.at, first + c * width + lane), F32)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] += self.rows.weights[page.row + m, page.slot, keys.at] * value[c, lane]

    def round_weights(self, k: Kernel, row: Dim, page: HeadPage) -> None:
        """Do nothing, because products in f32 need no rounded weights."""


@dataclass(frozen=True, slots=True)
class PairProducts(_Products):
    step: ClassVar[int] = 2

    def scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        for v, page in enumerate(pages):
            _dot_rows(k, n, score[v, 0, 0], self.rows.queries[page.row, r], self.element(page, KEYS, r * PAGE), columns=PAGE)

    def values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted values of a pair of keys. A key that is not visible has weight 0, but 0 * NaN is not 0, so read the visible key
        of the pair twice."""
        _, parts, width = (d.const for d in total.shape)
        weights = self.rows.weights[page.row, page.slot, keys.at]
        pair = dim_max(keys.at, keys.begin), dim_min(keys.at + 1, keys.end - 1)
        values = (self.value(page, key, first) for key in pair)
        _dot_rows(k, n, total[0, 0, 0], weights, *values, columns=parts * width)

    def round_weights(self, k: Kernel, row: Dim, page: HeadPage) -> None:
        k.tile(RoundBf16(), self.rows.weights[row, page.slot, 0], self.rows.scores[row, page.slot, 0])


def _dot_rows(k: Kernel, n: int, total: Load, factors: Load, *pair: Load, columns: int) -> None:
    stride = product_of(factors.buffer.shape[1:])
    k.tile(DotBf16Rows(n, columns, touching=len(pair) == 1), total, factors, *pair, dims=(stride,))
