"""End-to-end tests of images and recordings in one conversation, with the official client and real servers that serve a small random
Qwen2.5-Omni or Qwen3-Omni: their texts mean nothing, but they are those of transformers (`make_omni.py`), and the same however they are
asked for."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import ai_sdk
from tests.conftest import DemoServer, serving_demo
from tests.e2e.test_images import check_refused, kill_worker
from tests.e2e.test_images import part as image_part
from tests.e2e.test_listening import part as audio_part
from tests.e2e.test_listening import sound_of
from tests.golden.media import RATE
from tests.golden.omni import AUDIO, CONVERSATIONS, IMAGE, SUBJECTS, TEXT, Subject
from tests.server.audio.files import tone, wav

MODEL = SUBJECTS["qwen2_5_omni"]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}}
pytestmark = pytest.mark.xdist_group("omni server")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[DemoServer]:
    options = "--quantize", "f32", "--max-recordings", "3", "--max-images", "3", "--max-audio-s", "8"
    with serving_demo(cache_folder, str(MODEL.folder), *options) as server:
        yield server


def part(kind: str, value: Any, subject: Subject = MODEL) -> Any:
    if kind == IMAGE:
        return image_part(subject.files[value])
    return audio_part(sound_of(subject, value)) if kind == AUDIO else {"type": "text", "text": value}


def asked(number: int, subject: Subject = MODEL) -> list[Any]:
    """Return the messages of a conversation of the golden."""
    return [{"role": "user", "content": [part(*one, subject) for one in CONVERSATIONS[number]]}]


def answered(client: openai.OpenAI, messages: list[Any], num_tokens: int = 64, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL.name, "messages": messages, "max_tokens": num_tokens, **GREEDY, **options})


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_answers_are_those_of_transformers(client: openai.OpenAI, number: int) -> None:
    answer = answered(client, asked(number))
    assert answer.prompt_token_ids == MODEL.arrays[f"prompt_{number}"].tolist()
    assert answer.choices[0].token_ids == MODEL.arrays[f"continuation_{number}"].tolist()
    assert answer.usage.prompt_tokens == len(MODEL.arrays[f"prompt_{number}"])


def test_many_at_once_and_a_killed_worker(server: DemoServer, client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(6) as pool:
        asking = [(number, pool.submit(answered, client, asked(number))) for number in (0, 1, 2, 3, 1, 0)]
        kill_worker(server)
        for number, future in asking:
            assert future.result().choices[0].token_ids == MODEL.arrays[f"continuation_{number}"].tolist()


def test_qwen3_omni_answers_what_transformers_answers(cache_folder: Path) -> None:
    """The server answers several conversations at once, and gives the same answers after its worker was killed."""
    subject = SUBJECTS["qwen3_omni_moe"]
    transport = openai.DefaultHttpxClient(verify=False)
    with (
        serving_demo(cache_folder, str(subject.folder), "--quantize", "f32") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=transport) as client,
        ThreadPoolExecutor(len(CONVERSATIONS)) as pool,
    ):
        for kill in (False, True):
            asking = [pool.submit(answered, client, asked(number, subject), model=subject.name) for number in range(len(CONVERSATIONS))]
            if kill:
                kill_worker(server)
            for number, answer in enumerate(future.result() for future in asking):
                assert answer.prompt_token_ids == subject.arrays[f"prompt_{number}"].tolist()
                assert answer.choices[0].token_ids == subject.arrays[f"continuation_{number}"].tolist()


def test_responses_read_the_same(client: openai.OpenAI) -> None:
    expected = answered(client, asked(1), 8, extra_body={"ignore_eos": True}).choices[0].message.content
    types = {"text": lambda one: {"type": "input_text", "text": one["text"]}, "input_audio": lambda one: one}
    types["image_url"] = lambda one: {"type": "input_image", "image_url": one["image_url"]["url"], "detail": "auto"}
    content: Any = [types[one["type"]](one) for one in asked(1)[0]["content"]]
    options: dict[str, Any] = {"model": MODEL.name, "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    assert client.responses.create(input=[{"role": "user", "content": content}], **options).output_text == expected


@pytest.mark.parametrize(("number", "apis"), [(1, ["chat", "compatible"]), (3, ["chat", "compatible", "responses", "messages"])])
def test_the_ai_sdk_sends_both(server: DemoServer, client: openai.OpenAI, tmp_path: Path, number: int, apis: list[str]) -> None:
    """The AI SDK sends audio only by its providers for OpenAI's chat endpoint, so the other APIs get a conversation without audio."""
    types = {IMAGE: "image/png", AUDIO: "audio/wav"}
    values = [(kind, part(kind, value)) for kind, value in CONVERSATIONS[number]]
    data = {
        IMAGE: lambda one: one["image_url"]["url"].partition(",")[2],
        AUDIO: lambda one: one["input_audio"]["data"],
        TEXT: lambda one: one["text"],
    }
    parts = [(types.get(kind, "text"), data[kind](one)) for kind, one in values]
    expected = answered(client, asked(number), 8, extra_body={}).choices[0].message.content
    said = ai_sdk.generated(tmp_path, server.url, MODEL.name, parts, apis, 8)
    num_tokens = len(MODEL.arrays[f"prompt_{number}"])
    assert said == {api: {"text": expected, "streamed": expected, "tokens": num_tokens} for api in apis}


def test_prompts_of_llama_cpp_have_both(server: DemoServer, client: openai.OpenAI) -> None:
    """The first bytes of a file decide whether the prompt gets tokens of an image or of audio."""
    kinds = [kind for kind, _ in CONVERSATIONS[1] if kind in (IMAGE, AUDIO)]
    assert {*kinds} == {IMAGE, AUDIO}
    files = [part(*one) for one in CONVERSATIONS[1] if one[0] in kinds]
    data = [one["image_url"]["url"].partition(",")[2] if "image_url" in one else one["input_audio"]["data"] for one in files]
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json={"messages": asked(1)}, timeout=60, verify=False).json()[
        "prompt"
    ]
    text = re.sub(r"<\|(?:vision|audio)_bos\|>(?:<\|(?:IMAGE|AUDIO)\|>)+<\|(?:vision|audio)_eos\|>", "<__media__>", rendered)
    options = {"n_predict": 64, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    body = {"prompt": {"prompt_string": text, "multimodal_data": data}, **options}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=60, verify=False).json()
    assert answer["tokens_evaluated"] == len(MODEL.arrays["prompt_1"])
    assert answer["tokens"] == MODEL.arrays["continuation_1"].tolist()


def test_a_damaged_recording_of_llama_cpp_is_named(server: DemoServer) -> None:
    data = [base64.b64encode(file).decode() for file in (MODEL.files[1], wav(tone(RATE), RATE)[:40])]
    body = {"prompt": ["a", {"prompt_string": "<__media__><__media__>", "multimodal_data": data}], "n_predict": 1}
    error = httpx.post(f"{server.url}/completion", json=body, timeout=60, verify=False).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_audio", "prompt[1].multimodal_data[1]")


def test_turns_with_images_and_recordings_in_any_order(client: openai.OpenAI) -> None:
    turns = [*asked(2), {"role": "assistant", "content": "two."}, *asked(3), {"role": "assistant", "content": "one."}, *asked(0)]
    ids = answered(client, turns, 1).prompt_token_ids
    kinds = [token for token in ids if token in (MODEL.image, MODEL.audio)]
    seen, heard = (
        {number: len(MODEL.arrays[f"{name}_{number}"]) for number in (0, 2, 3) if f"{name}_{number}" in MODEL.arrays}
        for name in ("seen", "heard")
    )
    assert kinds == [MODEL.audio] * heard[3] + [MODEL.image] * (seen[2] + seen[0]) + [MODEL.audio] * heard[0]


def test_the_beginning_of_a_recording_is_found_in_the_prefix_cache(client: openai.OpenAI) -> None:
    """A prompt with the same recording and salt finds the recording in the prefix cache. A prompt with another recording of the same
    length, or with another salt, does not."""

    def cached(file: bytes, salt: str) -> int:
        messages = [{"role": "user", "content": [audio_part(file), part(IMAGE, 1), {"type": "text", "text": "What is it?"}]}]
        extra = {**GREEDY["extra_body"], "cache_salt": salt}
        return answered(client, messages, 1, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    first, other = (wav(tone(RATE, hertz, 1.9), RATE) for hertz in (300.0, 301.0))
    assert cached(first, "a") == 0
    assert cached(first, "a") >= 96
    assert cached(other, "a") < 80
    assert cached(first, "b") == 0


def test_a_long_recording_is_heard_whole(client: openai.OpenAI) -> None:
    content = [audio_part(wav(tone(RATE, 400.0, 7.3), RATE))]
    assert answered(client, [{"role": "user", "content": content}], 1).prompt_token_ids.count(MODEL.audio) == 182


def test_descriptions_of_the_model_name_both(server: DemoServer) -> None:
    described = httpx.get(f"{server.url}/v1/models/{MODEL.name}", timeout=60, verify=False).json()
    assert described["listens"] and described["sees"]
    assert httpx.get(f"{server.url}/props", timeout=60, verify=False).json()["modalities"] == {"vision": True, "audio": True}


def test_tokens_of_both_are_counted(server: DemoServer) -> None:
    body = {"messages": asked(1), "add_generation_prompt": True}
    answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=60, verify=False)
    assert answer.json()["tokens"] == MODEL.arrays["prompt_1"].tolist()


WHERE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("given", "code", "param", "text"),
    [
        ([{"type": "video_url", "video_url": {"url": "x"}}], "unsupported_content", f"{WHERE}.type", "no model here understands video"),
        (
            [part(IMAGE, 0), {"type": "input_video"}],
            "unsupported_content",
            "messages[0].content[1].type",
            "no model here understands video",
        ),
        ([part(AUDIO, 0), image_part(b"noise")], "invalid_image", "messages[0].content[1].image_url.url", "expected a file of PNG"),
        ([part(IMAGE, 0), audio_part(b"noise")], "invalid_audio", "messages[0].content[1].input_audio.data", "expected a file of WAV"),
        ([part(IMAGE, 1)] * 4, "invalid_value", "messages", "4 images; expected at most 3 (max_images)"),
        ([part(AUDIO, 0), part(IMAGE, 0)] * 4, "invalid_value", "messages", "expected at most 3"),
        ("an <|IMAGE|> here", "invalid_value", "messages[0].content", "'<|IMAGE|>'"),
        ("an <|AUDIO|> here", "invalid_value", "messages[0].content", "'<|AUDIO|>'"),
    ],
)
def test_errors_name_the_part(server: DemoServer, given: Any, code: str, param: str, text: str) -> None:
    check_refused(server, given, code, param, text)


def test_tokens_without_what_they_stand_for_are_refused(server: DemoServer) -> None:
    for prompt, kind in (("see <|IMAGE|>", "image"), ("hear <|AUDIO|>", "audio"), ([MODEL.image, 5], "image"), ([MODEL.audio, 5], "audio")):
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60, verify=False)
        assert answer.status_code == 400
        assert f"the prompt has 1 {kind} tokens" in answer.json()["error"]["message"]


def test_images_and_audio_are_not_truncated(server: DemoServer) -> None:
    body = {"messages": asked(0), "max_tokens": 1, "truncate_prompt_tokens": 10}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False).json()["error"]
    assert error["param"] == "truncate_prompt_tokens" and "images and audio" in error["message"]
