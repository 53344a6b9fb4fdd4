"""The line that the access log gets for each request."""

from __future__ import annotations

import hashlib
import logging
import time

import pytest

from server.http.record import RequestRecord, write_line

Line = tuple[str, str, dict[str, object]]


def lines(caplog: pytest.LogCaptureFixture, num_lines: int = 1) -> list[Line]:
    """Return the lines of the access log. Wait until there are `num_lines` lines, because a client may get its answer before the server
    writes the line."""
    end_s = time.monotonic() + 60
    while True:
        found = [(r.levelname, r.getMessage(), getattr(r, "fields", {})) for r in caplog.records if r.name == "server.access"]
        if len(found) >= num_lines or time.monotonic() > end_s:
            return found
        time.sleep(0.005)


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "server.access")
    return caplog


def test_the_line_tells_model_tokens_and_milliseconds(serve, access):
    server = serve()
    server.http().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}, headers={"x-request-id": "mine"})
    ((level, text, fields),) = lines(access)
    assert level == "INFO" and "POST /v1/chat/completions 200" in text and "model null" in text
    assert fields["model"] == "null" and fields["completion_tokens"] == 27 and fields["prompt_tokens"] == len("<|user|>hi\n<|assistant|>")
    assert 0 < fields["first_token_ms"] <= fields["ms"]


def test_the_line_tells_who_asks(serve, access):
    """A key is named by its group, or by the beginning of its SHA-256 digest, which reveals nothing about it."""
    client = serve(api_keys=("a-client-key", "another-key group=shop")).http()
    for key in ("a-client-key", "another-key", "a-wrong-key"):
        client.get("/v1/models", headers={"x-api-key": key})
    found = lines(access, 3)
    assert [fields["client"] for _, _, fields in found] == ["127.0.0.1"] * 3
    digest = hashlib.sha256(b"a-client-key").hexdigest()[:8]
    assert [fields.get("key") for _, _, fields in found] == [digest, "shop", None]
    assert f"from 127.0.0.1, key {digest}" in found[0][1] and "from 127.0.0.1, key shop" in found[1][1]


@pytest.mark.parametrize("stream", [False, True])
def test_every_api_tells_its_tokens(serve, access, stream):
    server = serve()
    messages = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 100},
        "/v1/messages": {"messages": messages, "max_tokens": 100, "model": "null"},
        "/v1/responses": {"input": "hi", "model": "null"},
        "/api/chat": {"messages": messages, "model": "null"},
    }
    for path, body in bodies.items():
        answer = server.http().post(path, json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
    found = {str(fields["path"]): fields for _, _, fields in lines(access, len(bodies))}
    assert {path: fields["completion_tokens"] for path, fields in found.items()} == {
        "/v1/completions": 54,
        "/v1/messages": 27,
        "/v1/responses": 27,
        "/api/chat": 27,
    }


def test_embeddings_tell_their_tokens(serve, answering, access):
    server = serve(script=answering("", embedding_size=4))
    server.http().post("/v1/embeddings", json={"input": ["one", "three"], "model": "null"})
    ((_, _, fields),) = lines(access)
    assert fields["model"] == "null" and fields["prompt_tokens"] >= 8 and fields["completion_tokens"] == 0


def test_refusals_have_a_line_and_probes_none_at_info(serve, access):
    server = serve()
    server.http().get("/health")
    server.http().get("/metrics")
    server.http().post("/v1/chat/completions", content="{", headers={"content-type": "application/json"})
    assert [level for level, _, _ in lines(access, 3)] == ["DEBUG", "DEBUG", "INFO"]


def test_a_path_cannot_forge_a_line(caplog):
    caplog.set_level(logging.INFO, "server.access")
    write_line(RequestRecord("id", "GET", "/a\n2026 info forged", status=404))
    assert "\n" not in caplog.records[-1].getMessage()


def test_failures_of_the_server_are_warnings(caplog):
    write_line(RequestRecord("id", "GET", "/a", status=500))
    assert caplog.records[-1].levelname == "WARNING"
