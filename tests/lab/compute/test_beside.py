"""The benchmark that runs the steps of two models in turns. Their times and the limits are given, so every quotient is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploy.bench import limits, synthetic
from deploy.bench.compute import model as of_users
from deploy.bench.compute.case import Case, Work
from deploy.bench.limits import Gauge, Limits
from server.settings import SettingsError
from tests.lab.compute import beside, model
from tests.lab.compute.beside import Quartiles, Quotients, Turn, in_turns, quotients


class Given:
    """A gauge whose turns are given. It still runs each step of a turn once."""

    limits = Limits(1.0, 1.0)

    def __init__(self, *_: object, turns: Sequence[Turn] = (Turn((1.0, 2.0), Limits(1.0, 1.0)),)) -> None:
        self._turns = turns

    def beside(self, run: Callable[[], object], **_: object) -> tuple[float, Limits]:
        run()
        return 1.0, self.limits

    def in_turns(self, runs: Sequence[Callable[[], Any]], _: object, **__: object) -> list[Turn]:
        assert all(np.isfinite(run()).all() for run in runs) and len(runs) == 2
        return list(self._turns)


def test_shares_are_divided_within_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last three turns, the machine is four times slower. It slows both models, so the quotients of these turns are those of the
    first turn. In the second turn, only the other model is slow, which does not change the median."""
    fast, slow = Limits(bytes_per_s=10.0, flops=100.0), Limits(bytes_per_s=2.5, flops=25.0)
    turns = [Turn((4.0, 2.0), fast), Turn((4.0, 4.0), fast), Turn((16.0, 8.0), slow), Turn((16.0, 8.0), slow), Turn((16.0, 8.0), slow)]
    gauge: Any = Given(turns=turns)
    monkeypatch.setattr(beside, "in_turns", gauge.in_turns)
    order: list[tuple[str, Case]] = []

    def steps(name: str) -> Callable[[int, int, int], Any]:
        return lambda *sizes: lambda: order.append((name, Case(*sizes))) or np.zeros(1)

    case = Case(512, 1, 512)
    # Memory is the limit of the first model, with 2 s in fast turns; arithmetic is that of the other, with 1 s.
    pair = Work(num_bytes=20.0, operations=80.0), Work(num_bytes=5.0, operations=100.0)
    (found,) = quotients((steps("ours"), steps("other")), {case: pair}, gauge)
    assert order == [("ours", case), ("other", case)]
    assert found == Quotients("prefill 512", Quartiles(1.0, 1.0, 1.0), Quartiles(0.4, 0.4, 0.4), 5)


def test_turns_run_every_step_once_and_have_their_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a turn are measured anew, because the machine may be slower than in earlier turns. The first run of each step is not
    counted. Every second turn has the reverse order. The turns end after their time, but there are at least three."""
    now, order = [100.0], list[str]()
    lasts, speeds = {"a": iter((9.0, 1.0, 2.0, 3.0)), "b": iter((9.0, 4.0, 5.0, 6.0))}, iter((8.0, 4.0, 2.0))

    def step(name: str) -> None:
        order.append(name)
        now[0] += next(lasts[name])

    class Slower(Gauge):
        _operations = _read_bytes = 1.0

        def __init__(self) -> None:
            self.forget()

        def sample(self, span_s: float = limits.SHORTEST_S) -> None:
            order.append("limits")
            self._read_s, self._multiply_s = 1.0, min(self._multiply_s, 1 / next(speeds))

    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    turns = in_turns([lambda: step("a"), lambda: step("b")], Slower(), seconds=0.0, most=60)
    assert order == ["a", "b", "a", "b", "limits", "b", "a", "limits", "a", "b", "limits"]
    assert [turn.seconds for turn in turns] == [(1.0, 4.0), (2.0, 5.0), (3.0, 6.0)]
    assert [turn.limits for turn in turns] == [Limits(1.0, 8.0), Limits(1.0, 4.0), Limits(1.0, 2.0)]


def test_quartiles_are_those_of_all_turns() -> None:
    assert Quartiles.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(2.0, 3.0, 4.0)
    assert str(Quartiles(0.651, 0.68, 0.7)) == "0.68 (0.65 to 0.70)"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_users, "Gauge", Given)
    monkeypatch.setattr(beside, "in_turns", Given().in_turns)
    monkeypatch.setitem(synthetic.SHAPES, "small", (64, 1, 4, 2, 16, 96, 128))
    monkeypatch.setitem(synthetic.SHAPES, "smaller", (32, 2, 2, 1, 16, 64, 128))
    for name, values in {"PREFILLS": (32,), "BATCHES": (1, 4), "CONTEXTS": (64,)}.items():
        monkeypatch.setattr(of_users, name, values)


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
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] and found["beside"] is None and found["peers"] == {}
