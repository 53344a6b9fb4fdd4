"""On compiled models, an engine that takes pages from another one computes the same tokens and log-probabilities, to the last bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import tokenizers

from deploy import demo
from deploy.model_loading.load import load_model
from server.messages import Load, Submit
from server.peers.taking import Arrival
from tests.doubles.transfers import GIVER, exchange_with
from tests.e2e import test_group_bits
from tests.e2e.test_bits import Rig, random_submits, same

pytestmark = pytest.mark.xdist_group("bits of pages")

FAMILIES = [
    "gemma4",  # groups with different heads, some with windows
    "qwen3_next",  # matrices as states, of which a page covers more tokens
    pytest.param("glm4_moe_lite", marks=pytest.mark.slow),  # latents
    pytest.param("lfm2", marks=pytest.mark.slow),  # states of a convolution
    pytest.param("gemma3", marks=pytest.mark.slow),  # windows
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),
]


def half(arrivals: list[Arrival]) -> list[Arrival]:
    return [*arrivals[: len(arrivals) // 2], None]


def check(load: Load, submits: list[Submit]) -> None:
    """Run requests on one engine, and on others that take its pages: all of them, and those that arrive before the transfer breaks off."""
    first, second = (load_model(load, lambda _stage, _fraction: None) for _ in range(2))
    assert first.ready.fingerprint == second.ready.fingerprint
    assert first.step_model is not None and second.step_model is not None
    sizes = [group.page_bytes for group in first.ready.cache_groups]
    assert [group.page_bytes for group in first.step_model.limits.groups] == sizes
    named = [msgspec.structs.replace(submit, giver=GIVER) for submit in submits]
    giver = Rig(first, None)
    expected = giver.run(submits)
    for change in (lambda arrivals: arrivals, half):
        taker = Rig(second, None, exchange=exchange_with(first.step_model, giver.engine, change))
        same(taker.run(named, per_step=3), expected)
        assert taker.engine.exchange is not None
        counts = taker.engine.exchange.counts
        assert counts.num_taken > 10 or change is half, counts
        assert (counts.num_failed > 0) == (change is half), counts


@pytest.mark.parametrize(("quantize", "kv_dtype"), [("bf16", "auto"), ("int8", "int8")])
def test_the_demo(quantize: str, kv_dtype: str) -> None:
    load = Load("demo", str(demo.MODEL), quantize, max_batch=32, kv_cache_bytes=64 << 20, kv_dtype=kv_dtype)
    check(load, [submit for submit in random_submits(40, 512) if submit.params.constraint is None])


@pytest.mark.parametrize("name", FAMILIES)
def test_cache_groups(name: str, tmp_path: Path) -> None:
    for file in (test_group_bits.GOLDEN / name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(test_group_bits.VOCAB)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    check(Load("m", str(tmp_path), "bf16", max_batch=32), test_group_bits.random_submits(30))
