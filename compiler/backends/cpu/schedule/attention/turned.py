"""The values of pages that have only keys: the beginning of each key.

A page of keys is [size, PAGE], with the keys innermost, but products with weights read values one after another. So the schedules turn the
values of a page into the layout [PAGE, value size] before the first product, once for all rows that share the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention.rows import PAGES, HeadPage
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Array, Kernel
from compiler.machine.intrinsics.transpose import SIDE, Transpose
from compiler.ops.attention.kv_cache import KEYS, PAGE

assert SIDE == PAGE


@dataclass(frozen=True, slots=True)
class TurnedValues:
    cache: Array
    layer: Dim
    values: Array  # [PAGES, PAGE, value size]: the values of each page of a block, in the element type of the cache

    @staticmethod
    def allocate(k: Kernel, cache: Array, layer: Dim, size: int) -> TurnedValues:
        return TurnedValues(cache, layer, k.local("turned", PAGES, PAGE, size, dtype=cache.dtype))

    @property
    def size(self) -> int:
        return self.values.shape[2].const

    def turn(self, k: Kernel, page: HeadPage) -> None:
        squares, left = divmod(self.size, PAGE)
        with k.serial("r", squares) as r:
            source = self.cache[self.layer, KEYS, page.page, page.kv_head, r * (PAGE * PAGE)]
            k.tile(Transpose(self.cache.dtype.num_bytes), self.values[self._place(page), 0, r * PAGE], source, dims=(self.size,))
        if left:
            with k.nest((left, PAGE)) as (r, key):
                element = squares * PAGE + r
                self.values[self._place(page), key, element] = self.cache[self.layer, KEYS, page.page, page.kv_head, element * PAGE + key]

    def element(self, page: HeadPage, key: Dim, element: Dim) -> Load:
        return self.values[self._place(page), key, element]

    @staticmethod
    def _place(page: HeadPage) -> Dim:
        """Return which page of its block it is."""
        return page.slot % PAGES
