"""End-to-end tests of transcriptions, with the official OpenAI client and a real server that serves a small random Whisper: its texts mean
nothing, but they are the same however they are asked for."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests import ai_sdk
from tests.conftest import DemoServer, serving_demo
from tests.server.audio.files import KINDS, LOSSLESS, encoded
from tests.server.audio.files import wav as encoded_wav

MODEL = Path(__file__).parents[1] / "golden" / "whisper"
pytestmark = pytest.mark.xdist_group("speech server")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[DemoServer]:
    with serving_demo(cache_folder, str(MODEL), "--quantize", "f32", "--max-audio-s", "20") as server:
        yield server


def wav(seconds: float, seed: int = 0) -> bytes:
    samples = 6000 * np.random.default_rng(seed).standard_normal(round(16_000 * seconds))
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.clip(samples, -32768, 32767).astype("<i2").tobytes())
    return out.getvalue()


def transcribed(client: openai.OpenAI, data: bytes, **options: Any) -> Any:
    return client.audio.transcriptions.create(model="whisper", file=("a.wav", data), **{"language": "en", "temperature": 0.5, **options})


def test_every_format_has_the_same_text(client: openai.OpenAI) -> None:
    data = wav(0.2)
    verbose = transcribed(client, data, response_format="verbose_json")
    assert verbose.text and verbose.language == "english" and verbose.duration == 0.2
    assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
    ends = [time for segment in verbose.segments for time in (segment.start, segment.end)]
    assert ends == sorted(ends)
    assert transcribed(client, data).text == verbose.text
    assert transcribed(client, data, response_format="text").strip() == verbose.text
    for format, beginning in (("srt", "1\n00:00:0"), ("vtt", "WEBVTT\n\n00:00:0")):
        found = transcribed(client, data, response_format=format)
        assert found.startswith(beginning) and found.count(" --> ") == len(verbose.segments)


def test_words_have_times(client: openai.OpenAI) -> None:
    data = wav(0.2)
    plain, words, both = (
        transcribed(client, data, response_format="verbose_json", timestamp_granularities=times)
        for times in (["segment"], ["word"], ["word", "segment"])
    )
    assert plain.words is None and words.segments is None
    assert both.words == words.words and both.text == words.text
    assert "".join(word.word for word in words.words) == words.text.replace(" ", "")
    assert all(0 <= word.start <= word.end <= 0.7 for word in words.words)
    assert (both.segments[0].start, both.segments[-1].end) == (words.words[0].start, words.words[-1].end)


def test_lists_may_lack_their_brackets(server: DemoServer) -> None:
    form = {"language": "en", "timestamp_granularities": "word", "response_format": "verbose_json"}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files={"file": wav(0.1)}, timeout=60, verify=False)
    assert answer.json()["words"] and "x-ignored-params" not in answer.headers


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_files(client: openai.OpenAI, kind: str) -> None:
    samples = np.random.default_rng(1).uniform(-0.5, 0.5, 3200).astype(np.float32)
    compressed = encoded(samples, 16_000 if kind in LOSSLESS else 48_000, kind)
    text = transcribed(client, compressed).text
    assert text == transcribed(client, encoded_wav(samples, 16_000)).text if kind in LOSSLESS else text


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    data = wav(0.2)
    *deltas, last = transcribed(client, data, stream=True)
    assert last.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas).strip() == last.text == transcribed(client, data).text


def test_a_stream_of_verbose_json_ends_with_all_of_it(client: openai.OpenAI) -> None:
    data, options = wav(0.2), {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    whole = transcribed(client, data, **options).to_dict()
    *_, last = (event.to_dict() for event in transcribed(client, data, stream=True, **options))
    assert whole["words"] and last == {"type": "transcript.text.done", **whole}


def test_log_probabilities_of_the_tokens(client: openai.OpenAI) -> None:
    data = wav(0.2)
    found = transcribed(client, data, include=["logprobs"])
    assert "".join(entry.token for entry in found.logprobs).strip() == found.text
    assert all(bytes(map(int, entry.bytes)).decode() == entry.token and entry.logprob <= 0 for entry in found.logprobs)
    (segment,) = transcribed(client, data, response_format="verbose_json").segments
    with_stamps = segment.avg_logprob * (len(segment.tokens) + 1)  # the mean counts stamps and the end, which have no entries
    assert sum(entry.logprob for entry in found.logprobs) >= with_stamps - 1e-6
    *deltas, last = transcribed(client, data, include=["logprobs"], stream=True)
    told, streamed = ([entry.to_dict() for entry in entries] for entries in (found.logprobs, last.logprobs))
    assert streamed == told == [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert transcribed(client, data).logprobs is None


def test_a_prompt_may_be_longer_than_a_window_reads(client: openai.OpenAI) -> None:
    """Only the end of a long prompt counts, as in OpenAI's API."""
    data, end = wav(0.1), "".join(f"{number} " for number in range(300))
    assert transcribed(client, data, prompt="x" * 20_000 + end).text == transcribed(client, data, prompt=end).text


def test_how_a_recording_is_cut_has_no_effect(client: openai.OpenAI) -> None:
    data = wav(0.1)
    for strategy in ("auto", {"type": "server_vad", "threshold": 0.5}):
        answer = client.audio.transcriptions.with_raw_response.create(
            model="whisper", file=("a.wav", data), language="en", temperature=0.5, chunking_strategy=strategy
        )
        assert "x-ignored-params" not in answer.headers and answer.parse().text == transcribed(client, data).text


def test_the_ai_sdk_transcribes(server: DemoServer, client: openai.OpenAI, tmp_path: Path) -> None:
    data = wav(0.2)
    options = {"language": "en", "temperature": 0.5, "responseFormat": "verbose_json", "timestampGranularities": ["segment", "word"]}
    found = ai_sdk.transcribed(tmp_path, server.url, "whisper", base64.b64encode(data).decode(), **options)
    expected = transcribed(client, data, response_format="verbose_json", timestamp_granularities=["segment", "word"])
    assert (found["text"], found["language"], found["durationInSeconds"]) == (expected.text, "en", 0.2)
    assert [one["endSecond"] for one in found["segments"]] == [one.end for one in expected.segments]


def test_the_language_is_detected_if_it_is_absent(client: openai.OpenAI) -> None:
    data = wav(0.1)
    assert transcribed(client, data, language=openai.omit).text == transcribed(client, data).text  # the model knows one language


def test_translations(server: DemoServer) -> None:
    answer = httpx.post(
        f"{server.url}/v1/audio/translations", data={"temperature": "0.5"}, files={"file": wav(0.1)}, timeout=60, verify=False
    )
    assert (answer.status_code, bool(answer.json()["text"])) == (200, True)


def test_many_at_once_and_a_killed_worker(server: DemoServer, client: openai.OpenAI) -> None:
    files = [wav(0.1 + 0.02 * seed, seed) for seed in range(6)]
    alone = [transcribed(client, data).text for data in files]
    worker = httpx.get(f"{server.url}/health", verify=False)
    assert worker.status_code == 200
    with ThreadPoolExecutor(6) as pool:
        together = [pool.submit(transcribed, client, data) for data in files]
        for child in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
            if "deploy.worker" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
        assert [future.result().text for future in together] == alone


def test_silence_and_no_samples_at_all(client: openai.OpenAI) -> None:
    assert transcribed(client, wav(0)).text == ""


@pytest.mark.parametrize(
    ("fields", "data", "code", "param"),
    [
        ({}, b"noise", "invalid_audio", "file"),
        ({}, b"RIFF\0\0\0\0WAVE", "invalid_audio", "file"),
        ({"response_format": "xml"}, b"", "invalid_value", "response_format"),
        ({"temperature": "2"}, b"", "invalid_value", "temperature"),
        ({"temperature": "nan"}, b"", "invalid_value", "temperature"),
        ({"stream": "perhaps"}, b"", "invalid_value", "stream"),
        ({"seed": "-1"}, b"", "invalid_value", "seed"),
        ({"include[]": "words"}, b"", "invalid_value", "include[]"),
        ({"include[]": "logprobs", "response_format": "text"}, b"", "invalid_value", "include[]"),
        ({"stream": "true", "response_format": "srt"}, b"", "invalid_value", "response_format"),
        ({"prompt": "a" * 70_000}, b"", "bad_request", "prompt"),
        ({"prompt": "he said <|notimestamps|>"}, b"long enough", "invalid_value", "prompt"),
        ({"timestamp_granularities[]": "word"}, b"", "invalid_value", "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "letter"}, b"", "invalid_value", "timestamp_granularities[]"),
        ({"language": "klingon"}, b"long enough", "invalid_value", "language"),
        ({"model": "other"}, b"", "model_not_found", "model"),
    ],
)
def test_errors_name_the_field(server: DemoServer, fields: dict[str, str], data: bytes, code: str, param: str) -> None:
    data = wav(0.1) if data == b"long enough" else data
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=fields, files={"file": data}, timeout=60, verify=False)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_long_files_are_refused_before_they_are_decoded(server: DemoServer) -> None:
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": wav(21)}, timeout=60, verify=False)
    assert answer.status_code == 400
    assert "lasts 21.0 s; expected at most 20 s (max_audio_s)" in answer.json()["error"]["message"]


def test_a_form_without_a_file_and_a_chat_are_refused(server: DemoServer) -> None:
    url = f"{server.url}/v1"
    answer = httpx.post(f"{url}/audio/transcriptions", files={"language": (None, "en")}, timeout=60, verify=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_field")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{url}/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}, verify=False)
    assert answer.status_code == 400
    assert "only transcribes speech" in answer.json()["error"]["message"]
