"""The benchmark that runs the steps of two models in turns. Their times and the limits are given, so every quotient is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from deploy.bench import synthetic
from deploy.bench.compute import model
from deploy.bench.compute.beside import Quartiles, Quotients, quotients
from deploy.bench.compute.case import Case, Work
from deploy.bench.limits import Limits, Turn
from server.settings import SettingsError


class Given:
    """A gauge whose turns are given. It still runs each step of a turn once."""

    limits = Limits(1.0, 1.0)

    def __init__(self, *_: object, turns: Sequence[Turn] = (Turn((1.0, 2.0), Limits(1.0, 1.0)),)) -> None:
        self._turns = turns

    def beside(self, run: Callable[[], object], **_: object) -> tuple[float, Limits]:
        run()
        return 1.0, self.limits

    def in_turns(self, runs: Sequence[Callable[[], Any]], **_: object) -> list[Turn]:
        assert all(np.isfinite(run()).all() for run in runs) and len(runs) == 2
        return list(self._turns)


def test_shares_are_divided_within_each_turn() -> None:
    """In the last three turns, the machine is four times slower. Their quotients are those of the first turn, because it slows both models.
    In the second turn, only the other model is slow, which does not change the median."""
    fast, slow = Limits(bytes_per_s=10.0, flops=100.0), Limits(bytes_per_s=2.5, flops=25.0)
    turns = [Turn((4.0, 2.0), fast), Turn((4.0, 4.0), fast), Turn((16.0, 8.0), slow), Turn((16.0, 8.0), slow), Turn((16.0, 8.0), slow)]
    gauge: Any = Given(turns=turns)
    order: list[tuple[str, Case]] = []

    def steps(name: str) -> Callable[[int, int, int], Any]:
        return lambda *sizes: lambda: order.append((name, Case(*sizes))) or np.zeros(1)

    case = Case(512, 1, 512)
    # Memory is the limit of the first model, with 2 s in fast turns; arithmetic is that of the other, with 1 s.
    pair = Work(num_bytes=20.0, operations=80.0), Work(num_bytes=5.0, operations=100.0)
    (found,) = quotients((steps("ours"), steps("other")), {case: pair}, gauge)
    assert order == [("ours", case), ("other", case)]
    assert found == Quotients("prefill 512", Quartiles(1.0, 1.0, 1.0), Quartiles(0.4, 0.4, 0.4), 5)


def test_quartiles_are_those_of_all_turns() -> None:
    assert Quartiles.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(2.0, 3.0, 4.0)
    assert str(Quartiles(0.651, 0.68, 0.7)) == "0.68 (0.65 to 0.70)"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "Gauge", Given)
    monkeypatch.setitem(synthetic.SHAPES, "small", (64, 1, 4, 2, 16, 96, 128))
    monkeypatch.setitem(synthetic.SHAPES, "smaller", (32, 2, 2, 1, 16, 64, 128))
    for name, values in {"PREFILLS": (32,), "BATCHES": (1, 4), "CONTEXTS": (64,)}.items():
        monkeypatch.setattr(model, name, values)


@pytest.mark.usefixtures("small")
def test_another_shape_is_printed_beside_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both models run all steps. Options that replace a part of a shape, like --kv-heads, apply to the first model only. Our steps take one
    second, those of the other model two."""
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ["--synthetic", "small", "--kv-heads", "4", "--beside", "smaller"]
    model.main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)["beside"]
    assert found["shape"] == "smaller" and [row["name"] for row in found["rows"]] == ["prefill 32", "decode 1 x 64", "decode 4 x 64"]
    ours = 64 * (3 * 64 + 64) + 3 * 64 * 96 + 64 * 128  # weights of the attention, of the feed-forward network and of the head
    others = 2 * (32 * (32 + 2 * 16 + 32) + 3 * 32 * 64) + 32 * 128
    decode = found["rows"][2]
    attended = 4 * 64 * 64, 2 * 4 * 32 * 64  # per token: two operations per element of each key and value, in one layer and in two
    expected = 2 * (2 * ours + attended[0]) / (2 * others + attended[1])
    assert decode["turns"] == 1 and decode["peak"] == pytest.approx(dict.fromkeys(("lower", "median", "upper"), expected))
    model.main(arguments)
    printed = capsys.readouterr().out
    assert "small in turns with smaller" in printed and f"{expected:.2f} ({expected:.2f} to {expected:.2f})" in printed


@pytest.mark.usefixtures("small")
def test_an_unknown_shape_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "gauge_of", lambda *_: pytest.fail("measured"))
    with pytest.raises(SettingsError, match=r"--beside is 'large'; expected one of 0\.5b, .*, small, smaller"):
        model.main(["--synthetic", "small", "--beside", "large"])


@pytest.mark.usefixtures("small")
def test_a_model_alone_has_nothing_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["--synthetic", "small", "--json"])
    assert set(json.loads(capsys.readouterr().out)) == {"limits", "rows", "peers"}
