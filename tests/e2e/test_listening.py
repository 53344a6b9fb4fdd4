"""End-to-end tests of recordings in conversations, with the official clients and a real server that serves small random models: their texts
mean nothing, but they are those of transformers (`make_listening.py`), and the same however they are asked for."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.conftest import DemoServer, serving_demo
from tests.doubles.file_server import serving_files
from tests.e2e.test_images import check_refused, kill_worker
from tests.golden.listening import CONVERSATIONS, SUBJECTS, WINDOW, Subject
from tests.golden.media import RATE
from tests.server.audio.files import encoded, tone, wav
from tests.server.images.files import data_url, image
from tests.server.images.files import encoded as encoded_image

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}}
pytestmark = pytest.mark.xdist_group("listening servers")


def sound_of(subject: Subject, number: int) -> bytes:
    """Return a recording of the golden as a WAV file."""
    samples = subject.sound(number)
    header = wav(np.zeros(0, np.float32), RATE)
    size = samples.nbytes
    return header[:4] + (36 + size).to_bytes(4, "little") + header[8:40] + size.to_bytes(4, "little") + samples.astype("<i2").tobytes()


SOUNDS = [sound_of(SUBJECTS["voxtral"], number) for number in range(3)]


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """Serve the recordings. Yield the host and the port."""
    with serving_files(SOUNDS) as address:
        yield address


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]


@pytest.fixture(scope="module")
def server(cache_folder: Path, subject: Subject, files: str) -> Iterator[DemoServer]:
    options = "--quantize", "f32", "--max-recordings", "3", "--max-audio-s", "8", "--audio-host", f"private+{files}"
    with serving_demo(cache_folder, str(subject.folder), *options) as server:
        yield server


def part(file: bytes, format: str = "wav") -> Any:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": format}}


def asked(number: int) -> list[Any]:
    """Return the messages of a conversation of the golden."""
    text, sounds = CONVERSATIONS[number]
    return [{"role": "user", "content": [*(part(SOUNDS[sound]) for sound in sounds), {"type": "text", "text": text}]}]


def answered(client: openai.OpenAI, subject: Subject, messages: list[Any], num_tokens: int = 64, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": subject.name, "messages": messages, "max_tokens": num_tokens, **GREEDY, **options})


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_answers_are_those_of_transformers(client: openai.OpenAI, subject: Subject, number: int) -> None:
    answer = answered(client, subject, asked(number))
    assert answer.prompt_token_ids == subject.arrays[f"prompt_{number}"].tolist()
    assert answer.choices[0].token_ids == subject.arrays[f"continuation_{number}"].tolist()
    assert answer.usage.prompt_tokens == len(subject.arrays[f"prompt_{number}"])


def test_many_at_once_and_a_killed_worker(server: DemoServer, client: openai.OpenAI, subject: Subject) -> None:
    with ThreadPoolExecutor(6) as pool:
        asking = [(number, pool.submit(answered, client, subject, asked(number))) for number in (0, 1, 2, 1, 0, 2)]
        kill_worker(server)
        for number, future in asking:
            assert future.result().choices[0].token_ids == subject.arrays[f"continuation_{number}"].tolist()


def test_a_url_gives_the_same(client: openai.OpenAI, subject: Subject, files: str) -> None:
    text, sounds = CONVERSATIONS[1]
    for urls in ([f"http://{files}/{sound}" for sound in sounds], [data_url(SOUNDS[sound], "audio/wav") for sound in sounds]):
        parts: list[Any] = [{"type": "audio_url", "audio_url": {"url": url}} for url in urls]
        answer = answered(client, subject, [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])
        assert answer.choices[0].token_ids == subject.arrays["continuation_1"].tolist()


def test_compressed_audio_takes_as_many_tokens(client: openai.OpenAI, subject: Subject) -> None:
    """FLAC loses nothing, so the answer is the same, too."""
    samples = subject.sound(0).astype(np.float32) / 32_767
    content = [part(encoded(samples, RATE, "FLAC"), "flac"), {"type": "text", "text": CONVERSATIONS[0][0]}]
    answer = answered(client, subject, [{"role": "user", "content": content}])
    assert answer.choices[0].token_ids == subject.arrays["continuation_0"].tolist()


def test_a_stream_has_the_same_text(client: openai.OpenAI, subject: Subject) -> None:
    whole = answered(client, subject, asked(0)).choices[0].message.content
    stream = answered(client, subject, asked(0), stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == whole


def test_responses_hear_the_same(client: openai.OpenAI, subject: Subject) -> None:
    text, sounds = CONVERSATIONS[1]
    expected = answered(client, subject, asked(1), 8, extra_body={"ignore_eos": True}).choices[0].message.content
    content: list[Any] = [*(part(SOUNDS[sound]) for sound in sounds), {"type": "input_text", "text": text}]
    options: dict[str, Any] = {"model": subject.name, "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    assert client.responses.create(input=[{"role": "user", "content": content}], **options).output_text == expected


def test_the_same_recording_is_found_in_the_prefix_cache_and_another_is_not(client: openai.OpenAI, subject: Subject) -> None:
    def cached(file: bytes, salt: str) -> int:
        messages = [{"role": "user", "content": [part(file), {"type": "text", "text": "What is it?"}]}]
        extra = {**GREEDY["extra_body"], "cache_salt": salt}
        return answered(client, subject, messages, 1, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    first, other = (wav(tone(RATE, hertz, 1.9), RATE) for hertz in (300.0, 301.0))
    assert cached(first, "a") == 0
    assert cached(first, "a") >= 16
    shared = cached(other, "a")
    assert shared <= 64 and shared < cached(first, "a") + (subject.name == "qwen2_audio")
    assert cached(first, "b") == 0


def test_recordings_anywhere_in_a_conversation(client: openai.OpenAI, subject: Subject) -> None:
    turns = [*asked(1), {"role": "assistant", "content": "two."}, *asked(0)]
    ids = answered(client, subject, turns, 1).prompt_token_ids
    assert ids.count(subject.audio) == sum(len(subject.arrays[f"rows_{sound}"]) for sound in (1, 2, 0))
    between = [{"role": "user", "content": [{"type": "text", "text": "a"}, part(SOUNDS[0]), {"type": "text", "text": "b"}]}]
    ids = answered(client, subject, between, 1).prompt_token_ids
    first = ids.index(subject.audio)
    assert subject.tokens.index("a") in ids[:first] and subject.tokens.index("b") in ids[first:]


def test_a_long_recording_is_heard_in_windows_or_cut_off(client: openai.OpenAI, subject: Subject) -> None:
    content = [part(wav(tone(RATE, 400.0, 3 * WINDOW / RATE), RATE))]
    ids = answered(client, subject, [{"role": "user", "content": content}], 1).prompt_token_ids
    assert ids.count(subject.audio) == {"qwen2_audio": 50, "voxtral": 3 * 25}[subject.name]


def test_descriptions_of_the_model_name_audio(server: DemoServer, subject: Subject) -> None:
    shown = httpx.post(f"{server.url}/api/show", json={"model": subject.name}, timeout=60, verify=False).json()
    assert not {"audio", "vision"} & {*shown["capabilities"]}  # Ollama's API takes no audio
    described = httpx.get(f"{server.url}/v1/models/{subject.name}", timeout=60, verify=False).json()
    assert described["listens"] and not described["sees"] and "hears" not in described
    assert httpx.get(f"{server.url}/props", timeout=60, verify=False).json()["modalities"] == {"vision": False, "audio": True}


def test_tokens_of_recordings_are_counted(server: DemoServer, subject: Subject) -> None:
    given = {"input": [{"role": "user", "content": [part(SOUNDS[0]), {"type": "input_text", "text": CONVERSATIONS[0][0]}]}]}
    answer = httpx.post(f"{server.url}/v1/responses/input_tokens", json=given, timeout=60, verify=False)
    assert answer.json()["input_tokens"] == len(subject.arrays["prompt_0"])
    body = {"messages": asked(1), "add_generation_prompt": True}
    answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=60, verify=False)
    assert answer.json()["tokens"] == subject.arrays["prompt_1"].tolist()


WHERE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("given", "code", "param", "text"),
    [
        ([part(b"noise")], "invalid_audio", f"{WHERE}.input_audio.data", "expected a file of WAV, MP3"),
        ([part(wav(tone(RATE, seconds=9), RATE))], "invalid_audio", f"{WHERE}.input_audio.data", "max_audio_s"),
        ([{"type": "input_audio", "input_audio": {"data": "%"}}], "invalid_audio", f"{WHERE}.input_audio.data", "not base64"),
        ([{"type": "input_audio"}], "invalid_value", f"{WHERE}.input_audio", "absent"),
        ([{"type": "input_audio", "input_audio": {}}], "missing_field", f"{WHERE}.input_audio.data", "data"),
        ([{"type": "audio_url"}], "invalid_value", f"{WHERE}.audio_url", "absent"),
        ([{"type": "audio_url", "audio_url": {"url": "file:///x.wav"}}], "invalid_audio", f"{WHERE}.audio_url.url", "expected a data: URL"),
        ([{"type": "audio_url", "audio_url": "https://x/y.wav"}], "invalid_audio", f"{WHERE}.audio_url", "fetches no audio from 'x'"),
        ([part(SOUNDS[0])] * 4, "invalid_value", "messages", "4 recordings; expected at most 3 (max_recordings)"),
        (
            [{"type": "image_url", "image_url": {"url": data_url(encoded_image(image()))}}],
            "unsupported_content",
            f"{WHERE}.type",
            "reads text and audio; ask a vision model",
        ),
    ],
)
def test_errors_name_the_part(server: DemoServer, given: Any, code: str, param: str, text: str) -> None:
    check_refused(server, given, code, param, text)


def test_texts_and_prompts_with_the_audio_token_are_refused(server: DemoServer, subject: Subject) -> None:
    body = {"messages": [{"role": "user", "content": f"a {subject.audio_text} here"}], "max_tokens": 1}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False)
    assert (refused.status_code, subject.audio_text in refused.json()["error"]["message"]) == (400, True)
    for prompt in (f"hear {subject.audio_text}", [subject.audio, 5]):
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60, verify=False)
        assert answer.status_code == 400
        assert "the prompt has 1 audio tokens" in answer.json()["error"]["message"]


def test_audio_is_not_truncated(server: DemoServer) -> None:
    body = {"messages": asked(0), "max_tokens": 1, "truncate_prompt_tokens": 10}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "audio" in error["message"]
