"""The first load of a model measures how long its steps take and caches the times. If the measurement fails, the model starts without
it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.model_loading.costs import measured, step_costs, step_of
from deploy.model_loading.load import load_model
from deploy.model_loading.seeing import Seer
from deploy.model_loading.serving import EncoderModel
from server.engine.scheduling.pace import Measured, Pace
from server.engine.step_model import GroupLimits, Logits, SeeingLimits, StepBatch, StepLimits
from server.messages import Load
from tests.doubles.model import NullModel
from tests.golden.joint import SUBJECTS as JOINT
from tests.golden.vision import SUBJECTS

LIMITS = StepLimits(vocab_size=64, max_context=300, max_tokens=128, max_seqs=8, groups=(GroupLimits(100),))


class Counted(NullModel):
    def __init__(self, limits: StepLimits = LIMITS) -> None:
        super().__init__(limits)
        self.sizes: list[int] = []

    def run(self, batch: StepBatch) -> Logits:
        self.sizes.append(len(batch.tokens))
        return super().run(batch)


def test_sizes_rise_to_the_largest_step() -> None:
    costs = measured(Counted())
    assert list(costs.steps) == [1, 4, 16, 64, 128] and all(seconds > 0 for seconds in costs.steps.values())


@pytest.mark.parametrize(("name", "most"), [("max_context", 40), ("groups", 32)])
def test_no_step_is_larger_than_its_context_or_the_cache(name: str, most: int) -> None:
    few = {"max_context": StepLimits(64, 40, 128, 8, (GroupLimits(100),)), "groups": StepLimits(64, 300, 128, 8, (GroupLimits(3),))}[name]
    assert max(measured(Counted(few)).steps) == most


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "costs"
    first = step_costs(Counted(), kept)
    second = Counted()
    assert step_costs(second, kept) == first and not second.sizes


DAMAGED = ["", "{", "[]", *(f'{{"steps": {steps}}}' for steps in ('{"1": -1}', '{"0": 1}', '{"a": 1}', "{}", '{"1": 1e9}')), "\xff"]


@pytest.mark.parametrize("content", [text.encode("latin-1") for text in DAMAGED])
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, content: bytes) -> None:
    kept = tmp_path / "costs"
    kept.write_bytes(content)
    costs = step_costs(Counted(), kept)
    assert {int(size): seconds for size, seconds in json.loads(kept.read_bytes())["steps"].items()} == costs.steps


def test_a_fifo_or_a_folder_that_cannot_be_written_only_costs_the_measurement(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "costs")
    assert step_costs(Counted(), tmp_path / "costs")
    assert step_costs(Counted(), tmp_path / "missing" / "costs")


SEEING = SeeingLimits(square_bytes=12, edge_tokens=2, token=1, cost=7)


class Looking(Counted):
    """A fake model that needs 0.03 s for each crop that it has not seen, and 0.001 s for each token."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(replace(LIMITS, excerpts=(SEEING,)))
        self.clock, self.known = clock, set[bytes]()

    def run(self, batch: StepBatch) -> Logits:
        self.clock[0] += 0.001 * len(batch.tokens) + 0.03 * len({one.key for one in batch.seen} - self.known)
        self.known |= {one.key for one in batch.seen}
        return super().run(batch)


def test_a_crop_of_an_image_has_a_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    monkeypatch.setattr("deploy.model_loading.costs.time.perf_counter", lambda: clock[0])
    kept = tmp_path / "costs"
    costs = step_costs(Looking(clock), kept)
    assert costs.excerpts_s == pytest.approx({"image": 0.03})
    assert Pace(128, costs, 1.0).excerpt_tokens("image", SEEING.cost) == 30
    again = Looking(clock)
    assert step_costs(again, kept) == costs and not again.sizes


def test_costs_without_that_of_a_crop_are_measured_again(tmp_path: Path) -> None:
    kept = tmp_path / "costs"
    assert step_costs(Counted(), kept).excerpts_s == {}
    assert step_costs(Counted(replace(LIMITS, excerpts=(SEEING,))), kept).excerpts_s["image"] > 0


def test_only_the_first_start_encodes_crops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    looks, rows_of = list[int](), Seer.rows_of
    monkeypatch.setattr(Seer, "rows_of", lambda seer, crops: looks.append(len(crops)) or rows_of(seer, crops))
    load = Load("m", str(SUBJECTS["idefics3"].folder), "f32")
    load_model(load, lambda _part, _done: None)
    assert looks
    looks.clear()
    load_model(load, lambda _part, _done: None)
    assert not looks


def test_only_the_first_start_of_a_model_that_embeds_images_encodes_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    looks, see = list[int](), EncoderModel.see
    monkeypatch.setattr(EncoderModel, "see", lambda model, crops: looks.append(len(crops)) or see(model, crops))
    load = Load("m", str(JOINT["clip"].folder), "f32")
    load_model(load, lambda _part, _done: None)
    assert looks
    looks.clear()
    load_model(load, lambda _part, _done: None)
    assert not looks


def test_without_a_measurement_the_cost_of_a_crop_is_estimated() -> None:
    assert Pace(128, Measured(), 1.0).excerpt_tokens("image", 7) == 7


def test_few_pages_are_shared() -> None:
    batch = step_of(LIMITS, num_seqs=8, num_each=2, context=250)
    assert batch.places[0].page_tables.max() < LIMITS.groups[0].num_pages
    assert len(batch.tokens) == 16 and (batch.context_lens == 250).all()


class Slow(Counted):
    """A fake model whose steps take `step_s(num_tokens, context_length)` seconds."""

    def __init__(self, step_s: Callable[[int, int], float]) -> None:
        super().__init__()
        self._step_s = step_s
        self.now_s = 0.0

    def run(self, batch: StepBatch) -> Logits:
        self.now_s += self._step_s(len(batch.tokens), int(batch.context_lens.sum() - len(batch.tokens)))
        return super().run(batch)


def slow(monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int, int], float]) -> Slow:
    model = Slow(step_s)
    monkeypatch.setattr("deploy.model_loading.costs.time", SimpleNamespace(perf_counter=lambda: model.now_s))
    return model


def test_the_context_behind_which_short_chunks_begin_has_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = slow(monkeypatch, lambda tokens, context: 1e-3 * tokens + 1e-5 * context)
    assert measured(model).context_s == pytest.approx(1e-5)


def test_the_cost_of_context_is_measured_with_few_chunks_of_a_slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for token_s, size in ((1e-3, 64), (4e-3, 24), (0.2, 8)):
        model = slow(monkeypatch, lambda tokens, context, token_s=token_s: token_s * tokens + 1e-5 * context)
        assert measured(model).context_s == pytest.approx(1e-5) and model.sizes[-1] == size


def test_a_slow_run_of_a_brief_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of each size takes three times as long as the others, as when another program uses the machine."""
    model = slow(monkeypatch, lambda tokens, _: 1e-5 * tokens * (1 if tokens in model.sizes else 3))
    assert measured(model).steps == pytest.approx({size: 1e-5 * size for size in (1, 4, 16, 64, 128)})


def test_steps_that_would_delay_the_first_start_are_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, step_s, sizes in (
        ("fast", lambda tokens, _: 0.001 * tokens, [1, 4, 16, 64, 128]),
        ("slow", lambda tokens, _: 0.004 * tokens, [1, 4, 16]),
        ("slower", lambda tokens, _: 0.2 * tokens, [1, 4]),
        ("limited by memory", lambda _, __: 0.3, [1, 4]),
    ):
        costs = step_costs(slow(monkeypatch, step_s), tmp_path / name)
        assert list(costs.steps) == sizes and (tmp_path / name).exists(), name
