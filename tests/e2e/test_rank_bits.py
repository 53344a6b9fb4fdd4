"""A model that is divided over several GPUs gives the bits of one GPU: in a batch, in chunks, from the prefix cache and after a kill."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from server.engine.worker import LoadedModel
from server.messages import Load, SamplingParams, Submit
from tests.deploy.gpu_server import copy_golden, loaded_here
from tests.e2e.test_gpu_bits import Heard, chunked_and_again, run, same
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.fixtures import _library as _library

pytestmark = [needs_pycuda, pytest.mark.gpu, pytest.mark.xdist_group("families on a GPU")]

FAMILY = "qwen2"  # two heads of keys and values, which four GPUs share; its table of embeddings is also its head
KV_BYTES = 4 << 20
LENGTHS = (1, 40, 18, 2, 3)
PROMPTS = [tuple(3 + (7 * n + i) % 120 for i in range(length)) for n, length in enumerate(LENGTHS)]
SUBMITS = [Submit(f"r{n}", p, SamplingParams(3, temperature=n % 2, seed=n, ignore_eos=True, logprobs=2)) for n, p in enumerate(PROMPTS)]
WATCHED = SUBMITS[:2]


def loaded(library: Path | None, folder: Path, family: str, count: int, format: str = "bf16") -> LoadedModel:
    """Load a golden model, divided over `count` GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        SoftwareGpu(library).has_cards(max(count, 2), patch)
        if not (folder / family).exists():
            copy_golden([family], folder)
        load = Load("m", str(folder / family), format, max_context=64, max_batch=8, device="cuda", kv_cache_bytes=KV_BYTES)
        return loaded_here(msgspec.structs.replace(load, tensor_parallel=count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def whole(_library: Path, folder: Path) -> LoadedModel:
    return loaded(_library, folder, FAMILY, 1)


@pytest.fixture(scope="module")
def alone(whole: LoadedModel) -> Heard:
    """Return the answers of one GPU."""
    return run(whole, SUBMITS)


@pytest.fixture(scope="module")
def divided(_library: Path, folder: Path) -> LoadedModel:
    return loaded(_library, folder, FAMILY, 2)


def of_watched(heard: Heard) -> Heard:
    return Heard({submit.request_id: heard.tokens[submit.request_id] for submit in WATCHED})


def test_in_a_batch(divided: LoadedModel, alone: Heard) -> None:
    assert divided.step_model is not None
    assert len(divided.step_model._session.device.ranks) == 2  # pyright: ignore[reportPrivateUsage]
    same(run(divided, SUBMITS), alone)


def test_in_chunks_and_from_the_prefix_cache(divided: LoadedModel, alone: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked_and_again(divided, WATCHED, of_watched(alone), monkeypatch)


def test_after_a_kill(divided: LoadedModel, alone: Heard) -> None:
    """Another engine continues after the tokens that the first engine had sent."""
    heard = run(divided, WATCHED, max_steps=2)
    assert heard.tokens and not heard.ended, "the engine should end in the middle of its answers"
    sent = {name: tuple(token for token, _ in tokens) for name, tokens in heard.tokens.items()}
    again = [msgspec.structs.replace(s, emitted=(sent.get(s.request_id, ()),)) for s in WATCHED]
    same(run(divided, again, heard), of_watched(alone))


def test_a_gpu_has_half_of_the_weights_and_of_each_page(divided: LoadedModel, whole: LoadedModel) -> None:
    """A matrix of a layer that were whole on each GPU would add at least 0.01 to this share."""
    half, all_of_it = divided.ready, whole.ready
    assert 0.5 < half.weights_bytes / all_of_it.weights_bytes < 0.57
    assert [2 * group.page_bytes for group in half.cache_groups] == [group.page_bytes for group in all_of_it.cache_groups]
    assert half.devices == ("cuda:0", "cuda:1") and all_of_it.devices == ()
    assert (half.fingerprint, half.numeric_class) == (all_of_it.fingerprint, all_of_it.numeric_class), "the same bits"


@pytest.mark.slow
def test_only_norms_are_whole_on_each_gpu(_library: Path, folder: Path) -> None:
    """The head of this model is no table of embeddings."""
    one, two = (loaded(_library, folder, "llama", count).ready.weights_bytes for count in (1, 2))
    norms = 5 * 64 * 4
    assert 0 < two - one // 2 <= norms


def test_four_gpus_share_two_heads_of_keys_and_values_and_a_tied_table(_library: Path, folder: Path, alone: Heard) -> None:
    name = WATCHED[1].request_id
    same(run(loaded(_library, folder, FAMILY, 4), WATCHED[1:]), Heard({name: alone.tokens[name]}))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["f32", "int8", "int4-32"])
def test_in_other_formats(format: str, _library: Path, folder: Path) -> None:
    one, two = (run(loaded(_library, folder, "mistral", count, format), WATCHED[1:]) for count in (1, 2))
    same(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_in_other_families(family: str, _library: Path, folder: Path) -> None:
    one, two = (run(loaded(_library, folder, family, count), WATCHED[1:]) for count in (1, 2))
    same(two, one)
