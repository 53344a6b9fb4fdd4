"""Define a unit, which computes attention with one kind of instructions, and its state for the rows of an item.

A new format of pages, or a new instruction, is a new unit; the phases of the kernel, items, blocks and softmax stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Unit:
    split_pages: int  # number of pages of a split
    tile_tokens: int  # number of tokens of a tile, at least 2: a tile computes all splits on one thread, which is slow for a single token
    rows: Callable[[Kernel, Item], Rows]  # allocates the state of the rows of an item, in the current block of the kernel
    most_tiles: int = 1  # maximum number of adjacent tiles that an item joins
    heads_at_once: int = 1  # number of kv heads whose scores a token computes at once
    slow_division: bool = False  # whether divisions would take a large share of the time, because products are fast
