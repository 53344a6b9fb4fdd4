"""The tokens of windows become segments, as in Whisper's own code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from runtime.spectrogram import AROUND
from server.api.answer.generate import Job, Step, TokenEntry
from server.api.speech.transcribe import TEMPERATURES, Request, _Cut, _cut, segments_of
from server.audio.recording import Recording, with_surroundings
from server.errors import SHUTTING_DOWN, ApiError
from server.interfaces import RequestError
from server.messages import Embed, Embedding, ErrorCode, SamplingParams, Submit, TokenLogprob
from server.speech.languages import NAMES, code_of, name_of
from server.speech.placing import Part
from server.speech.tokens import SpeechTokens
from server.speech.transcript import Segment, compression_of, srt, text_of, vtt

TOKENS = SpeechTokens(end=90, start=91, before=92, no_stamps=99, tasks={}, silence=93, languages={}, banned=())


@pytest.mark.parametrize(
    ("token_ids", "segments", "num_hops", "is_whole"),
    [
        ([100, 1, 2, 150, 150, 3, 200], [(0, 1, (100, 1, 2, 150), 2), (1, 2, (150, 3, 200), 1)], 3000, True),  # one stamp: all was heard
        ([100, 1, 150, 150, 3], [(0, 1, (100, 1, 150), 1)], 100, False),  # the last segment has no end: hear it again
        ([100, 1, 150, 150], [(0, 1, (100, 1, 150), 1)], 100, False),
        ([100, 1, 2], [(0, 30, (100, 1, 2), 2)], 3000, False),
        ([100, 1, 2, 160], [(0, 1.2, (100, 1, 2, 160), 2)], 3000, True),
        ([], [(0, 30, (), 0)], 3000, False),
    ],
)
def test_windows_are_cut_at_pairs_of_stamps(
    token_ids: list[int], segments: list[tuple[float, float, tuple[int, ...], int]], num_hops: int, is_whole: bool
) -> None:
    moved = [Part(7 + start_s, 7 + end_s, *own) for start_s, end_s, *own in segments]
    assert _cut(TOKENS, token_ids, 3000, 7.0) == _Cut(moved, num_hops, is_whole)


def segment(start_s: float, end_s: float, text: str) -> Segment:
    return Segment(0, start_s, end_s, text, (), 0.0, -0.1, 1.0, 0.0)


SEGMENTS = [segment(0, 3.2, " Hello."), segment(3661.5, 3662, " A --> B.")]


def test_subtitles() -> None:
    assert srt(SEGMENTS) == "1\n00:00:00,000 --> 00:00:03,200\nHello.\n\n2\n01:01:01,500 --> 01:01:02,000\nA -> B.\n"
    assert vtt(SEGMENTS) == "WEBVTT\n\n00:00:00.000 --> 00:00:03.200\nHello.\n\n01:01:01.500 --> 01:01:02.000\nA -> B.\n"
    assert text_of(SEGMENTS) == "Hello. A --> B."


def test_repetitions_compress_well() -> None:
    assert compression_of("and so on " * 40) > 2.4 > compression_of("The quick brown fox jumps over the lazy dog.")
    assert compression_of("") == 0


def test_languages_have_codes_and_names() -> None:
    assert len(NAMES) == 100
    assert code_of("German") == code_of("de") == "de"
    assert name_of("ht") == "haitian creole"
    assert code_of("klingon") == "klingon"
    assert [code_of(name) for name in ("Castilian", "mandarin", "Burmese", "flemish")] == ["es", "zh", "my", "nl"]
    assert name_of("es") == "spanish"


class Scripted:
    """A fake decoding. The text depends on the temperature, and all of its tokens have the log-probability given for this temperature."""

    def __init__(self, job: Job, logprobs: dict[float, float]) -> None:
        self._temperature, self._logprob = job.submit.params.temperature, logprobs[job.submit.params.temperature]

    async def steps(self) -> AsyncGenerator[Step, None]:
        token_ids = (TOKENS.first_stamp, round(10 * self._temperature), TOKENS.first_stamp + 50)
        entries = tuple(TokenEntry(0, TokenLogprob(token, self._logprob, 1)) for token in token_ids)
        yield Step(0, "", (*token_ids, TOKENS.end), entries, "stop", TOKENS.end)


@pytest.mark.parametrize(
    ("logprobs", "chosen", "tried", "told"),
    [
        ([-0.5, 0, 0, 0, 0, 0], 0.0, 1, 0.0),  # the first is good
        ([-1.5, -0.9, 0, 0, 0, 0], 0.2, 2, 0.2),  # the second is
        ([-1.5, -1.4, -1.2, -1.6, -3, -9], 0.4, 6, 1.0),  # none is good: the most probable one, which no later window reads
    ],
)
def test_a_bad_transcript_is_drawn_again_at_higher_temperatures(logprobs: list[float], chosen: float, tried: int, told: float) -> None:
    jobs: list[Job] = []

    def run(job: Job) -> Any:
        jobs.append(job)
        return Scripted(job, dict(zip(TEMPERATURES, logprobs, strict=True)))

    async def segments() -> list[Segment]:
        common = Submit("", (), SamplingParams(max_tokens=1, seed=5))
        request = Request(TOKENS, common, lambda ids: f" {ids}", 3000, 448, "en", "transcribe", ())
        recording = Recording(with_surroundings(np.zeros(16_000, np.float32)), 0.5)
        return [segment async for segment in segments_of(request, recording, run)]

    (found,) = asyncio.run(segments())
    assert (found.temperature, len(jobs), found.text) == (told, tried, f" [{round(10 * chosen)}]")
    assert {job.submit.params.seed for job in jobs} == {5}
    assert {(len(job.submit.audio.samples), job.submit.audio.loudest) for job in jobs} == {(64_000 + 4 * AROUND, 0.5)}


def test_the_next_window_begins_where_the_last_word_ends_if_words_are_timed() -> None:
    """The first window draws an unfinished segment; its last word ends 2 s into the window, where its stamp tells 3 s."""
    drawn = [[100, 1, 2, 250, 250, 3], [100, 4, 150]]
    heard: list[int] = []

    class Drawing:
        def __init__(self, token_ids: list[int]) -> None:
            self._token_ids = token_ids

        async def steps(self) -> AsyncGenerator[Step, None]:
            entries = tuple(TokenEntry(0, TokenLogprob(token, -0.1, 1)) for token in self._token_ids)
            yield Step(0, "", (*self._token_ids, TOKENS.end), entries, "stop", TOKENS.end)

    def run(job: Job) -> Any:
        heard.append((len(job.submit.audio.samples) // 4 - AROUND) // 160)
        return Drawing(drawn[len(heard) - 1])

    async def align(embed: Embed) -> Embedding:
        texts = len(embed.prompt_ids) - 3
        attention = np.full((texts + 3, 1, 1500), 1e-4, np.float32)
        for row in range(texts + 1):
            attention[row + 1, 0, row * 50 : (row + 1) * 50] = 1  # a token a second
        return Embedding(embed.request_id, attention.tobytes(), texts + 3)

    async def segments() -> list[Segment]:
        common = Submit("", (), SamplingParams(max_tokens=1))
        request = Request(TOKENS, common, lambda ids: "".join(f" {token}" for token in ids), 3000, 448, "en", "transcribe", (), align)
        recording = Recording(with_surroundings(np.zeros(16_000 * 8, np.float32)), 0.5)
        return [segment async for segment in segments_of(request, recording, run)]

    first, second = asyncio.run(segments())
    begin = round(first.end_s * 100)
    assert heard == [800, 800 - begin] and second.seek == begin
    assert first.words[-1].end_s == first.end_s == pytest.approx(2.0, abs=0.1)


def test_a_model_that_is_unloaded_while_words_are_timed_is_no_fault_of_the_server() -> None:
    class Drawing:
        async def steps(self) -> AsyncGenerator[Step, None]:
            entries = tuple(TokenEntry(0, TokenLogprob(token, -0.1, 1)) for token in (100, 1, 150))
            yield Step(0, "", (100, 1, 150, TOKENS.end), entries, "stop", TOKENS.end)

    async def align(_: Embed) -> Embedding:
        raise RequestError(ErrorCode.SHUTTING_DOWN, "the model is being unloaded")

    async def segments() -> list[Segment]:
        common = Submit("", (), SamplingParams(max_tokens=1))
        request = Request(TOKENS, common, lambda ids: f" {ids}", 3000, 448, "en", "transcribe", (), align)
        recording = Recording(with_surroundings(np.zeros(16_000, np.float32)), 0.5)
        return [segment async for segment in segments_of(request, recording, lambda _: Drawing())]  # type: ignore[arg-type,return-value]

    with pytest.raises(ApiError) as caught:
        asyncio.run(segments())
    assert caught.value.kind is SHUTTING_DOWN
