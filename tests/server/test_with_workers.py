"""The front with worker processes behind it: nothing is lost when one is killed, and nothing stays when one is unloaded."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from deploy.test_doubles.process import NullConfig, null_source
from server.messages import Load
from server.models.state import ModelSpec
from server.workers.supervisor import Supervisor

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = b"All happy families are alike. "
SOURCE = null_source(NullConfig(script=tuple(TEXT), step_s=0.005))


def make_worker(spec: ModelSpec, progress) -> Supervisor:
    load = Load(spec.name, SOURCE, max_batch=spec.max_batch, memory_limit_bytes=spec.memory_limit_bytes)
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


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_answers_of_every_api_survive_the_death_of_their_worker(processes, api):
    """A stream that the worker's death interrupts goes on, and a response that is kept is whole."""
    server = processes()
    supervisor = server.registry.models()[0].loaded.worker
    body = {"temperature": 0, "stream": True}
    body |= {"input": "hi", "max_output_tokens": 200} if api == "responses" else {"messages": MESSAGES, "max_tokens": 200}
    text, last = "", {}
    with server.http().stream("POST", f"/v1/{api}", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            last = json.loads(line.removeprefix("data: "))
            delta = last.get("delta", "")
            text += delta if isinstance(delta, str) else delta.get("text", "")
            if len(text) == 20 and supervisor.restarts == 0:
                os.kill(supervisor.pid, signal.SIGKILL)
    assert text == (TEXT * 10)[:200].decode() and supervisor.restarts == 1
    if api == "responses":
        kept = server.http().get(f"/v1/responses/{last['response']['id']}").json()
        assert kept["output"][0]["content"][0]["text"] == text and kept["status"] == "incomplete"


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
    assert max(after[num_loads // 2 :]) - after[num_loads // 4] < 8 << 20  # the first rounds fill caches


def test_what_the_worker_refuses_is_the_client_s_answer(processes):
    response = processes().chat(guided_regex="a+")
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_schema"
