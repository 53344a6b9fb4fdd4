"""The tokens of windows become segments, as in Whisper's own code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from runtime.spectrogram import AROUND
from server.api.answer.generate import Job, Step, TokenEntry
from server.api.speech.transcribe import TEMPERATURES, Request, _cut, segments_of
from server.audio.recording import Recording, with_surroundings
from server.messages import SamplingParams, Submit, TokenLogprob
from server.speech.languages import NAMES, code_of, name_of
from server.speech.tokens import SpeechTokens
from server.speech.transcript import Segment, compression_of, srt, text_of, vtt

FIRST = 100


@pytest.mark.parametrize(
    ("token_ids", "segments", "advance"),
    [
        ([100, 1, 2, 150, 150, 3, 200], [(0, 50, [100, 1, 2, 150]), (50, 100, [150, 3, 200])], 3000),  # one stamp at the end: all was heard
        ([100, 1, 150, 150, 3], [(0, 50, [100, 1, 150])], 100),  # the last segment has no end: hear it again
        ([100, 1, 150, 150], [(0, 50, [100, 1, 150])], 100),
        ([100, 1, 2], [(0, 1500, [100, 1, 2])], 3000),
        ([100, 1, 2, 160], [(0, 60, [100, 1, 2, 160])], 3000),
        ([], [(0, 1500, [])], 3000),
    ],
)
def test_windows_are_cut_at_pairs_of_stamps(token_ids: list[int], segments: list[tuple[int, int, list[int]]], advance: int) -> None:
    assert _cut(FIRST, token_ids, 3000) == (segments, advance)


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


class Scripted:
    """Draws a text for each temperature, of which each token has the same log-probability."""

    def __init__(self, job: Job, logprobs: dict[float, float]) -> None:
        self._temperature, self._logprob = job.submit.params.temperature, logprobs[job.submit.params.temperature]

    async def steps(self) -> AsyncGenerator[Step, None]:
        token_ids = (TOKENS.first_stamp, round(10 * self._temperature), TOKENS.first_stamp + 50)
        entries = tuple(TokenEntry(0, TokenLogprob(token, self._logprob, 1)) for token in token_ids)
        yield Step(0, "", (*token_ids, TOKENS.end), entries, "stop", TOKENS.end)


TOKENS = SpeechTokens(end=90, start=91, before=92, no_stamps=99, tasks={}, silence=93, languages={}, banned=(), blank=())


@pytest.mark.parametrize(
    ("logprobs", "chosen", "tried"),
    [
        ([-0.5, 0, 0, 0, 0, 0], 0.0, 1),  # the first is good
        ([-1.5, -0.9, 0, 0, 0, 0], 0.2, 2),  # the second is
        ([-1.5, -1.4, -1.2, -1.6, -3, -9], 0.4, 6),  # none is good: the most probable one
    ],
)
def test_a_bad_transcript_is_drawn_again_at_higher_temperatures(logprobs: list[float], chosen: float, tried: int) -> None:
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
    assert (found.temperature, len(jobs), found.text) == (chosen, tried, f" [{round(10 * chosen)}]")
    assert {job.submit.params.seed for job in jobs} == {5}
    assert {(len(job.submit.audio.samples), job.submit.audio.loudest) for job in jobs} == {(64_000 + 4 * AROUND, 0.5)}
