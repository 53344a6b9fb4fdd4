"""Test how many blocks fit a multiprocessor, and how kernels begin, in the model of tests/lab/sass/model.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.bench.compute.case import Case
from tests.lab.sass.model import CARDS, LAUNCH_S, WAITED_S, WARPGROUPS_ATTEND, Start, finds_room, occupancy, predict, start_of
from tests.lab.sass.sample import Line, sample
from tests.lab.sass.step import Kernel, Launched, in_layers, saved_states
from tests.lab.sass.tools import Usage


@pytest.mark.parametrize(
    ("case", "count"),
    [(Case(1, 1, 1024), 1), (Case(64, 64, 1024), 64), (Case(2048, 1, 2048), 128), (Case(40, 2, 2048), 4)],
)
def test_a_step_saves_states_after_pages_and_last_tokens(case: Case, count: int) -> None:
    assert saved_states(case) == count


def test_a_layer_between_two_marks_stands_for_the_others() -> None:
    """Attention may have two phases, which mark a layer once."""
    names = ("embed", "attention", "attention", "linear", "attention", "attention", "head")
    launches = [Launched(replace(kernel(40, 128, 0), schedule=name), 1, 0, 0, 1) for name in names]
    found = in_layers(launches, lambda x: x.kernel.schedule == "attention", 24)
    assert [x.times for x in found] == [1, 1, 23, 23, 23, 1, 1]


WAIT: Line = ("ACQBULK", 1, 7, 0)
COPY: Line = ("UBLKCP.S.G [UR8], [UR10], UR4", 1, 7, 0)


def kernel(registers: int, threads: int, shared_bytes: int) -> Kernel:
    prim: Any = None
    return Kernel("product", "", prim, sample(), Usage(registers, 0, 0, 0), threads, shared_bytes, ())


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
    assert [occupancy(card, kernel(registers, threads, shared_bytes)) for card in CARDS] == [blocks] * len(CARDS)


@pytest.mark.parametrize(
    ("before", "start"),
    [((), Start(None, False)), ((WAIT,), Start(0, False)), ((WAIT, COPY), Start(0, False)), ((COPY, WAIT), Start(1, True))],
)
def test_machine_code_says_whether_a_kernel_copies_before_it_waits(before: tuple[Line, ...], start: Start) -> None:
    assert start_of(sample(*before)) == start


def test_a_kernel_without_work_that_begins_early_takes_a_short_gap() -> None:
    """In a decode step, the phase of attention for prefills has no work. If it begins early, its predicted time has the shorter gap."""
    late = replace(kernel(40, 128, 0), schedule=WARPGROUPS_ATTEND)
    early = replace(late, listing=sample(WAIT))
    for card in CARDS:
        first, second = (predict(card, Launched(each, 1, 0, 0, 1), Case(1, 1, 1024)).seconds for each in (late, early))
        assert first - second == pytest.approx(LAUNCH_S - WAITED_S)
        assert predict(card, Launched(late, 0, 0, 0, 1), Case(1, 1, 1024)).seconds == first, "a launch has at least one block"


@pytest.mark.parametrize(
    ("before", "blocks", "own", "room"),
    [
        (kernel(40, 512, 1024), 132, 132, True),
        (kernel(168, 288, 113 << 10), 132, 132, False),  # too many registers together
        (kernel(40, 512, 2 << 10), 132, 132, True),
        (kernel(40, 512, 120 << 10), 132, 132, False),  # too much shared memory together
        (kernel(168, 288, 227 << 10), 8, 264, True),  # most multiprocessors are idle
        (kernel(168, 288, 227 << 10), 128, 8, True),  # four are idle, for two blocks each
        (kernel(168, 288, 227 << 10), 128, 9, False),
    ],
)
def test_blocks_begin_early_where_they_find_room(before: Kernel, blocks: int, own: int, room: bool) -> None:
    launched = Launched(kernel(96, 288, 113 << 10), own, 0, 0, 1)
    assert [finds_room(card, launched, Launched(before, blocks, 0, 0, 1)) for card in CARDS] == [room] * len(CARDS)
