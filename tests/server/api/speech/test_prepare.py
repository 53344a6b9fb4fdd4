"""The request that all windows of a transcription share: a long prompt is tokenised while other tasks run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from server.api.answer.generate import Job
from server.api.context import Caller
from server.api.request.prepare import LONG
from server.api.speech.form import SpeechForm
from server.api.speech.prepare import request_of, run_of
from server.errors import QUEUE_FULL, ApiError
from server.messages import FinishReason, SamplingParams, Submit, TokenEvent
from server.models.admission import Admission
from server.models.model import Loaded
from server.speech.tokens import MOST_BEFORE, SpeechTokens
from server.text.detokenize import StopRules
from tests.doubles.worker import ByteTokenizer

TOKENS = SpeechTokens(end=256, start=257, before=258, no_stamps=259, tasks={}, silence=260, languages={}, banned=())


class Watched(ByteTokenizer):
    """Notes the threads on which it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self.threads.add(threading.get_ident())
        return super().encode_all(texts, add_special_tokens)


@pytest.mark.parametrize("num_chars", [0, 5, LONG, LONG + 1, 60_000])
def test_long_prompts_are_tokenised_off_the_loop(num_chars: int) -> None:
    tokenizer = Watched()
    loaded: Any = SimpleNamespace(
        tokenizer=tokenizer,
        worker=SimpleNamespace(embed=None),
        ready=SimpleNamespace(num_hops=8, max_context=99, num_pages=0, page_size=16),
    )
    asked = SpeechForm(None, None, "x" * num_chars, "json", 0.0, False, 0, frozenset({"segment"}))
    made = asyncio.run(request_of(asked, "transcribe", cast("Loaded", loaded), TOKENS, Caller("r")))
    assert len(made.prompt_ids) == min(MOST_BEFORE, num_chars + 1 if num_chars else 0)
    here = {threading.get_ident()} & tokenizer.threads
    assert bool(here) == (0 < num_chars <= LONG)


def test_a_window_arrives_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times to the first token and in the queue leave out the windows before."""
    unused: Any = None
    monkeypatch.setattr("server.api.speech.prepare.Generation", lambda _loaded, _job, _series, who: who.arrived_s)
    run: Any = run_of(unused, unused, Caller("an id", arrived_s=5.0))
    first, second, third = (run(unused) for _ in range(3))
    assert first == 5.0 and second != 5.0 and second < third


def test_a_recording_that_has_begun_is_heard_to_its_end_by_a_busy_model() -> None:
    """A transcription of an hour has more than a hundred windows. Others may take the place of each of them before the next begins."""
    series: Any = MagicMock()

    class Worker:
        ready = None

        async def generate(self, submit: Submit) -> AsyncGenerator[TokenEvent, None]:
            yield TokenEvent(submit.request_id, 0, (1,), finish_reason=FinishReason.STOP)

    admission = Admission("whisper", max_running=1, max_queued=1, max_queued_tokens=100)
    loaded: Any = SimpleNamespace(admission=admission, worker=Worker(), tokenizer=ByteTokenizer(), fingerprint="")

    async def window() -> None:
        submit = Submit("id", (1,), SamplingParams(max_tokens=1), fairness_key="key")
        generation = run(Job(submit, StopRules()))
        assert [step async for step in generation.steps()]

    run = run_of(loaded, series, Caller("an id", key_digest="key", tenant="key"))
    asyncio.run(window())
    admission.admit(1, 10, "key")
    others = [admission.admit(1, 90)]
    asyncio.run(window())
    assert (admission.num_sequences, admission.num_queued_tokens) == (2, 100)
    with pytest.raises(ApiError) as caught:
        run = run_of(loaded, series, Caller("another id"))
        asyncio.run(window())
    assert caught.value.kind is QUEUE_FULL and others
