"""End-to-end tests of embeddings of texts and images, with the official client and real servers of small random models: their vectors are
those of transformers (`make_joint.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from tests.conftest import DemoServer, serving_demo
from tests.e2e.test_images import kill_worker
from tests.golden.joint import SUBJECTS, TEXTS, Joint
from tests.golden.media import SIZES
from tests.server.images.files import data_url

pytestmark = pytest.mark.xdist_group("vision server")


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Joint:
    return SUBJECTS[request.param]


@pytest.fixture(scope="module")
def server(cache_folder: Path, subject: Joint) -> Iterator[DemoServer]:
    with serving_demo(cache_folder, str(subject.folder), "--quantize", "f32") as server:
        yield server


def inputs(subject: Joint) -> list[Any]:
    return [*({"image": data_url(file)} for file in subject.files), *({"text": text} for text in TEXTS)]


def embedded(client: openai.OpenAI, subject: Joint, given: list[Any], **extra: Any) -> NDArray[np.float32]:
    answer = client.embeddings.create(model=subject.name, input=given, encoding_format="float", extra_body=extra)
    return np.array([entry.embedding for entry in answer.data], np.float32)


def expected(subject: Joint) -> NDArray[np.float32]:
    images, texts = (
        [subject.arrays[f"{kind}_{n}"] for n in range(count)] for kind, count in (("vector", len(SIZES)), ("text", len(TEXTS)))
    )
    return np.stack([*images, *texts])


def test_vectors_are_those_of_transformers(client: openai.OpenAI, subject: Joint) -> None:
    found = embedded(client, subject, inputs(subject), normalize=False)
    assert np.abs(found - expected(subject)).max() < 2e-4
    units = embedded(client, subject, inputs(subject))
    wanted = expected(subject) / np.linalg.norm(expected(subject), axis=1, keepdims=True)
    assert np.abs(units - wanted).max() < 1e-4


def test_cosines_are_those_of_transformers(client: openai.OpenAI, subject: Joint) -> None:
    units = embedded(client, subject, inputs(subject))
    wanted = expected(subject) / np.linalg.norm(expected(subject), axis=1, keepdims=True)
    assert np.abs(units @ units.T - wanted @ wanted.T).max() < 1e-4


def test_the_same_bits_alone_beside_others_and_after_a_kill(server: DemoServer, client: openai.OpenAI, subject: Joint) -> None:
    alone = np.concatenate([embedded(client, subject, [one]) for one in inputs(subject)])
    np.testing.assert_array_equal(embedded(client, subject, inputs(subject)), alone)
    with ThreadPoolExecutor(len(alone)) as pool:
        together = [pool.submit(embedded, client, subject, [one]) for one in inputs(subject)]
        kill_worker(server)
        np.testing.assert_array_equal(np.concatenate([future.result() for future in together]), alone)


def test_a_conversation_with_an_image_has_its_vector(server: DemoServer, subject: Joint) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(subject.files[0])}}
    body = {"messages": [{"role": "user", "content": [part]}], "normalize": False}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60, verify=False).json()
    assert np.abs(np.array(answer["data"][0]["embedding"]) - subject.arrays["vector_0"]).max() < 2e-4
    height, width, _ = subject.arrays["crop_0"].shape
    patch = subject.config["vision_config"]["patch_size"]
    assert answer["usage"]["prompt_tokens"] == (height // patch) * (width // patch) + (subject.name == "clip")


TALE = "It was a dark and stormy night; the rain fell in torrents, except at times."


def test_the_vector_of_a_truncated_text_is_that_of_its_part(server: DemoServer, client: openai.OpenAI, subject: Joint) -> None:
    """The special tokens before and after a text are kept. The vector is the state of the last one."""
    around = sum(map(len, subject.around))
    for keep in (subject.length, 10):
        room = keep - around
        for side, part in (("right", TALE[:room]), ("left", TALE[-room:])):
            found = embedded(client, subject, [TALE], truncate_prompt_tokens=keep, truncation_side=side)
            np.testing.assert_array_equal(found, embedded(client, subject, [part]))
    by_ollama = httpx.post(f"{server.url}/api/embed", json={"model": subject.name, "input": TALE}, timeout=60, verify=False).json()
    expected = embedded(client, subject, [TALE[: subject.length - around]])
    assert np.abs(np.array(by_ollama["embeddings"]) - expected).max() < 1e-6


def test_the_model_says_what_it_embeds(server: DemoServer, subject: Joint) -> None:
    shown = httpx.get(f"{server.url}/v1/models/{subject.name}", timeout=60, verify=False).json()
    assert shown["embedding_size"] == 40 and "one space" in shown["embedding_note"]
    refused = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}, timeout=60, verify=False
    )
    assert refused.status_code == 400
