"""Dynamo's frontend in front of our workers. What clients see is compared with what a server alone answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("dynamo.llm", reason="needs Dynamo (the extra dynamo)")

from tests.conftest import serving_demo
from tests.deploy.dynamo.deployment import Deployment, Worker, running_dynamo, wait_until  # starts Dynamo
from tests.process_states import is_running

pytestmark = pytest.mark.xdist_group("dynamo")

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
LONG: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
NUM_STREAMS = 8
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def deployment(cache_folder: Path) -> Iterator[Deployment]:
    with running_dynamo(cache_folder, "--router-mode", "kv", "--migration-limit", "3") as dynamo:
        for _ in range(2):
            dynamo.add_worker("demo")
        dynamo.wait_for(2)
        yield dynamo


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


async def texts(url: str, num: int, begun: asyncio.Event | None = None) -> list[str]:
    """Stream long answers at once, half of them drawn and half of them greedy. Half of each must not end early, the others not before
    `min_tokens`. Return their texts."""

    async def one(client: httpx.AsyncClient, number: int) -> str:
        length = {"ignore_eos": False, "min_tokens": LONG["max_tokens"] - 100} if number % 4 < 2 else {}
        body = {**LONG, **length, "stream": True, "seed": number, "temperature": number % 2}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    if begun is not None and text:
                        begun.set()
                elif line.startswith("event: error"):
                    raise AssertionError(await answer.aread())
            return text

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None), trust_env=False) as client:
        return await asyncio.gather(*(one(client, number) for number in range(num)))


def test_chat_is_that_of_a_server(deployment: Deployment, client: openai.OpenAI) -> None:
    found = deployment.workers[0].server()
    assert found is not None
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens > 1


def test_requests_go_where_their_prompt_is_cached(deployment: Deployment, client: openai.OpenAI) -> None:
    """From the events of the workers' caches, the router predicts how many prompt tokens are cached; the worker then reports the same
    number."""
    number = itertools.count()
    predicted = found = 0.0

    def counted() -> float:
        page = httpx.get(f"{deployment.url}/metrics", timeout=TIMEOUT_S, trust_env=False).text
        return sum(map(float, re.findall(r"^\w*router_kv_selected_cached_prefix_tokens_total\{[^}]*\} (\S+)$", page, re.MULTILINE)))

    def is_predicted() -> bool:
        nonlocal predicted, found
        before = counted()
        prompt = f"Story {next(number) // 8}. " + "Once upon a time there was a king. " * 20
        usage = client.completions.create(model="demo", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        predicted, found = counted() - before, usage.prompt_tokens_details.cached_tokens or 0
        return predicted > 0

    wait_until(is_predicted, lambda: "the router predicts no cached tokens")
    assert found >= predicted


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content
    for token in logprobs.content:
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert len(token.top_logprobs) == 2


def test_a_grammar_is_obeyed(client: openai.OpenAI) -> None:
    more = {"guided_choice": ["seven", "eleven"]}
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=20, extra_body=more)
    assert answer.choices[0].message.content in ("seven", "eleven")


@pytest.mark.parametrize(
    ("given", "named"),
    [({"n": 2}, "sampling_options.n is 2"), ({"guided_regex": "["}, "the regex cannot be compiled")],  # by the worker, by its server
)
def test_a_refusal_arrives_by_name(client: openai.OpenAI, given: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        client.completions.create(model="demo", prompt="Once", max_tokens=2, extra_body=given)


def test_a_client_that_leaves_stops_its_worker(deployment: Deployment, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="demo", prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert sum(worker.num_running() for worker in deployment.workers) == 1
    stream.close()
    wait_until(lambda: not any(worker.num_running() for worker in deployment.workers), lambda: "the worker computes on")


@pytest.mark.parametrize(
    ("part", "blow", "why"),
    [
        ("worker", signal.SIGKILL, ""),
        ("server", signal.SIGKILL, "the server has ended (killed by SIGKILL)"),
        ("server", signal.SIGSTOP, "timed out"),
    ],
)
def test_a_worker_that_dies_is_not_missed(deployment: Deployment, part: str, blow: signal.Signals, why: str) -> None:
    """Dynamo continues its streams on the other worker, with the bytes of undisturbed ones. A worker ends with its server, also with one
    that hangs."""
    undisturbed = asyncio.run(texts(deployment.url, NUM_STREAMS))
    assert len({*undisturbed}) > NUM_STREAMS // 2

    async def disturbed() -> tuple[list[str], Worker, tuple[int, str]]:
        begun = asyncio.Event()
        running = asyncio.create_task(texts(deployment.url, NUM_STREAMS, begun))
        await begun.wait()
        struck = next(worker for worker in deployment.workers if worker.num_running())
        found = struck.server()
        assert found is not None
        os.kill(struck.process.pid if part == "worker" else found[0], blow)
        assert not running.done(), "the streams had ended before the blow"
        return await running, struck, found

    found, struck, (pid, url) = asyncio.run(disturbed())
    assert found == undisturbed
    assert struck.process.wait(TIMEOUT_S) == (-signal.SIGKILL if part == "worker" else 1)
    if part == "server":
        assert f"error: the server at {url} is lost: {why}" in struck.log.read_text()
        assert not is_running(pid)
    deployment.workers.remove(struck)
    deployment.wait_for(1)
    deployment.add_worker("demo")
    deployment.wait_for(2)


def test_a_worker_that_ends_lets_its_streams_end(deployment: Deployment) -> None:
    """A terminal sends SIGINT to all processes of a group, so the worker's server gets it, too."""
    undisturbed = asyncio.run(texts(deployment.url, NUM_STREAMS))

    async def drained() -> list[str]:
        begun = asyncio.Event()
        running = asyncio.create_task(texts(deployment.url, NUM_STREAMS, begun))
        await begun.wait()
        os.killpg(deployment.workers[0].process.pid, signal.SIGINT)
        return await running

    assert asyncio.run(drained()) == undisturbed
    worker = deployment.workers.pop(0)
    assert worker.process.wait(TIMEOUT_S) == 0, worker.log.read_text()[-3000:]
    assert worker.server() is None


def test_a_server_that_runs_already(deployment: Deployment, client: openai.OpenAI, cache_folder: Path) -> None:
    """The server goes on when its worker ends."""
    events = f"ipc://{deployment.folder}/events"
    with serving_demo(cache_folder, "demo=found", "--kv-events", events, RELAXSERVE_API_KEYS="a-key-of-some-length") as server:
        worker = deployment.add_worker("demo=found", "--url", server.url, "--kv-events", events, RELAXSERVE_KEY="a-key-of-some-length")
        wait_until(lambda: "found" in deployment.models(), lambda: worker.log.read_text()[-3000:])
        answer = client.chat.completions.create(model="found", messages=MESSAGES, temperature=0, max_tokens=40)
        assert "Paris" in (answer.choices[0].message.content or "")
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.process.wait(TIMEOUT_S) == 0, worker.log.read_text()[-3000:]
        deployment.workers.remove(worker)
        assert httpx.get(f"{server.url}/health/ready", timeout=TIMEOUT_S, trust_env=False).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_waits_for_its_server_can_be_ended(deployment: Deployment, number: signal.Signals) -> None:
    with socket.socket() as absent:
        absent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{absent.getsockname()[1]}"
        worker = deployment.add_worker("demo", "--url", url)
        deployment.workers.remove(worker)
        wait_until(lambda: f"waiting for the server at {url}" in worker.log.read_text(), worker.log.read_text)
        os.killpg(worker.process.pid, number)
        assert worker.process.wait(TIMEOUT_S) == 0, worker.log.read_text()[-3000:]


def test_a_worker_whose_server_lacks_the_model_says_so(deployment: Deployment, cache_folder: Path) -> None:
    with serving_demo(cache_folder, "demo=other") as server:
        worker = deployment.add_worker("demo=missing", "--url", server.url)
        deployment.workers.remove(worker)
        assert worker.process.wait(TIMEOUT_S) == 2
    assert f"error: the server at {server.url} has no model 'missing'; it has: other. Name one as MODEL=NAME" in worker.log.read_text()
