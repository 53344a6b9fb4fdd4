"""The front with real worker processes. Killing a worker loses no answer, and unloading a model frees all memory of its worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from server.engine.request import TURN
from server.messages import Load
from server.models.state import ModelSpec
from server.workers.ledger import Embedded, Generation, Job
from server.workers.supervisor import Supervisor
from tests.doubles.process import NullConfig, null_source

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = b"All happy families are alike. "
SOURCE = null_source(NullConfig(script=tuple(TEXT), step_s=0.005))
EVERYTHING = null_source(NullConfig(vocab_size=256, embedding_size=8, step_s=0.005))  # a model that generates random bytes
KEY = "alice-0123456789"
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
    return Supervisor([sys.executable, "-m", "tests.doubles.process"], load, progress=progress)


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


def test_streams_that_nobody_reads_do_not_hold_up_the_next_request_of_their_key(serve):
    """With 40 unread streams of one key in 8 slots, the key's next request is answered after few steps of the worker, whatever the streams
    still generate. A stream that was set aside continues byte for byte."""
    config = NullConfig(vocab_size=256, max_context=4096, max_seqs=8, num_pages=20_000, step_s=0.002)
    server = serve(make_worker=partial(make_worker, source=null_source(config)), api_keys=(KEY,))
    worker = server.registry.models()[0].loaded.worker

    def ask(prompt: list[int], **fields) -> socket.socket:
        body = json.dumps({"prompt": prompt, "seed": 5, "temperature": 1, **fields}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {KEY}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        )
        connection = server.connect()
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        return connection

    def read(connection: socket.socket) -> bytes:
        with connection:
            return server.read_all(connection)

    def num_steps() -> int:
        """Return the number of steps that the worker has run, at most STATS_INTERVAL_S ago."""
        stats = worker.stats
        while worker.stats is stats:
            time.sleep(0.001)
        return worker.stats.num_steps

    def texts_of(answer: bytes) -> list[str]:
        """Return the texts of a stream's events, without their ids and times."""
        lines = [line.removeprefix(b"data: ") for line in answer.splitlines()]
        return [json.loads(line)["choices"][0]["text"] for line in lines if line.startswith(b"{")]

    unread = [ask([1, index], stream=True, max_tokens=4000) for index in range(39)]
    read_later = ask([2], stream=True, max_tokens=600)
    while worker.stats is None or worker.stats.num_running < 8 or worker.stats.num_waiting < 32:
        time.sleep(0.001)
    before = num_steps()
    assert read(ask([3], max_tokens=4)).startswith(b"HTTP/1.1 200")
    assert num_steps() - before <= (40 // 4 + 2) * TURN, "half of the slots go to requests that wait for their first turn"
    assert worker.stats.num_preemptions >= 8
    for stream in unread:
        stream.close()
    found = texts_of(read(read_later))
    alone = texts_of(read(ask([2], stream=True, max_tokens=600)))
    assert "".join(found) == "".join(alone) and len(found) > 100


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
