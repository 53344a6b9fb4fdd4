"""A model in stages computes the bits of the same model in one process: in batches, chunks, from a warm cache, after preemptions, and when
steps are cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers

from deploy import demo
from deploy.model_loading.costs import step_of
from deploy.model_loading.load import load_model
from server.engine.step_model import GroupLimits
from server.engine.worker import LoadedModel
from server.messages import Load
from tests.e2e import test_group_bits
from tests.e2e.stage_host import SECRET, stage_host
from tests.e2e.test_bits import Outcomes, Rig, check_after_preemptions, check_in_a_batch, check_in_chunks, random_submits, same

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
TWO = ("local", "local")

pytestmark = pytest.mark.xdist_group("bits of stages")


@contextmanager
def staged(load: Load) -> Iterator[LoadedModel]:
    loaded = load_model(load, lambda _part, _fraction: None)
    assert loaded.relay is not None
    try:
        yield loaded
    finally:
        loaded.relay.close()


def demo_load(quantize: str, stages: tuple[str, ...]) -> Load:
    return Load("demo", str(demo.MODEL), quantize, max_batch=32, kv_cache_bytes=64 << 20, stages=stages)


@pytest.fixture(scope="module", params=["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def quantize(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(quantize: str) -> LoadedModel:
    return load_model(demo_load(quantize, ()), lambda _part, _fraction: None)


@pytest.fixture(scope="module")
def model(quantize: str) -> Iterator[LoadedModel]:
    with staged(demo_load(quantize, TWO)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(whole: LoadedModel) -> Outcomes:
    """Return what the model in one process computes, in one batch: tests/e2e/test_bits.py checks that requests compute the same alone."""
    assert whole.step_model is not None
    return Rig(whole, None).run(plain(whole.step_model.limits.vocab_size))


def plain(vocab_size: int):
    return [submit for submit in random_submits(60, vocab_size) if submit.params.constraint is None]


@pytest.fixture
def submits(model: LoadedModel):
    assert model.step_model is not None
    return plain(model.step_model.limits.vocab_size)


@pytest.fixture
def rig(model: LoadedModel) -> Callable[..., Rig]:
    return lambda **narrower: Rig(model, None, **narrower)


def test_it_is_the_same_model(whole: LoadedModel, model: LoadedModel) -> None:
    """The whole model and the model in stages have equal fingerprints, which promise equal bytes, so a request may move from one to the
    other."""
    assert model.ready.fingerprint == whole.ready.fingerprint
    assert model.ready.signature != whole.ready.signature
    assert model.ready.max_context == whole.ready.max_context and model.ready.num_pages == whole.ready.num_pages
    first, last = model.ready.stages
    assert (first.first_layer, first.end_layer) == (0, last.first_layer) and model.ready.cuts == (last.first_layer,)
    assert first.weights_bytes > 0 and last.weights_bytes > 0
    assert model.ready.weights_bytes == first.weights_bytes + last.weights_bytes
    assert sum(stage.kv_cache_bytes for stage in model.ready.stages) == whole.ready.kv_cache_bytes
    assert [group.page_bytes for group in model.ready.cache_groups] == [group.page_bytes for group in whole.ready.cache_groups]


def test_alone(rig, submits, expected) -> None:
    outcomes: Outcomes = {}
    for submit in submits[:8]:
        outcomes |= rig().run([submit])
    same(outcomes, {key: outcome for key, outcome in expected.items() if key in outcomes})


def test_in_a_batch_and_from_a_warm_cache(rig, submits, expected) -> None:
    check_in_a_batch(rig(), submits, expected)


def test_in_chunks(rig, submits, expected) -> None:
    check_in_chunks(rig, submits, expected, 16)


def test_after_preemptions(rig, submits, expected) -> None:
    check_after_preemptions(rig(groups=(GroupLimits(62),), max_seqs=12), submits, expected)


@pytest.mark.parametrize("num_parts", [2, 5])
def test_steps_in_parts(model: LoadedModel, rig, submits, expected, num_parts: int) -> None:
    assert model.relay is not None
    before, model.relay.num_parts = model.relay.num_parts, lambda _num_tokens: num_parts
    try:
        check_in_a_batch(rig(), submits, expected)
    finally:
        model.relay.num_parts = before


@pytest.mark.parametrize("num_parts", [1, 3])
def test_hidden_states(whole: LoadedModel, model: LoadedModel, num_parts: int) -> None:
    """Hidden states, which are embeddings, have the same bits. If a step is cut into parts, some parts have no row of hidden states."""
    assert model.relay is not None and whole.step_model is not None and model.step_model is not None
    batch = step_of(whole.step_model.limits, num_seqs=4, num_each=9, context=9)
    batch = replace(batch, logit_rows=batch.logit_rows[1:2], hidden_rows=batch.logit_rows[2:])
    before, model.relay.num_parts = model.relay.num_parts, lambda _num_tokens: num_parts
    try:
        one, several = ((of.download(of.run(batch)), of.hidden()) for of in (whole.step_model, model.step_model))
    finally:
        model.relay.num_parts = before
    for expected, found in zip(one, several, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_stage_on_another_host(whole: LoadedModel, quantize: str, expected, tmp_path: Path) -> None:
    """The steps are cut into as many parts as the measured costs advise."""
    assert whole.step_model is not None
    with stage_host(tmp_path) as (port, _):
        load = msgspec.structs.replace(demo_load(quantize, (f"127.0.0.1:{port}", "local")), stage_secret=SECRET)
        with staged(load) as loaded:
            assert loaded.relay is not None and not loaded.relay.shares_cores
            assert loaded.ready.fingerprint == whole.ready.fingerprint
            assert loaded.ready.weights_bytes == loaded.ready.stages[-1].weights_bytes, "what the memory of this machine holds"
            same(Rig(loaded, None).run(plain(whole.step_model.limits.vocab_size)), expected)


def test_a_server_without_layers(whole: LoadedModel, quantize: str, expected) -> None:
    assert whole.step_model is not None
    with staged(demo_load(quantize, ("local", "head"))) as loaded:
        first, last = loaded.ready.stages
        assert (first.first_layer, first.end_layer, last.first_layer, last.end_layer) == (0, 5, 5, 5)
        assert last.kv_cache_bytes == 0 and first.kv_cache_bytes == whole.ready.kv_cache_bytes
        assert loaded.ready.fingerprint == whole.ready.fingerprint and loaded.ready.num_pages == whole.ready.num_pages
        same(Rig(loaded, None).run(plain(whole.step_model.limits.vocab_size)), expected)


FAMILIES = [
    ("qwen3_next", 2),  # matrices as states, of which a page covers more tokens
    pytest.param(("gemma3", 3), marks=pytest.mark.slow),  # windows; a stage in the middle
    pytest.param(("lfm2", 2), marks=pytest.mark.slow),  # states of a convolution
    pytest.param(("granitemoehybrid", 4), marks=pytest.mark.slow),  # a layer per stage, so that stages have no layer of some group
    pytest.param(("glm4_moe_lite", 2), marks=pytest.mark.slow),  # latents
]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case[0])
def test_cache_groups(case: tuple[str, int], tmp_path: Path) -> None:
    name, num_stages = case
    for file in (GOLDEN / name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(test_group_bits.VOCAB)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    load = Load("m", str(tmp_path), "bf16", max_batch=32)
    one = load_model(load, lambda _part, _fraction: None)
    submits = test_group_bits.random_submits(30)
    expected = Rig(one, None).run(submits)
    with staged(msgspec.structs.replace(load, stages=("local",) * num_stages)) as several:
        assert several.ready.fingerprint == one.ready.fingerprint
        check_in_a_batch(Rig(several, None), submits, expected)
