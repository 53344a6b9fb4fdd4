"""On a GPU, a request's result has the same bits alone, in a batch of 64, in chunks, from the prefix cache and after a kill. The batches
have so many rows that every height of a product's tile occurs, and the tile for many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.device.cuda.device import CudaDevice
from server.engine.worker import LoadedModel, engine_of
from server.messages import Failed, FinishReason, FromWorker, Load, SamplingParams, Submit, TokenEvent, Tokens
from tests.deploy.gpu_server import copy_golden, loaded_here
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu, pytest.mark.xdist_group("families on a GPU")]

BATCH = 64
COUNTS = (33, 17, 9)  # other numbers of sequences that decode together: tiles of 64, 32 and 16 rows
WATCHED = {0: 1, 17: 18, 39: 40}  # the requests that also run alone, and the lengths of their prompts
PROMPTS = [tuple(3 + (7 * n + i) % 120 for i in range(WATCHED.get(n, 1 + n % 3))) for n in range(BATCH)]
SUBMITS = [Submit(f"r{n}", PROMPTS[n], SamplingParams(3, temperature=n % 2, seed=n, ignore_eos=True, logprobs=2)) for n in range(BATCH)]


@dataclass
class Heard:
    """What an engine has sent: for each request, its tokens with their log-probabilities, and the prompt tokens found in the cache."""

    tokens: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    num_cached: dict[str, int] = field(default_factory=dict)

    def __call__(self, message: FromWorker) -> None:
        assert not isinstance(message, Failed), message
        for event in message.events if isinstance(message, Tokens) else ():
            self._take(event)

    def _take(self, event: TokenEvent) -> None:
        self.tokens.setdefault(event.request_id, []).extend(zip(event.token_ids, event.logprobs, strict=True))
        self.num_cached.setdefault(event.request_id, event.num_cached)
        if event.finish_reason is FinishReason.LENGTH:
            self.ended.add(event.request_id)


@pytest.fixture(scope="module")
def model(_library: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models")
    copy_golden(["llama"], folder)
    load = Load("m", str(folder / "llama"), "bf16", max_context=64, max_batch=BATCH, device="cuda", kv_cache_bytes=32 << 20)
    return loaded_here(load)


def run(model: LoadedModel, submits: Sequence[Submit], heard: Heard | None = None, *, max_steps: int = 1000) -> Heard:
    """Run requests on a new engine, whose prefix cache is empty. Stop after `max_steps`, as a kill does."""
    heard = heard or Heard()
    engine = engine_of(model, heard, None)
    for submit in submits:
        engine.submit(submit)
    while engine.has_work and max_steps:
        engine.step()
        max_steps -= 1
    engine.close()
    return heard


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> Heard:
    heard = Heard()
    for number in WATCHED:
        run(model, [SUBMITS[number]], heard)
    assert len(heard.tokens) == len(WATCHED) and all(len(tokens) == 3 for tokens in heard.tokens.values())
    return heard


def same(heard: Heard, alone: Heard) -> None:
    assert {name: heard.tokens[name] for name in alone.tokens} == alone.tokens


def watched() -> list[Submit]:
    return [SUBMITS[number] for number in WATCHED]


@pytest.mark.parametrize("count", [BATCH, *(pytest.param(count, marks=pytest.mark.slow) for count in COUNTS)])
def test_in_a_batch(count: int, model: LoadedModel, alone: Heard) -> None:
    assert model.step_model is not None and isinstance(model.step_model._session.device, CudaDevice)
    others = [submit for submit in SUBMITS if submit not in watched()][: count - len(WATCHED)]
    same(run(model, [*others, *watched()]), alone)


def test_in_chunks_and_from_the_prefix_cache(model: LoadedModel, alone: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked_and_again(model, watched(), alone, monkeypatch)


def chunked_and_again(model: LoadedModel, submits: Sequence[Submit], alone: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the answers to requests whose prompts are computed in chunks of at most 16 tokens, and then to the same requests again, whose
    prompts are in the prefix cache. The last prompt has 40 tokens."""
    assert model.step_model is not None
    monkeypatch.setattr(model.step_model, "_limits", replace(model.step_model.limits, max_tokens=16, max_seqs=8))
    heard, again = Heard(), [msgspec.structs.replace(submit, request_id=f"{submit.request_id} again") for submit in submits]
    engine = engine_of(model, heard, None)
    for asked in (submits, again):
        for submit in asked:
            engine.submit(submit)
        while engine.has_work:
            engine.step()
    engine.close()
    same(heard, alone)
    assert heard.num_cached[again[-1].request_id] == 32, "two pages of 16 tokens"
    assert {name.removesuffix(" again"): tokens for name, tokens in heard.tokens.items() if name.endswith("again")} == alone.tokens


def test_after_a_kill(model: LoadedModel, alone: Heard) -> None:
    """Another engine continues after the tokens that the first engine had sent."""
    heard = run(model, watched(), max_steps=2)
    assert heard.tokens and not heard.ended, "the engine should end in the middle of its answers"
    sent = {name: tuple(token for token, _ in tokens) for name, tokens in heard.tokens.items()}
    same(run(model, [msgspec.structs.replace(s, emitted=(sent.get(s.request_id, ()),)) for s in watched()], heard), alone)
