from __future__ import annotations

import time

import pytest

from server.handle import LoadError
from server.null import NullState
from server.state import ModelSpec


def test_live_while_loading_ready_after(serve, answering):
    server = serve(script=answering("", load_s=0.01))
    assert server.http().get("/health/live").status_code == 200
    for path in ("/health", "/health/ready", "/v2/health/ready"):
        answer = server.http().get(path)
        assert answer.status_code == 200 and answer.json() == {"status": "ok", "models": {"null": "ready"}}


def test_not_ready_while_the_first_models_load(serve, answering):
    server = serve(initial=())
    slow = answering("", load_s=30)
    server.scripts["slow"] = slow
    server.loop.call_soon_threadsafe(lambda: server.registry._starting.append(server.registry.load(ModelSpec("slow", "slow"))))
    end = time.monotonic() + 60
    while (answer := server.http().get("/health")).status_code == 200 and time.monotonic() < end:
        time.sleep(0.005)
    assert answer.status_code == 503 and answer.json()["models"] == {"slow": "loading"}
    assert server.http().get("/health/live").status_code == 200


def test_not_ready_when_the_only_worker_is_given_up(serve):
    server = serve()
    server.worker.state = NullState.STOPPED
    assert server.http().get("/health").status_code == 503


def test_ready_without_models_and_after_a_failed_start(serve, answering):
    assert serve(initial=()).http().get("/health").status_code == 200
    broken = serve(script=answering("", load_error=LoadError("load_refused", "no")))
    assert broken.http().get("/health").json()["models"] == {}


def test_version(server):
    assert server.http().get("/version").json()["name"] == "relaxserve"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_load_balancers_may_ask_for_the_head_only(server, path):
    response = server.http().head(path)
    assert response.status_code == 200 and response.content == b""


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/embedding", "/v1/embeddings"),
    ],
)
def test_a_wrong_address_is_told_the_right_one(server, path, meant):
    response = server.http().post(path, json={})
    assert response.status_code == 404 and f"is {meant} meant?" in response.json()["error"]["message"]
    assert "meant" not in server.http().get("/nothing").json()["error"]["message"]
