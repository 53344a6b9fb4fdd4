"""The number of blocks of a kernel that fit a multiprocessor at once, by registers and by shared memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.sass.model import CARDS, occupancy
from tests.lab.sass.sample import sample
from tests.lab.sass.step import Kernel
from tests.lab.sass.tools import Usage


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [
        (72, 288, 0, 3),
        (96, 288, 0, 2),
        (100, 288, 0, 1),
        (167, 288, 0, 1),
        (128, 128, 0, 4),
        (72, 288, 113 << 10, 2),
        (72, 288, 114 << 10, 1),
    ],
)
def test_warps_of_a_scheduler_share_a_quarter_of_the_registers(registers: int, threads: int, shared_bytes: int, blocks: int) -> None:
    """Two blocks of 9 warps with 104 registers would fit the registers of a multiprocessor, but a quarter of them holds 4 such warps."""
    prim: Any = None
    kernel = Kernel("product", "", prim, sample(), Usage(registers, 0, 0), threads, shared_bytes, ())
    assert [occupancy(card, kernel) for card in CARDS] == [blocks] * len(CARDS)
