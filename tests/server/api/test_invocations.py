"""SageMaker's two paths, `/ping` and `/invocations`."""

from __future__ import annotations

import pytest

from tests.doubles.worker import NullScript, NullState

HI = [{"role": "user", "content": "hi"}]
SAID = "Hello from the null device."
pytestmark = pytest.mark.parametrize("shared_server", [{"script": NullScript(embedding_size=8)}], indirect=True, ids=[""], scope="module")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": HI, "seed": 1}, "/v1/chat/completions"),
        ({"prompt": "hi", "max_tokens": 3}, "/v1/completions"),
        ({"input": "hi"}, "/v1/embeddings"),
        ({"query": "a", "documents": ["b", "c"]}, "/v1/rerank"),
        ({"text_1": "a", "text_2": "b"}, "/v1/score"),
        ({"messages": HI, "temperature": -1}, "/v1/chat/completions"),
    ],
)
def test_a_request_is_answered_by_the_api_whose_fields_it_has(server, body, path):
    here, there = (server.http().post(path, json=body) for path in ("/invocations", path))
    assert here.status_code == there.status_code
    changing = ("id", "created")
    assert [{k: v for k, v in one.json().items() if k not in changing} for one in (here,)] == [
        {k: v for k, v in there.json().items() if k not in changing}
    ]


def test_a_stream_is_one_here_too(server):
    response = server.http().post("/invocations", json={"messages": HI, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream") and response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("content", "code"), [(b"{", "invalid_json"), (b"[]", "invalid_json"), (b'{"x": 1}', "missing_field")])
def test_what_no_api_takes_is_refused(server, content, code):
    response = server.http().post("/invocations", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == code


def test_ping_tells_whether_requests_should_come(shared_server, serve):
    server = serve(api_keys=["a-key-of-a-client"])
    client = server.http()
    assert [client.get("/ping").status_code, client.post("/ping").status_code] == [200, 200]
    server.worker.state = NullState.STOPPED
    answer = client.get("/ping")
    assert answer.status_code == 503 and answer.content == b""
    assert client.get("/health").json()["error"]["type"] == "unavailable_error"
