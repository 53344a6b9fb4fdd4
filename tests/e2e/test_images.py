"""End-to-end tests of images, with the official clients and a real server that serves a small random SmolVLM: its texts mean nothing, but
they are those of transformers (`make_vision.py`), and the same however they are asked for."""

from __future__ import annotations

import base64
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.conftest import DemoServer, serving_demo
from tests.doubles.file_server import serving_files
from tests.golden.vision import SUBJECTS
from tests.golden.vision_subject import CONVERSATIONS, Subject
from tests.server.images.files import data_url, encoded, image

MODEL = SUBJECTS["idefics3"]
ARRAYS, FILES, IMAGE, ROWS, TOKENS = MODEL.arrays, MODEL.files, MODEL.image, MODEL.rows, MODEL.tokens
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}}
pytestmark = pytest.mark.xdist_group("vision server")


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """Serve the files of images. Yield the host and the port."""
    with serving_files(FILES) as address:
        yield address


@pytest.fixture(scope="module")
def server(cache_folder: Path, files: str) -> Iterator[DemoServer]:
    options = "--quantize", "f32", "--max-images", "4", "--max-image-pixels", "1000000", "--image-host", f"private+{files}"
    with serving_demo(cache_folder, str(MODEL.folder), *options) as server:
        yield server


def part(file: bytes, **options: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file), **options}}


def asked(number: int, subject: Subject = MODEL) -> list[Any]:
    """Return the messages of a conversation of the golden."""
    text, images = CONVERSATIONS[number]
    return [{"role": "user", "content": [*(part(subject.files[image]) for image in images), {"type": "text", "text": text}]}]


def answered(client: openai.OpenAI, messages: list[Any], num_tokens: int = 64, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "idefics3", "messages": messages, "max_tokens": num_tokens, **GREEDY, **options})


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_answers_are_those_of_transformers(client: openai.OpenAI, number: int) -> None:
    answer = answered(client, asked(number))
    assert answer.prompt_token_ids == ARRAYS[f"prompt_{number}"].tolist()
    assert answer.choices[0].token_ids == ARRAYS[f"continuation_{number}"].tolist()
    assert answer.usage.prompt_tokens == len(ARRAYS[f"prompt_{number}"])


def test_an_image_of_an_allowed_host_is_fetched(client: openai.OpenAI, files: str) -> None:
    given = answered(client, asked(0)).choices[0].token_ids
    text, images = CONVERSATIONS[0]
    urls: list[Any] = [{"type": "image_url", "image_url": {"url": f"http://{files}/{number}"}} for number in images]
    assert answered(client, [{"role": "user", "content": [*urls, {"type": "text", "text": text}]}]).choices[0].token_ids == given


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    whole = answered(client, asked(0)).choices[0].message.content
    stream = answered(client, asked(0), stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == whole


def test_the_same_image_is_found_in_the_prefix_cache_and_another_is_not(server: DemoServer, client: openai.OpenAI) -> None:
    def cached(file: bytes, salt: str) -> int:
        messages = [{"role": "user", "content": [part(file), {"type": "text", "text": "What is it?"}]}]
        extra = {**GREEDY["extra_body"], "cache_salt": salt}
        return answered(client, messages, 1, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    first, other = encoded(image(120, 90, seed=1)), encoded(image(120, 90, seed=2))
    assert cached(first, "a") == 0
    assert cached(first, "a") >= 96
    assert cached(other, "a") < 16
    assert cached(first, "b") == 0


def test_detail_low_shows_only_the_whole(client: openai.OpenAI) -> None:
    def num_image_tokens(detail: str) -> int:
        messages = [{"role": "user", "content": [part(FILES[0], detail=detail), {"type": "text", "text": "?"}]}]
        return answered(client, messages, 1).prompt_token_ids.count(IMAGE)

    assert num_image_tokens("low") == ROWS
    assert num_image_tokens("high") == num_image_tokens("auto") == ROWS * len(ARRAYS["crops_0"])


def test_images_anywhere_in_a_conversation(client: openai.OpenAI) -> None:
    turns = [*asked(1), {"role": "assistant", "content": "two."}, *asked(2)]
    ids = answered(client, turns, 1).prompt_token_ids
    assert ids.count(IMAGE) == ROWS * (len(ARRAYS["crops_1"]) + len(ARRAYS["crops_2"]))
    between = [{"role": "user", "content": [{"type": "text", "text": "a"}, part(FILES[1]), {"type": "text", "text": "b"}]}]
    text = "".join(TOKENS[token] for token in answered(client, between, 1).prompt_token_ids)
    assert text.index("User:Ġa<fake") < text.index("<image>") < text.index("image>b<end")


def test_the_other_apis_see_the_same(server: DemoServer, client: openai.OpenAI) -> None:
    text, images = CONVERSATIONS[1]
    expected = answered(client, asked(1), 8, extra_body={"ignore_eos": True}).choices[0].message.content
    data = [base64.b64encode(FILES[number]).decode() for number in images]

    parts: list[Any] = [{"type": "input_image", "image_url": f"data:image/png;base64,{one}", "detail": "auto"} for one in data]
    given: Any = [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]
    options: dict[str, Any] = {"model": "idefics3", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    assert client.responses.create(input=given, **options).output_text == expected

    blocks: list[Any] = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": one}} for one in data]
    with anthropic.Anthropic(
        base_url=server.url, api_key="k", max_retries=0, http_client=anthropic.DefaultHttpxClient(verify=False)
    ) as claude:
        message = claude.messages.create(
            model="idefics3",
            max_tokens=8,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}],
        )
    assert expected.startswith("".join(block.text for block in message.content if block.type == "text"))

    with closing(ollama.Client(server.url, verify=False)) as llama:
        told = llama.chat("idefics3", [{"role": "user", "content": text, "images": data}], options={"temperature": 0, "num_predict": 8})
    assert expected.startswith(told.message.content or "")
    assert told.prompt_eval_count == len(ARRAYS["prompt_1"])
    urls = [{"role": "user", "content": text, "images": [f"data:image/png;base64,{one}" for one in data]}]
    body = {"model": "idefics3", "messages": urls, "stream": False, "options": {"temperature": 0, "num_predict": 8}}
    answer = httpx.post(f"{server.url}/api/chat", json=body, timeout=60, verify=False).json()
    assert answer["message"]["content"] == told.message.content


def test_several_images_in_results_of_tools(server: DemoServer, client: openai.OpenAI) -> None:
    """All APIs write them to the same prompt, in order."""
    data = [base64.b64encode(FILES[number]).decode() for number in (1, 2)]
    urls = [f"data:image/png;base64,{one}" for one in data]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat: list[Any] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]},
    ]
    prompt = answered(client, chat, 1).prompt_token_ids
    assert prompt.count(IMAGE) == ROWS * (len(ARRAYS["crops_1"]) + len(ARRAYS["crops_2"]))
    swapped = [*chat[:2], {**chat[2], "content": chat[2]["content"][::-1]}]
    assert answered(client, chat, 8).choices[0].token_ids != answered(client, swapped, 8).choices[0].token_ids

    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": one}} for one in data]
    claude = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": blocks}]},
    ]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": url} for url in urls]},
    ]
    llama = [chat[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}]
    llama += [{"role": "tool", "tool_name": "look", "content": "", "images": data}]

    def of_claude(answer: Any) -> int:
        return answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]

    asked: dict[str, tuple[dict[str, Any], Callable[[Any], int]]] = {
        "/v1/messages": ({"messages": claude, "max_tokens": 1}, of_claude),
        "/v1/responses": ({"input": items, "max_output_tokens": 1}, lambda answer: answer["usage"]["input_tokens"]),
        "/api/chat": ({"messages": llama, "stream": False, "options": {"num_predict": 1}}, lambda answer: answer["prompt_eval_count"]),
    }
    counts: dict[str, int] = {}
    for path, (body, count) in asked.items():
        answer = httpx.post(f"{server.url}{path}", json={"model": "idefics3", "temperature": 0, **body}, timeout=60, verify=False)
        assert answer.status_code == 200, answer.text
        counts[path] = count(answer.json())
    assert set(counts.values()) == {len(prompt)}


def llama_prompt(server: DemoServer, number: int) -> dict[str, Any]:
    """Return a conversation of the golden as a prompt of llama.cpp's completions."""
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json={"messages": asked(number)}, timeout=60, verify=False)
    marker = httpx.get(f"{server.url}/props", timeout=60, verify=False).json()["media_marker"]
    around = "<fake_token_around_image>"
    text = re.sub(rf"(?s){around}(?:<row|<global)(?:(?!<global-img>).)*<global-img>(?:<image>)+{around}", marker, rendered.json()["prompt"])
    return {"prompt_string": text, "multimodal_data": [base64.b64encode(FILES[image]).decode() for image in CONVERSATIONS[number][1]]}


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_prompts_of_llama_cpp_have_images(server: DemoServer, number: int) -> None:
    options = {"n_predict": 64, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    body = {"prompt": llama_prompt(server, number), **options}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=60, verify=False).json()
    assert answer["tokens"] == ARRAYS[f"continuation_{number}"].tolist()
    assert answer["tokens_evaluated"] == len(ARRAYS[f"prompt_{number}"])


def test_several_prompts_of_llama_cpp_with_and_without_images(server: DemoServer) -> None:
    prompts = ["a plain text", llama_prompt(server, 1), [5, 6, 7], llama_prompt(server, 0), {"prompt_string": "a plain text"}]
    options = {"n_predict": 4, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    together = httpx.post(f"{server.url}/completion", json={"prompt": prompts, **options}, timeout=60, verify=False).json()
    alone = [httpx.post(f"{server.url}/completion", json={"prompt": one, **options}, timeout=60, verify=False).json() for one in prompts]
    assert [one["tokens"] for one in together] == [one["tokens"] for one in alone]
    assert together[0]["tokens"] == together[4]["tokens"] and together[3]["tokens"] == ARRAYS["continuation_0"].tolist()[:4]


@pytest.mark.parametrize(
    ("prompt", "code", "param", "text"),
    [
        ({"prompt_string": "<__media__>"}, "invalid_value", "prompt.multimodal_data", "1 of the marker <__media__> and 0 files"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "invalid_value", "prompt.multimodal_data", "0 of the marker"),
        ({"prompt_string": "<__media__>", "multimodal_data": ["%"]}, "invalid_image", "prompt.multimodal_data[0]", "not base64"),
        (
            {"prompt_string": "<__media__>", "multimodal_data": ["bm9pc2U="]},
            "invalid_image",
            "prompt.multimodal_data[0]",
            "expected a file",
        ),
        (
            {"prompt_string": "<__media__>", "multimodal_data": ["UklGRgAAAABXQVZFZm10IA=="]},
            "unsupported_content",
            "prompt.multimodal_data[0]",
            "is audio",
        ),
        ({"prompt_string": "<image> <__media__>", "multimodal_data": ["x"]}, "invalid_value", "prompt.prompt_string", "'<image>'"),
        ({"prompt_string": 5}, "invalid_value", "prompt.prompt_string", "prompt_string"),
        ({"text": "a"}, "missing_field", "prompt.prompt_string", "prompt_string"),
        (["a", {"prompt_string": "<__media__>", "multimodal_data": []}], "invalid_value", "prompt[1].multimodal_data", "0 files"),
    ],
)
def test_errors_name_the_part_of_a_prompt(server: DemoServer, prompt: Any, code: str, param: str, text: str) -> None:
    answer = httpx.post(f"{server.url}/completion", json={"prompt": prompt, "n_predict": 1}, timeout=60, verify=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert text in error["message"]
    assert error["param"] == param


def test_descriptions_of_the_model_name_vision(server: DemoServer) -> None:
    shown = httpx.post(f"{server.url}/api/show", json={"model": "idefics3"}, timeout=60, verify=False).json()
    assert "vision" in shown["capabilities"]
    assert httpx.get(f"{server.url}/v1/models/idefics3", timeout=60, verify=False).json()["sees"]
    assert httpx.get(f"{server.url}/props", timeout=60, verify=False).json()["modalities"]["vision"]


def test_tokens_of_images_are_counted(server: DemoServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILES[0]).decode()}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]}]}
    answer = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, timeout=60, verify=False)
    assert answer.json() == {"input_tokens": len(ARRAYS["prompt_0"])}
    item = {"type": "input_image", "image_url": data_url(FILES[0])}
    given = {"input": [{"role": "user", "content": [item, {"type": "input_text", "text": "What is it?"}]}]}
    answer = httpx.post(f"{server.url}/v1/responses/input_tokens", json=given, timeout=60, verify=False)
    assert answer.json()["input_tokens"] == len(ARRAYS["prompt_0"])


def test_the_prompt_of_a_conversation_with_images_is_tokenised(server: DemoServer) -> None:
    body = {"messages": asked(1), "add_generation_prompt": True}
    answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=60, verify=False)
    assert answer.json()["tokens"] == ARRAYS["prompt_1"].tolist()


def test_many_at_once_and_a_killed_worker(server: DemoServer, client: openai.OpenAI) -> None:
    questions = [[{"role": "user", "content": [part(encoded(image(100 + 9 * seed, 80, seed)))]}] for seed in range(6)]
    alone = [answered(client, question).choices[0].token_ids for question in questions]
    with ThreadPoolExecutor(6) as pool:
        together = [pool.submit(answered, client, question) for question in questions]
        kill_worker(server)
        assert [future.result().choices[0].token_ids for future in together] == alone


def check_refused(server: DemoServer, given: Any, code: str, param: str, text: str) -> None:
    """Send a message with this content, and check the code, the parameter and a part of the text of the error."""
    body = {"messages": [{"role": "user", "content": given}], "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert text in error["message"]
    assert error["param"] == param


def kill_worker(server: DemoServer) -> None:
    for child in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if "deploy.worker" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)


HUGE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x02\0\0\0\xe8\xb0\xbe\xb5"


@pytest.mark.parametrize(
    ("given", "code", "param", "text"),
    [
        ([part(b"noise")], "invalid_image", "messages[0].content[0].image_url.url", "expected a file of PNG, JPEG, GIF, WEBP"),
        ([part(FILES[0][:200])], "invalid_image", "messages[0].content[0].image_url.url", "damaged"),
        ([part(HUGE)], "invalid_image", "messages[0].content[0].image_url.url", "image_url.url cannot be decoded"),
        ([part(encoded(image(1001, 1000)))], "invalid_image", "messages[0].content[0].image_url.url", "max_image_pixels"),
        (
            [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}],
            "invalid_image",
            "messages[0].content[0].image_url.url",
            "fetches",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "file:///x.png"}}],
            "invalid_image",
            "messages[0].content[0].image_url.url",
            "expected a data: URL",
        ),
        ([{"type": "image_url"}], "invalid_value", "messages[0].content[0].image_url", "absent"),
        ([{"type": "input_image", "image_url": "x"}], "unsupported_content", "messages[0].content[0].type", "of type image_url in chat"),
        ([{"type": "image", "image": "x"}], "unsupported_content", "messages[0].content[0].type", "of type image_url in chat"),
        ([part(FILES[1])] * 5, "invalid_value", "messages", "5 images; expected at most 4 (max_images)"),
        ([part(FILES[0], detail="blurred")], "invalid_value", "messages[0].content[0].image_url.detail", "detail"),
        ([{"type": "image_url", "image_url": 5}], "invalid_value", "messages[0].content[0].image_url", "5"),
        ([{"type": "image_url", "image_url": {"uri": "x"}}], "missing_field", "messages[0].content[0].image_url.url", "url"),
        ([{"type": "text", "text": "an <image> here"}], "invalid_value", "messages[0].content[0].text", "'<image>'"),
        ("an <image> here", "invalid_value", "messages[0].content", "'<image>'"),
        (
            [{"type": "input_audio", "input_audio": {"data": ""}}],
            "unsupported_content",
            "messages[0].content[0].type",
            "reads text and images",
        ),
    ],
)
def test_errors_name_the_part(server: DemoServer, given: Any, code: str, param: str, text: str) -> None:
    check_refused(server, given, code, param, text)


def test_an_image_token_without_an_image_is_refused(server: DemoServer) -> None:
    for prompt in ("see <image>", [IMAGE, 5]):
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60, verify=False)
        assert answer.status_code == 400
        assert "the prompt has 1 image tokens" in answer.json()["error"]["message"]


def test_images_are_not_truncated(server: DemoServer) -> None:
    body = {"messages": asked(0), "max_tokens": 1, "truncate_prompt_tokens": 10}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


def test_images_that_exceed_the_context_are_refused(server: DemoServer) -> None:
    wide = part(encoded(image(300, 300)))
    body = {"messages": [{"role": "user", "content": [wide] * 4}], "max_tokens": 400}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False)
    assert answer.status_code in (200, 400)
    prompt = [wide] * 4 + [{"type": "text", "text": "x " * 200}]
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": prompt}]}, timeout=60, verify=False
    )
    assert answer.json()["error"]["code"] == "context_length_exceeded"
