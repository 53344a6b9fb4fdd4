"""The quality label of a form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deploy import demo
from deploy.cache import Part, kept
from deploy.model_loading.load import load_model
from deploy.quality import measure
from deploy.quality.measure import Exact, divergences, exact_of, label_of
from deploy.quality.observe import log_softmax
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, QualityLabel
from server.models.quality import in_words
from tests.conftest import ROOT

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
    assert label_of(LOAD) == label
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
    with pytest.raises(LoadError, match=rf"the context of .*short is {positions}, expected at least 3 tokens"):
        label_of(Load("short", str(folder), "bf16"))


def test_a_load_measures_the_label_that_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """A load that asks for a quality label measures it, and later loads need not. A model that can have no label is served all the same."""
    asked, stages = msgspec.structs.replace(form("int8-fast"), label=True), list[str]()
    label = load_model(asked, lambda part, _done: stages.append(part)).ready.label
    assert label is not None and label.kl_divergence > 0 and "measure" in stages
    stages.clear()
    assert load_model(asked, lambda part, _done: stages.append(part)).ready.label == label and "measure" not in stages
    encoder = load_model(Load("encoder", str(ROOT / "tests/golden/models/bert"), "f32", label=True), lambda _part, _done: None)
    assert encoder.ready.label is None and "encoder has no quality label: " in caplog.text
