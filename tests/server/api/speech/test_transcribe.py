"""The tokens of windows become segments, as in Whisper's own code."""

from __future__ import annotations

import pytest

from server.api.speech.transcribe import _cut
from server.speech.languages import NAMES, code_of, name_of
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
