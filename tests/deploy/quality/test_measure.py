"""The quality label of a form, and what `inspect --quality` and `pull` say of it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterable, Mapping
from itertools import chain, cycle, repeat
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from deploy import demo
from deploy.cache import Part, kept
from deploy.cli.commands import app
from deploy.forms import ServedForm, fastest_without_loss
from deploy.model_loading.load import load_model
from deploy.quality import measure
from deploy.quality.measure import Exact, Quality, decoding_rate, divergences, exact_of, label_of, quality_of
from deploy.quality.observe import log_softmax
from runtime.sampling import SampleBatch, Sampled
from server.engine.step_model import GroupLimits, Logits, StepBatch, StepLimits
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, QualityLabel
from server.models.quality import in_words
from tests.conftest import ROOT
from tests.doubles.model import NullModel

LOAD = Load("demo", str(demo.MODEL), "bf16")

pytestmark = pytest.mark.xdist_group("quality")  # the tests of this group share compiled models


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def form(quantize: str) -> Load:
    return msgspec.structs.replace(LOAD, quantize=quantize)


def test_a_label_tells_forms_apart() -> None:
    labels = {quantize: label_of(form(quantize)) for quantize in ("f32", "bf16", "int4-32")}
    assert labels["f32"].kl_divergence < 1e-8 and labels["f32"].top1_agreement == 1.0
    assert labels["f32"].perplexity == pytest.approx(labels["f32"].exact_perplexity)
    assert labels["f32"].kl_divergence < labels["bf16"].kl_divergence < labels["int4-32"].kl_divergence
    assert labels["bf16"].top1_agreement > labels["int4-32"].top1_agreement
    assert labels["bf16"].num_tokens > 1500
    assert len({label.exact_perplexity for label in labels.values()}) == 1


def test_what_was_measured_is_kept_and_stated_by_later_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    label = label_of(LOAD)
    monkeypatch.setattr(measure, "_measured", None)  # would fail if it were called
    assert label_of(LOAD) == quality_of(LOAD).label == label
    loaded = load_model(msgspec.structs.replace(LOAD, max_context=1024, max_batch=4), lambda _part, _done: None)
    assert loaded.ready.label == label, "other bounds compute the same numbers"
    unmeasured = load_model(form("int8"), lambda _part, _done: None)
    assert unmeasured.ready.label is None
    monkeypatch.setattr(measure, "_computed", None)
    exact_of(LOAD)


def test_a_damaged_file_of_the_cache_is_measured_again() -> None:
    label, folder = label_of(LOAD), kept()
    assert folder is not None
    paths = [item.paths[0] for item in folder.items() if item.part in (Part.LABEL, Part.REFERENCE)]
    assert {path.suffix for path in paths} == {".label", ".exact"}
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert any("label" in str(path) for path, fault in folder.verify() if fault)
    assert label_of(LOAD) == label


def test_the_divergence_of_the_kept_tokens_is_at_most_that_of_all() -> None:
    rng = np.random.default_rng(0)
    p, q = (log_softmax(rng.normal(size=(50, 300)).astype(np.float32) * 3) for _ in range(2))
    whole = (np.exp(p) * (p - q)).sum(-1)

    def kept_of(count: int) -> Exact:
        ids = np.argsort(-p, -1)[:, :count].astype(np.int32)
        return Exact(ids, np.take_along_axis(p, ids, -1), np.zeros(50, np.float32))

    assert divergences(kept_of(300), q) == pytest.approx(whole, abs=1e-4)
    few = divergences(kept_of(30), q)
    assert (few <= whole + 1e-5).all() and few.mean() > 0.7 * whole.mean()


def test_the_fastest_form_without_loss_is_recommended() -> None:
    def quality(divergence: float, tokens_per_s: float) -> Quality:
        return Quality(QualityLabel(divergence, 0.99, 10.0, 10.0, 2000), tokens_per_s)

    def best(qualities: Mapping[str, Quality]) -> str | None:
        found = fastest_without_loss([ServedForm(name, 1, 1, 1, True, 0.0) for name in ("auto", "f32", "bf16", "int8")], qualities)
        return found and found.quantize

    assert best({"auto": quality(5e-4, 90), "f32": quality(0.0, 20), "int8": quality(5e-3, 100)}) == "auto"
    assert best({"f32": quality(5e-3, 20), "int8": quality(4e-3, 100)}) == "int8"
    assert best({}) is None


def test_a_poor_model_is_called_poor() -> None:
    assert "damaged" in in_words(QualityLabel(1e-4, 0.99, 5000.0, 5001.0, 2000))
    assert "damaged" not in in_words(QualityLabel(1e-4, 0.99, 18.9, 18.88, 2000))
    assert "KL 0," in in_words(QualityLabel(1e-11, 1.0, 18.9, 18.9, 2000))


def test_a_model_without_text_has_no_label() -> None:
    with pytest.raises(LoadError, match="generates no text") as refused:
        label_of(Load("encoder", str(ROOT / "tests/golden/models/bert"), "f32"))
    assert refused.value.code is ErrorCode.NOT_A_GENERATIVE_MODEL


@pytest.mark.parametrize("positions", [1, 2])
def test_a_context_that_is_too_short_to_measure_is_refused(tmp_path: Path, positions: int) -> None:
    folder = tmp_path / "short"
    shutil.copytree(demo.MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    for measured in (label_of, quality_of):
        with pytest.raises(LoadError, match=rf"the context of .*short is {positions}, expected at least 3 tokens"):
            measured(Load("short", str(folder), "bf16"))


# --- the speed ---------------------------------------------------------------------------------------------------------


class TimedModel(NullModel):
    """A model whose draws alone take time, on a clock of its own. No message is published during a draw, so the times are exact."""

    def __init__(self, max_context: int, times_s: Iterable[float], num_pages: int = 40) -> None:
        super().__init__(StepLimits(50, max_context, max_tokens=64, max_seqs=4, groups=(GroupLimits(num_pages),)))
        self.now_s, self._times_s = 0.0, iter(times_s)

    def clock(self) -> float:
        return self.now_s

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        self.now_s += next(self._times_s)
        return super().sample(logits, batch)


class FailingModel(TimedModel):
    def run(self, batch: StepBatch) -> Logits:
        if batch.positions[-1] > 70:  # after some tokens were published
            raise OSError("the device is lost")
        return super().run(batch)


def rate_of(model: TimedModel) -> float:
    return decoding_rate(model, [1 + i % 40 for i in range(64)], clock=model.clock)


@pytest.mark.parametrize("max_context", [3, 4, 64, 512])
def test_the_rate_is_that_of_steps_after_the_prompt(max_context: int) -> None:
    assert rate_of(TimedModel(max_context, chain([7.0], repeat(0.02)))) == pytest.approx(50.0)


def test_the_rate_does_not_depend_on_a_few_slow_steps() -> None:
    assert rate_of(TimedModel(512, chain([7.0], cycle([0.02] * 9 + [3.0])))) == pytest.approx(50.0)


def test_the_rate_is_measured_on_128_tokens() -> None:
    times_s = iter([0.02] * 200)
    rate_of(TimedModel(512, times_s))
    assert 200 - len(list(times_s)) == 128


def test_a_step_that_fails_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="the device is lost") as failed:
        rate_of(FailingModel(512, repeat(0.02)))
    assert failed.tb is not None and set(threading.enumerate()) <= before, "not even while the error holds the engine"


def test_a_request_that_is_refused_is_a_load_error() -> None:
    before = set(threading.enumerate())
    with pytest.raises(LoadError, match="tokens") as refused:
        rate_of(TimedModel(512, repeat(0.02), num_pages=2))
    assert refused.tb is not None and set(threading.enumerate()) <= before


def test_a_label_needs_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise LoadError(ErrorCode.LOAD_REFUSED, "generation fails")

    monkeypatch.setattr(measure, "decoding_rate", refuse)
    label = load_model(msgspec.structs.replace(form("int8-64"), label=True), lambda _part, _done: None).ready.label
    assert label is not None and label == label_of(form("int8-64"))


def test_a_rate_that_cannot_be_measured_does_not_lose_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "decoding_rate", None)  # fails when it is called
    with pytest.raises(TypeError, match="not callable"):
        quality_of(form("int8-32"))
    monkeypatch.setattr(measure, "_measured", None)
    assert label_of(form("int8-32")).kl_divergence > 0


def test_a_load_measures_the_label_that_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """A load measures the label first, and later loads need not. A model that can have none is served all the same."""
    asked, stages = msgspec.structs.replace(form("int8-fast"), label=True), list[str]()
    label = load_model(asked, lambda part, _done: stages.append(part)).ready.label
    assert label is not None and label.kl_divergence > 0 and "measure" in stages
    stages.clear()
    assert load_model(asked, lambda part, _done: stages.append(part)).ready.label == label and "measure" not in stages
    encoder = load_model(Load("encoder", str(ROOT / "tests/golden/models/bert"), "f32", label=True), lambda _part, _done: None)
    assert encoder.ready.label is None and "encoder has no quality label: " in caplog.text


def test_inspect_shows_and_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.forms.FORMS", ("auto", "bf16", "f32"))
    runner = CliRunner(env={"COLUMNS": "300"})
    shown = runner.invoke(app, ["inspect", str(demo.MODEL), "--quality"], catch_exceptions=False).output
    assert all(word in shown for word in ("tokens/s", "KL", "top-1", "recommended"))
    found = json.loads(runner.invoke(app, ["inspect", str(demo.MODEL), "--quality", "--json"], catch_exceptions=False).stdout)
    by_name = {one["quantize"]: one["quality"] for one in found["forms"]}
    assert by_name["f32"]["kl_divergence"] < by_name["bf16"]["kl_divergence"] and by_name["bf16"]["tokens_per_s"] > 0
    assert found["recommended"] in by_name
