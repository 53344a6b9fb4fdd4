"""What computes attention on a machine: its unit, and the unit's state for the rows of an item.

A new format of pages, or a new instruction, is a new unit; the phases of the kernel, items, blocks and softmax stay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut
from compiler.backends.cpu.schedule.attention.items import Item
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax
from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel


class Rows(Protocol):
    """The rows of an item."""

    @property
    def softmax(self) -> OnlineSoftmax: ...

    @property
    def cut(self) -> Cut: ...

    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        """Scale and store the query of a row. `query` returns an element as f32."""

    def add(self, k: Kernel, block: Block) -> None:
        """Add a block of keys and values to the softmax of the rows that see it."""


class Unit(Protocol):
    @property
    def split_pages(self) -> int:
        """The number of pages of a split."""
        ...

    @property
    def tile_tokens(self) -> int:
        """The number of tokens of a tile, at least 2: a tile computes all splits on one thread, which is too slow for a single token."""
        ...

    @property
    def most_tiles(self) -> int:
        """The maximum number of adjacent tiles that an item joins."""
        ...

    @property
    def heads_at_once(self) -> int:
        """The number of kv heads whose scores a token computes at once."""
        ...

    @property
    def slow_division(self) -> bool:
        """Whether divisions would take a large share of the time, because products are fast."""
        ...

    def rows(self, k: Kernel, item: Item) -> AbstractContextManager[Rows]:
        """Allocate the state of the rows of an item. It is valid for the code that the caller writes inside this context."""
        ...
