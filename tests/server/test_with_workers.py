"""The front with real worker processes. Killing a worker loses no answer, and unloading a model frees all memory of its worker."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from deploy.test_doubles.process import NullConfig, null_source
from server.messages import Load
from server.models.state import ModelSpec
from server.workers.ledger import Embedded, Generation, Job
from server.workers.supervisor import Supervisor

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = b"All happy families are alike. "
SOURCE = null_source(NullConfig(script=tuple(TEXT), step_s=0.005))
EVERYTHING = null_source(NullConfig(vocab_size=256, embedding_size=8, step_s=0.005))  # a model that generates random bytes
NUM_NEW = 150
MOST_AT_ONCE = 64  # the worker gets at least this many texts of one large request at the same time
DOCUMENTS = ["fox " * 50 + str(index) for index in range(128)]
STREAMS = {  # path -> (fields of the request, function that returns the text of one event)
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": NUM_NEW}, lambda event: event["choices"][0]["delta"].get("content")),
    "/v1/completions": ({"prompt": [*b"hi"], "max_tokens": NUM_NEW}, lambda event: event["choices"][0]["text"]),
    "/v1/responses": (
        {"input": "hi", "max_output_tokens": NUM_NEW},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": NUM_NEW}, lambda event: event.get("delta", {}).get("text")),
    "/api/chat": ({"messages": MESSAGES, "options": {"seed": 5, "num_predict": NUM_NEW}}, lambda event: event["message"]["content"]),
    "/api/generate": ({"prompt": "hi", "options": {"seed": 5, "num_predict": NUM_NEW}}, lambda event: event["response"]),
    "/completion": ({"prompt": [*b"hi"], "n_predict": NUM_NEW}, lambda event: event["content"]),
}


def make_worker(spec: ModelSpec, progress, source: str = SOURCE) -> Supervisor:
    load = Load(spec.name, source, max_batch=spec.max_batch, memory_limit_bytes=spec.memory_limit_bytes)
    return Supervisor([sys.executable, "-m", "deploy.test_doubles.process"], load, progress=progress)


@pytest.fixture
def processes(serve):
    return lambda **options: serve(make_worker=make_worker, **options)


def test_streams_survive_the_death_of_their_worker(processes):
    server = processes()
    client = server.openai()
    supervisor = server.registry.models()[0].loaded.worker
    body = {"model": "null", "max_tokens": 200, "temperature": 0, "stream": True}

    def ask(index: int, *, kills: bool) -> str:
        text = ""
        for chunk in client.chat.completions.create(messages=[{"role": "user", "content": f"hi {index}"}], **body):
            text += chunk.choices[0].delta.content or ""
            if kills and len(text) == 20:
                os.kill(supervisor.pid, signal.SIGKILL)
        return text

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda index: ask(index, kills=index == 0), range(4)))
    assert texts == [(TEXT * 10)[:200].decode()] * 4
    assert supervisor.restarts == 1 and supervisor.resubmitted >= 1
    assert "relaxserve:worker_restarts_total" in server.http().get("/metrics").text
    assert server.http().get("/admin/models").json()["data"][0]["restarts"] == 1


def test_no_api_loses_anything_when_the_worker_is_killed(serve):
    """The worker is killed while it computes streams of every API and unstreamed answers. Each answer equals that of an undisturbed run,
    byte for byte."""
    server = serve(make_worker=partial(make_worker, source=EVERYTHING))
    supervisor, client = server.registry.models()[0].loaded.worker, server.http()

    def streamed(path: str) -> str:
        fields, text_of = STREAMS[path]
        with client.stream("POST", path, json={"model": "null", "seed": 5, "temperature": 1, "stream": True, **fields}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        text = "".join(text_of(event) or "" for event in events)
        assert response.status_code == 200 and len(events) > 1 and len(text) > NUM_NEW / 2
        return text

    def ranked() -> list[tuple[int, float]]:
        answer = client.post("/v1/rerank", json={"query": "fox", "documents": DOCUMENTS, "add_special_tokens": False}).json()
        return [(result["index"], result["relevance_score"]) for result in answer["results"]]

    def stored(**fields: object) -> list[object]:
        """Create a response, poll it until it is complete, check that reading it again gives the same response, and return its output."""
        answer = client.post("/v1/responses", json={"input": "hi", "seed": 5, "max_output_tokens": NUM_NEW, **fields}).json()
        while answer["status"] in ("queued", "in_progress"):
            time.sleep(0.01)
            answer = client.get(f"/v1/responses/{answer['id']}").json()
        assert client.get(f"/v1/responses/{answer['id']}").json() == answer
        return [answer["status"], answer["output"][0]["content"], answer["usage"]["output_tokens"]]

    def ask_everything() -> dict[str, Future[Any]]:
        streams = {path: pool.submit(streamed, path) for path in STREAMS}
        return {**streams, "stored": pool.submit(stored), "background": pool.submit(stored, background=True), "rerank": pool.submit(ranked)}

    def jobs(kind: type[Job]) -> dict[str, Job]:
        return {request_id: job for request_id, job in list(supervisor._jobs.items()) if isinstance(job, kind)}

    def until(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        end_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end_s
            meanwhile()
            time.sleep(0.001)

    def run_briefly() -> None:
        """Let the stopped worker run for a few milliseconds. On a busy machine it would otherwise end its work before the front
        has read what it sent first."""
        os.kill(supervisor.pid, signal.SIGCONT)
        time.sleep(0.002)
        os.kill(supervisor.pid, signal.SIGSTOP)

    num_answers = len(STREAMS) + 2
    with ThreadPoolExecutor(num_answers + 1) as pool:
        os.kill(supervisor.pid, signal.SIGSTOP)  # stop the worker, so that all requests are in flight when it is killed
        killed = ask_everything()
        until(lambda: len(jobs(Generation)) == num_answers and len(jobs(Embedded)) >= MOST_AT_ONCE)
        texts = jobs(Embedded).keys()
        until(lambda: all(job.emitted[0] for job in jobs(Generation).values()) and texts - jobs(Embedded).keys(), meanwhile=run_briefly)
        assert len(jobs(Generation)) == num_answers and jobs(Embedded)
        os.kill(supervisor.pid, signal.SIGCONT)
        os.kill(supervisor.pid, signal.SIGKILL)
        found = {name: asked.result() for name, asked in killed.items()}
        assert supervisor.restarts == 1 and supervisor.resubmitted > num_answers
        assert found == {name: asked.result() for name, asked in ask_everything().items()}


def test_a_stop_string_ends_one_choice_in_the_worker(processes):
    server = processes()
    answer = server.chat(n=3, max_tokens=100, temperature=0, stop=["alike"]).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["All happy families are "] * 3
    assert answer["usage"]["completion_tokens"] == 3 * len(b"All happy families are alike")


@pytest.mark.parametrize("num_loads", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_loads_give_everything_back(processes, tmp_path, num_loads):
    (tmp_path / "models" / "m").mkdir(parents=True)
    server = processes(initial=(), memory_limit_bytes=1 << 30)
    client = server.http()
    baseline = client.get("/admin/memory").json()
    after = []
    for _ in range(num_loads):
        assert client.post("/admin/models", json={"source": "m", "wait": True}).status_code == 200
        assert server.chat(model="m", max_tokens=5).status_code == 200
        gone = client.delete("/admin/models/m", params={"drain_s": 5}).json()
        assert gone["resident_after_bytes"] < gone["resident_before_bytes"] - (8 << 20), "the worker's process is still there"
        after.append(gone["resident_after_bytes"])
    memory = client.get("/admin/memory").json()
    assert memory["used_bytes"] == 0 and memory["free_bytes"] == baseline["free_bytes"]
    assert max(after[num_loads // 2 :]) - after[num_loads // 4] < 8 << 20  # later loads use no more memory; the first loads fill caches


def test_what_the_worker_refuses_is_the_client_s_answer(processes):
    response = processes().chat(guided_regex="a+")
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_schema"
