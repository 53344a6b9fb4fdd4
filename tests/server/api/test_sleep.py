"""Putting a model to sleep and waking it, by vLLM's endpoints."""

from __future__ import annotations

import json

import pytest

from server.models.state import ModelSpec

TWO = (ModelSpec("a", "a"), ModelSpec("b", "b"))


def state_of(client, name="null"):
    return client.get(f"/admin/models/{name}").json()["state"]


def test_a_model_that_sleeps_holds_no_memory_and_a_request_wakes_it(serve):
    server = serve()
    client = server.http()
    assert client.get("/is_sleeping").json() == {"is_sleeping": False, "models": []}
    used = client.get("/admin/memory").json()["used_bytes"]
    assert client.post("/sleep?level=1").json() == {"is_sleeping": True, "models": ["null"]}
    assert used > 0 == client.get("/admin/memory").json()["used_bytes"] and state_of(client) == "sleeping"
    assert client.get("/health").status_code == 200 and client.get("/props").json()["is_sleeping"] is True
    assert client.get("/v1/models").json()["data"][0]["id"] == "null", "reading its state must not wake the model"
    assert state_of(client) == "sleeping"
    assert server.complete().status_code == 200 and state_of(client) == "ready"
    assert client.get("/admin/memory").json()["used_bytes"] == used


def test_waking_by_name_and_all_at_once(serve):
    client = serve(initial=TWO).http()
    assert client.post("/sleep?model=a").json() == {"is_sleeping": True, "models": ["a"]}
    assert client.get("/is_sleeping").json() == {"is_sleeping": False, "models": ["a"]}
    client.post("/sleep?level=2&mode=wait")
    assert client.get("/is_sleeping").json() == {"is_sleeping": True, "models": ["a", "b"]}
    assert client.post("/wake_up?tags=weights&tags=kv_cache&model=b").json()["is_sleeping"] is False
    assert (state_of(client, "a"), state_of(client, "b")) == ("sleeping", "ready")
    assert client.post("/wake_up").json() == {"is_sleeping": False, "models": []}


def test_a_model_whose_memory_was_taken_is_not_woken(serve):
    """A sleeping model cannot be woken while another model uses its memory; the error names the sizes. After the other model is unloaded,
    the sleeping model can be woken."""
    server = serve(initial=(), memory_limit_bytes=5 << 20)
    client = server.http()
    for name in ("a", "b"):
        (server.settings.model_root / name).mkdir()
    assert client.post("/admin/models", json={"source": "a", "wait": True}).status_code == 200
    client.post("/sleep?model=a")
    server.scripts["b"] = type(server.script)(weights_bytes=3 << 20)
    assert client.post("/admin/models", json={"source": "b", "wait": True}).status_code == 200
    for answer in (client.post("/v1/completions", json={"model": "a", "prompt": "x"}), client.post("/wake_up?model=a")):
        assert answer.status_code == 507 and "are free" in answer.json()["error"]["message"]
    client.delete("/admin/models/b")
    assert client.post("/v1/completions", json={"model": "a", "prompt": "x"}).status_code == 200


def test_waiting_lets_an_answer_end(serve, answering):
    server = serve(script=answering("x" * 40, interval_s=0.005))
    client = server.http()
    with client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True, "max_tokens": 40}) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.http().post("/sleep?mode=wait")
        assert state_of(server.http()) == "sleeping" and not server.worker.running
        assert "".join(lines).count('"text":"x"') >= 39


def test_a_model_that_sleeps_can_be_unloaded(serve):
    client = serve().http()
    client.post("/sleep")
    assert client.delete("/admin/models/null").json()["freed_bytes"] == 0
    assert client.get("/admin/models").json()["data"] == []
    assert client.get("/is_sleeping").json() == {"is_sleeping": False, "models": []}


@pytest.mark.parametrize("query", ["level=3", "mode=never", "model=other"])
def test_what_makes_no_sense_is_refused(server, query):
    assert server.http().post(f"/sleep?{query}").status_code in (400, 404)


def test_sleep_belongs_to_the_administration(serve):
    client = serve(api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"]).http()
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert client.request(method, path, headers={"authorization": "Bearer a-key-of-a-client"}).status_code == 403
        assert client.request(method, path, headers={"authorization": "Bearer a-key-of-an-admin"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_s_answer_says_how_long_the_model_was_loaded(serve, answering, stream):
    """Only the request that wakes the model waits for it."""
    server = serve(script=answering("hello", load_s=0.05))
    client = server.http()
    client.post("/sleep")
    for is_first in (True, False):
        body = {"model": "null", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        last = json.loads(client.post("/api/chat", json=body).text.splitlines()[-1])
        assert (last["load_duration"] > 0) is is_first and last["prompt_eval_duration"] >= 1
        assert last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"] + 2
