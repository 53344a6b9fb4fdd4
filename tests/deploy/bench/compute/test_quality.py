"""The benchmark of quality after quantisation: how it rounds weights, what it measures, and its results for the demo model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from compiler.frontend.layers.nn import WeightFormat
from deploy.bench.compute import quality
from deploy.quality.text import CALIBRATION
from server.engine.step_model import GroupLimits, StepBatch
from server.interfaces import LoadError


@pytest.mark.parametrize(("scheme", "levels", "group"), [("int8", 127, 64), ("int8-32", 127, 32), ("int4-32", 7, 32), ("int4-64", 7, 64)])
def test_rounding_keeps_the_largest_of_each_group_and_misses_others_by_half_a_level(scheme: str, levels: int, group: int):
    w = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    w[1] = 0
    rounded = quality.round_to_nearest(w, WeightFormat.parse(scheme))
    groups, errors = np.abs(w.reshape(3, -1, group)), np.abs(rounded - w).reshape(3, -1, group)
    largest = groups.max(-1, keepdims=True)
    np.testing.assert_allclose(np.take_along_axis(errors, groups.argmax(-1, keepdims=True), -1), 0, atol=1e-6)
    assert np.all(errors <= largest / levels / 2 + 1e-6)
    assert not np.array_equal(rounded[0], w[0])


def test_the_measures_are_means_over_all_tokens():
    even, sure = np.zeros((1, 2), np.float32), np.log(np.array([[0.25, 0.75]], np.float32))
    divergence, agreement = quality.compare([even, sure], [even, sure])
    assert (divergence, agreement) == (0, 1)
    divergence, agreement = quality.compare([even, even], [even, sure])
    assert divergence == pytest.approx(0.5 * (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)))
    assert agreement == 0.5


def test_perplexity_is_that_of_the_tokens_after_the_first():
    tokens = np.array([[0, 1], [1, 1], [0, 0]], np.int32)
    logits = [np.log(np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)), np.log(np.array([[0.1, 0.9], [0.8, 0.2]], np.float32))]
    assert quality.perplexity(tokens, [*logits, logits[0]]) == pytest.approx((0.75 * 0.5 * 0.1 * 0.8) ** -0.25)


def test_the_logits_of_every_position_are_kept():
    """The benchmark copies the logits of every position, because the model overwrites the logits in the next step."""
    place = np.zeros((2, 5), np.float32)

    class Model:
        limits = SimpleNamespace(groups=(GroupLimits(9),), capacity=128, vocab_size=5)

        def run(self, batch: StepBatch) -> Any:
            place[...] = batch.positions[0]
            return place

        def download(self, logits: Any) -> Any:
            return logits.copy()

    found = quality.Texts(2, 3, 0).logits(cast(Any, Model()), lambda position, _: np.zeros(2, np.int32))
    assert [f[0, 0] for f in found] == [0, 1, 2]


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(LoadError, match="the text has 7 tokens; 2 sequences of 4 need 8"):
        quality._sequences(list(range(7)), quality.Texts(2, 4, 0))
    assert quality._sequences(list(range(9)), quality.Texts(2, 4, 0)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_our_schemes_are_no_worse_than_rounding(capsys: pytest.CaptureFixture[str]):
    text = ["--text", str(CALIBRATION)]
    quality.main(["--schemes", "bf16,int8,int4-32", "--sequences", "4", "--length", "20", "--json", *text])
    rows = {row["scheme"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["bf16"]["perplexity"] == pytest.approx(rows["bf16"]["exact_perplexity"], rel=0.02)
    assert rows["bf16"]["kl_divergence"] < 1e-3 < rows["int4-32"]["kl_divergence"] < 0.5
    assert rows["int8"]["kl_divergence"] < rows["int4-32"]["kl_divergence"] / 10
    for row in (rows["int8"], rows["int4-32"]):  # not bf16: the demo's own weights are bf16, so rounding them to bf16 changes nothing
        assert row["kl_divergence"] <= 1.1 * row["rounded_kl_divergence"] + 2e-5
        assert row["top1_agreement"] >= row["rounded_top1_agreement"] - 0.05


def test_a_seed_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        quality.main(["--schemes", "bf16", "--sequences", "1", "--length", "4", "--seed", "-1"])
    assert refused.value.code == 2 and "-1 is not a whole number of at least 0" in capsys.readouterr().err
