"""The request that all windows of a transcription share: a long prompt is tokenised while other tasks run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.api.context import Caller
from server.api.request.prepare import LONG
from server.api.speech.form import SpeechForm
from server.api.speech.prepare import request_of, run_of
from server.models.model import Loaded
from server.speech.tokens import MOST_BEFORE, SpeechTokens
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
