"""Whisper writes down real and synthesised speech in three languages as faster-whisper does: the same texts in f32, words at the same
times, and as few errors in the forms that are served. `tests/real/speech/make.py` stores what faster-whisper writes."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.real.conftest import RealServer
from tests.real.speech.clips import CLIPS, MODELS, TEXTS, Clip, file_of, long_file

F32 = ("--quantize", "f32")
SERVED = ("auto", "int8-fast")
MOST_LATE_S = 0.02
MOST_FURTHER_ERRORS = 0.002  # of all words


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def clips_of(name: str) -> list[Clip]:
    return [clip for clip in CLIPS if clip.language in MODELS[name]]


def stored(name: str) -> dict[str, Any]:
    return json.loads(TEXTS.read_text())[name]


def transcribed(server: RealServer, file: bytes, language: str, *times: str) -> dict[str, Any]:
    form = {"language": language, "response_format": "verbose_json", "timestamp_granularities[]": [*times] or ["segment"]}
    answer = server.http.post("/v1/audio/transcriptions", data=form, files={"file": file})
    assert answer.status_code == 200, answer.text
    return answer.json()


def words_of(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", " ", text.lower()).split()


def errors(found: str, said: str) -> int:
    """Return how many words are replaced, left out or inserted."""
    a, b = words_of(found), words_of(said)
    row = [*range(len(b) + 1)]
    for i, one in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (one != other))
    return row[-1]


def assert_close(found: Any, expected: Any) -> None:
    assert [word["word"] for word in found["words"]] == [text for text, _, _ in expected["words"]]
    pairs = zip(found["words"], expected["words"], strict=True)
    late = [(one, other) for one, other in pairs if max(abs(one["start"] - other[1]), abs(one["end"] - other[2])) > MOST_LATE_S + 1e-6]
    assert not late, f"{len(late)} of {len(found['words'])} words are at other times: {late[:5]}"


def test_clips_have_the_texts_and_times_of_faster_whisper(name: str, serve_real: Any) -> None:
    server, expected = serve_real(name, *F32), stored(name)
    for clip in clips_of(name):
        found = transcribed(server, file_of(clip), clip.language, "word", "segment")
        assert found["text"] == expected[clip.name]["text"], clip.name
        assert_close(found, expected[clip.name])


def test_a_recording_of_several_windows(name: str, serve_real: Any) -> None:
    server, expected, file = serve_real(name, *F32), stored(name), long_file()
    plain = transcribed(server, file, "en")
    assert plain["text"] == expected["long"]["text"]
    bounds = [time for segment in plain["segments"] for time in (segment["start"], segment["end"])]
    assert bounds == pytest.approx([time for pair in expected["long"]["segments"] for time in pair], abs=MOST_LATE_S)
    timed = transcribed(server, file, "en", "word", "segment")
    assert timed["text"] == expected["long, words"]["text"]
    assert_close(timed, expected["long, words"])


@pytest.mark.parametrize("form", SERVED)
def test_served_forms_make_no_further_errors(name: str, form: str, serve_real: Any) -> None:
    server, expected, clips = serve_real(name, "--quantize", form), stored(name), clips_of(name)
    found = [transcribed(server, file_of(clip), clip.language)["text"] for clip in clips]
    num_errors = sum(errors(text, clip.text) for text, clip in zip(found, clips, strict=True))
    exact = sum(errors(expected[clip.name]["text"], clip.text) for clip in clips)
    num_words = sum(len(words_of(clip.text)) for clip in clips)
    assert num_errors <= exact + MOST_FURTHER_ERRORS * num_words
    with ThreadPoolExecutor(len(clips)) as pool:
        together = [pool.submit(transcribed, server, file_of(clip), clip.language) for clip in clips]
        assert [one.result()["text"] for one in together] == found, "a full batch gets the same texts"
