"""What steps cost is measured once, kept, and never a reason not to start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deploy.doubles.model import NullModel
from deploy.loading.costs import measured, step_costs, step_of
from server.engine.step_model import Logits, StepBatch, StepLimits

LIMITS = StepLimits(vocab_size=64, max_context=300, max_tokens=128, max_seqs=8, num_pages=100)


class Counted(NullModel):
    def __init__(self, limits: StepLimits = LIMITS) -> None:
        super().__init__(limits)
        self.sizes: list[int] = []

    def run(self, batch: StepBatch) -> Logits:
        self.sizes.append(len(batch.tokens))
        return super().run(batch)


def test_sizes_double_up_to_the_largest_step() -> None:
    costs = measured(Counted())
    assert list(costs) == [1, 2, 4, 8, 16, 32, 64, 128] and all(seconds > 0 for seconds in costs.values())


@pytest.mark.parametrize(("name", "most"), [("max_context", 40), ("num_pages", 32)])
def test_no_step_is_larger_than_its_context_or_the_cache(name: str, most: int) -> None:
    few = {"max_context": StepLimits(64, 40, 128, 8, 100), "num_pages": StepLimits(64, 300, 128, 8, 3)}[name]
    assert max(measured(Counted(few))) == most


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "costs"
    first = step_costs(Counted(), kept)
    second = Counted()
    assert step_costs(second, kept) == first and not second.sizes


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"1": -1}', b'{"0": 1}', b'{"a": 1}', b"{}", b"\xff", b'{"1": 1e9}'])
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, content: bytes) -> None:
    kept = tmp_path / "costs"
    kept.write_bytes(content)
    costs = step_costs(Counted(), kept)
    assert {int(size): seconds for size, seconds in json.loads(kept.read_bytes()).items()} == costs


def test_a_fifo_or_a_folder_that_cannot_be_written_only_costs_the_measurement(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "costs")
    assert step_costs(Counted(), tmp_path / "costs")
    assert step_costs(Counted(), tmp_path / "missing" / "costs")


def test_few_pages_are_shared() -> None:
    batch = step_of(LIMITS, num_seqs=8, num_each=2, context=250)
    assert batch.page_tables.max() < LIMITS.num_pages
    assert len(batch.tokens) == 16 and (batch.context_lens == 250).all()
