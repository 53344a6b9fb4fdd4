"""Whisper writes down real and synthesised speech in three languages as faster-whisper does: the same texts in f32, words at the same
times, and as few errors in the forms that are served; a browser writes the texts of the server. `tests/real/speech/make.py` stores what
faster-whisper writes."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.sources import load_of
from deploy.export.web import export_web
from deploy.model_loading.known import begin
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from tests.lab.serving.spoken import passages
from tests.node import PATIENCE_S, node
from tests.real.conftest import TARGET, RealServer
from tests.real.conftest import file_of as model_of
from tests.real.speech.clips import CLIPS, MODELS, TEXTS, Clip, file_of, long_file, samples_of
from tests.real.speech.errors import errors, words_of

F32 = ("--quantize", "f32")
SERVED = ("auto", "bf16")  # auto is int8-fast
MOST_LATE_S = 0.02
MOST_FURTHER_ERRORS = 0.002  # of all words, in ten minutes of speech
MOST_IN_CLIPS = 0.02  # the same in the clips, whose few words include near ties


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
    assert num_errors <= exact + MOST_IN_CLIPS * num_words
    with ThreadPoolExecutor(len(clips)) as pool:
        together = [pool.submit(transcribed, server, file_of(clip), clip.language) for clip in clips]
        assert [one.result()["text"] for one in together] == found, "a full batch gets the same texts"


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng: apt install espeak-ng")
def test_ten_minutes_of_speech_in_the_served_form(name: str, serve_real: Any) -> None:
    spoken = passages()
    files = [passage.file() for passage in spoken]
    num_words = sum(len(words_of(passage.text)) for passage in spoken)

    def wrong(form: str) -> int:
        server = serve_real(name, "--quantize", form)
        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(lambda file: transcribed(server, file, "en")["text"], files)]
        return sum(errors(text, passage.text) for text, passage in zip(found, spoken, strict=True))

    assert wrong("auto") <= wrong("f32") + MOST_FURTHER_ERRORS * num_words


ENGINE = Path(__file__).parents[1] / "deploy" / "export" / "engine.mjs"
BROWSED = "whisper-tiny.en"


@pytest.mark.parametrize("form", ["auto", "f32"])
def test_an_export_for_browsers_writes_the_texts_of_the_server(form: str, serve_real: Any, tmp_path: Path) -> None:
    """Node writes them, with the weights in the same format. All CPUs compute the same numbers, so texts and probabilities are equal,
    too."""
    model = advance(begin(load_of(str(model_of(BROWSED)), quantize=form, max_batch=1, target=TARGET)), Servable)
    export_web(model, BROWSED, tmp_path, levels=["wasm-relaxed"])
    server, clips = serve_real(BROWSED, "--quantize", form), clips_of(BROWSED)[:3]
    asked = [{"file": samples_of(clip).tolist(), "response_format": "verbose_json"} for clip in clips]
    lines = "".join(json.dumps({"method": "transcriptions", "body": body}) + "\n" for body in asked)
    done = subprocess.run([node(), ENGINE, tmp_path], input=lines.encode(), capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    for clip, line in zip(clips, done.stdout.splitlines(), strict=True):
        (found,), expected = json.loads(line), transcribed(server, file_of(clip), clip.language)
        assert found["text"] == expected["text"], clip.name
        assert [one["tokens"] for one in found["segments"]] == [one["tokens"] for one in expected["segments"]]
        for one, other in zip(found["segments"], expected["segments"], strict=True):
            assert one["avg_logprob"] == pytest.approx(other["avg_logprob"], abs=1e-9)
