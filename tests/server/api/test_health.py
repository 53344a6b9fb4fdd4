from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from server.interfaces import LoadError, Outage
from server.messages import ErrorCode
from server.models.state import ModelSpec, SavedState
from tests.doubles.worker import NullState


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
    begun = asyncio.run_coroutine_threadsafe(server.registry.load(ModelSpec("slow", "slow")), server.loop)
    server.registry._starting.append(begun.result(60))
    end = time.monotonic() + 60
    while (answer := server.http().get("/health")).status_code == 200 and time.monotonic() < end:
        time.sleep(0.005)
    assert answer.status_code == 503 and answer.json()["models"] == {"slow": "loading"}
    assert server.http().get("/health/live").status_code == 200


def test_not_ready_when_the_only_worker_is_given_up(serve):
    server = serve()
    server.worker.state = NullState.STOPPED
    assert server.http().get("/health").status_code == 503


def test_a_restart_is_shown_and_a_long_one_takes_the_server_out_of_rotation(serve):
    """`/health/ready` tells every client that a worker is restarting and when the next attempt is. Only administrators see the cause, which
    may contain paths. After a long restart the server reports that it is not ready."""
    server = serve()
    server.worker.state = NullState.RESTARTING
    server.worker.outage = Outage(time.monotonic(), patience_s=600.0, num_tries=3, error="no room", next_try_s=time.monotonic() + 900)
    answer = server.http().get("/health/ready")
    assert answer.status_code == 200 and answer.json()["models"] == {"null": "restarting"}
    shown = answer.json()["restarting"]["null"]
    assert shown["tries"] == 3 and shown["since_s"] >= 0 and 0 < shown["next_try_s"] <= 900 and "error" not in shown
    assert server.http().get("/admin/models/null").json()["restarting"]["error"] == "no room"

    server.worker.outage.patience_s = 0.0
    server.worker.outage.next_try_s = None
    answer = server.http().get("/health/ready")
    assert answer.status_code == 503 and answer.json()["status"] == "unavailable"
    assert answer.json()["restarting"]["null"]["next_try_s"] is None

    server.worker.state, server.worker.outage = NullState.READY, None
    answer = server.http().get("/health/ready")
    assert answer.status_code == 200 and "restarting" not in answer.json()
    assert "restarting" not in server.http().get("/admin/models/null").json()


def test_not_ready_after_the_only_model_was_refused(serve, answering):
    """The server is not ready after its only model was refused, because a load balancer must send it no requests. It becomes ready once
    another model is loaded."""
    broken = serve(script=answering("", load_error=LoadError(ErrorCode.LOAD_REFUSED, "no")))
    for path in ("/health", "/health/ready", "/v2/health/ready"):
        answer = broken.http().get(path)
        assert answer.status_code == 503 and answer.json().items() >= {"status": "unavailable", "models": {}}.items()
    broken.scripts["mended"] = answering("")
    asyncio.run_coroutine_threadsafe(broken.registry.load(ModelSpec("mended", "mended")), broken.loop)
    end = time.monotonic() + 60
    while broken.http().get("/health").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ready_without_models_where_none_was_asked_for(serve):
    assert serve(initial=()).http().get("/health").status_code == 200


def test_ready_once_a_model_that_was_refused_is_given_up(serve, answering, tmp_path):
    state = tmp_path / "state.json"
    state.write_bytes(msgspec.json.encode(SavedState((ModelSpec("null", "null"),))))
    server = serve(script=answering("", load_error=LoadError(ErrorCode.LOAD_REFUSED, "no")), initial=(), state_file=state)
    assert server.http().get("/health").status_code == 503
    assert server.http().delete("/admin/models/null").status_code == 200
    assert server.http().get("/health").status_code == 200


def test_the_load_counts_requests_that_run(serve, answering):
    """`/load` counts requests as vLLM does: one with two choices counts once, and none once the answer is complete."""
    server = serve(script=answering("x" * 200, interval_s=0.01))
    client = server.http()
    assert client.get("/load").json() == {"server_load": 0}
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 200, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.http().get("/load").json() == {"server_load": 1}
        for _ in lines:
            pass
    assert client.get("/load").json() == {"server_load": 0}


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
    assert response.status_code == 404 and f"did you mean {meant}?" in response.json()["error"]["message"]
    assert "meant" not in server.http().get("/nothing").json()["error"]["message"]
