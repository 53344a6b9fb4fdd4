"""Small random models of other families than SmolVLM answer what transformers answers (`make_vision.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.conftest import DemoServer, serving_demo
from tests.e2e.test_images import answered, asked, kill_worker
from tests.golden.vision import SUBJECTS
from tests.golden.vision_subject import CONVERSATIONS, Subject

pytestmark = pytest.mark.xdist_group("bits of images")  # the tests of this group load the same programs

OTHER_FAMILIES = (
    "gemma3",
    "llava",
    "llava_siglip",
    "internvl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "mistral3",
    "lfm2_vl",
    "gemma4",
    "gemma4_both_ways",
    "glm4v",
    "glm4v_moe",
    "llama4",
)
# Families whose requests differ most when a worker is killed: tokens of an image see each other, tokens have three coordinates, layers have
# states. In `make test`, only their workers are killed.
KILLED = ("gemma3", "qwen2_5_vl", "lfm2_vl")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[DemoServer]:
    """Yield one server for all families, of which it serves one at a time. It begins with the first."""
    first, *_ = [SUBJECTS[name].folder for name in OTHER_FAMILIES]  # with the weights of all, which are drawn on first use
    with serving_demo(cache_folder, str(first), "--quantize", "f32", "--max-batch", "32", "--model-root", str(first.parent)) as server:
        yield server


@pytest.fixture
def subject(request: pytest.FixtureRequest, server: DemoServer) -> Iterator[Subject]:
    """Yield a family while the server serves it."""
    models, name = f"{server.url}/admin/models", request.param
    if name not in {model["id"] for model in httpx.get(models, timeout=60, verify=False).json()["data"]}:
        body = {"source": name, "quantize": "f32", "max_batch": 32, "wait": True}
        loaded = httpx.post(models, json=body, timeout=300, verify=False)
        assert loaded.status_code == 200, loaded.text
    yield SUBJECTS[name]
    httpx.delete(f"{models}/{name}", timeout=60, verify=False).raise_for_status()


@pytest.mark.parametrize(
    ("subject", "kills"),
    [
        *((name, name in KILLED) for name in OTHER_FAMILIES),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in OTHER_FAMILIES if name not in KILLED),
    ],
    indirect=["subject"],
)
def test_other_families_answer_what_transformers_answers(server: DemoServer, subject: Subject, kills: bool) -> None:
    """Each of them sees two images in a conversation, several conversations at a time. Some do the same while their worker is killed."""
    name, transport = subject.folder.name, openai.DefaultHttpxClient(verify=False)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=transport) as client,
        ThreadPoolExecutor(len(CONVERSATIONS)) as pool,
    ):
        for kill in (False, True) if kills else (False,):
            asking = [pool.submit(answered, client, asked(number, subject), model=name) for number in range(len(CONVERSATIONS))]
            if kill:
                kill_worker(server)
            for number, answer in enumerate(future.result() for future in asking):
                assert answer.prompt_token_ids == subject.arrays[f"prompt_{number}"].tolist()
                assert answer.choices[0].token_ids == subject.arrays[f"continuation_{number}"].tolist()
    body = {"model": name, "messages": [{"role": "user", "content": f"a {subject.image_text} here"}], "max_tokens": 1}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False)
    assert (refused.status_code, subject.image_text in refused.json()["error"]["message"]) == (400, name not in ("gemma3", "llama4"))
