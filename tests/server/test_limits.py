"""Requests that are slow, too large, malformed, or try to read outside the served folder. The tests use plain sockets, because HTTP clients
would refuse to send some of these requests."""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack

import pytest

from server.http.connections import HEALTH_PATHS
from server.models.state import ModelSpec
from tests.doubles.worker import NullScript

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def talk(server, data: bytes) -> tuple[int, dict]:
    """Send a request and return the answer's status and error. The server must close the connection after the answer."""
    with server.connect() as sock:
        sock.sendall(data)
        answer = server.read_all(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-should-retry: " in head or not body
    return int(head.split()[1]), json.loads(body)["error"] if body else {}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b"null", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_json"),
        (b'{"prompt": "x", "seed": 123456789012345678901234567890}', "invalid_value"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "invalid_value"),
        (b'{"prompt": "x", "max_tokens": true}', "invalid_value"),
        ('{"prompt": "caf\u00e9"}'.encode("latin-1"), "invalid_json"),
        ('{"caf\u00e9": 1}'.encode("latin-1"), "invalid_json"),
        ('{"prompt": "x"}'.encode("utf-16"), "invalid_json"),
        pytest.param(b"[" * 100_000, "invalid_json", id="deep lists"),
        pytest.param(b'{"a":' * 100_000, "invalid_json", id="deep objects"),
        pytest.param(b'{"metadata": {"a": ' + b"[" * 63 + b"]" * 63 + b"}, " + b'"prompt": "x"}', "invalid_json", id="a level too deep"),
        pytest.param(b'{"prompt": "x", "seed": ' + b"1" * 10**6 + b"}", "invalid_json", id="digits"),
    ],
)
def test_malformed_bodies(server, body, code):
    response = server.http().post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == code, response.text
    assert response.headers["x-request-id"]


def test_a_body_that_is_not_called_json(server):
    response = server.http().post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400, "browsers send this content type across origins without a preflight request"


@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large(serve, chunked):
    server = serve(max_body_bytes=1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    content = iter([body[:500], body[500:]]) if chunked else body
    response = server.http().post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_a_body_that_lies_about_its_size_is_not_awaited(serve):
    status, error = talk(serve(), f"{HEAD}content-length: 99999999999\r\n\r\n".encode())
    assert (status, error["code"]) == (413, "body_too_large")


def test_a_body_that_does_not_come(serve):
    status, error = talk(serve(body_timeout_s=0.2), f"{HEAD}content-length: 10\r\n\r\n{{".encode())
    assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files", "/v1/audio/transcriptions"])
def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(serve, tmp_path, caplog, path):
    """A failure would be logged with a traceback, and alarm the operator."""
    server = serve(batch_dir=tmp_path / "batches")
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: 1000\r\n\r\n"
    with caplog.at_level(logging.INFO):
        with server.connect() as sock:
            sock.sendall(f'{head}--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{{'.encode())
        end_s = time.monotonic() + 60
        while not (lines := [record for record in caplog.records if record.name == "server.access"]):
            assert time.monotonic() < end_s
            time.sleep(0.005)
    assert [line.fields["status"] for line in lines] == [499]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize(
    "head",
    [
        HEAD + "x: " + "y" * 5000 + "\r\n\r\n",
        HEAD + "x: y\r\n" * 1000 + "\r\n",
        "GET /" + "a" * 5000 + " HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        HEAD + "x: " + "y" * 5000,  # headers without the empty line that ends them
    ],
)
def test_headers_too_large(serve, head):
    status, error = talk(serve(max_header_bytes=4096), head.encode())
    assert (status, error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_what_is_not_http(server, data):
    status, error = talk(server, data)
    assert (status, error["code"]) == (400, "bad_request")


def test_headers_that_drip_are_cut_off(serve):
    server = serve(header_timeout_s=0.3)
    with server.connect() as sock:
        began = time.monotonic()
        sock.sendall(b"GET /v1/mod")
        assert server.read_all(sock) == b""
        assert time.monotonic() - began >= 0.25
    assert server.http().get("/v1/models").status_code == 200


def test_a_connection_that_asks_nothing_is_cut_off(serve):
    server = serve(keep_alive_s=0.3)
    with server.connect() as sock:
        assert server.read_all(sock) == b""


def test_a_client_that_reads_nothing_is_cut_off(serve, answering):
    script = answering("", interval_s=0.0005, max_context=1 << 21)
    script.answer = lambda _submit, _choice: [[120] * 500] * 4000  # an answer of about 10 MB, more than the socket buffers hold
    server = serve(script=script, write_timeout_s=0.3)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 2_000_000, "return_token_ids": True}).encode()
    with server.connect() as sock:
        sock.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body)
        end = time.monotonic() + 60
        while not server.worker.aborted and time.monotonic() < end:
            time.sleep(0.01)
        assert server.worker.aborted, "the worker still writes for a client that does not read"


@pytest.mark.parametrize(
    "path",
    [
        "/../etc/passwd",
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e/%2e%2e/etc",
        "/docs/..%2f..%2fsettings",
        "/static/x",
        "//admin/models",
    ],
)
def test_paths_lead_nowhere(server, path):
    status, error = talk(server, f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
    assert status == 404 and error["code"] in ("path_not_found", "model_not_found")


def test_errors_of_the_framework_have_the_envelope(server):
    client = server.http()
    missing, method = client.get("/nowhere"), client.get("/v1/chat/completions")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "path_not_found"
    assert method.status_code == 405 and method.json()["error"]["code"] == "method_not_allowed"
    assert method.headers["allow"] == "POST" and "expected POST" in method.json()["error"]["message"]
    for response in (missing, method):
        assert response.headers["x-request-id"] and int(response.headers["openai-processing-ms"]) >= 0


def test_request_ids(server):
    client = server.http()
    assert client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert client.get("/health", headers={"x-request-id": "sp ace"}).headers["x-request-id"].startswith("req-")
    stream = server.chat(stream=True)
    assert stream.headers["x-request-id"] and stream.headers["openai-processing-ms"]


def test_a_full_queue_says_when_to_come_back(serve, answering):
    spec = ModelSpec("null", "null", max_batch=1)
    server = serve(script=answering("x" * 1000, interval_s=0.05), initial=[spec], max_queued_requests=1)
    client = server.openai()
    body = {"model": "null", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    streams = [client.chat.completions.create(**body) for _ in range(2)]
    for stream in (True, False):
        refused = server.chat(stream=stream)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1 and int(refused.headers["retry-after-ms"]) >= 1
        assert refused.headers["x-ratelimit-limit-requests"] == "2" and refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-should-retry"] == "true"
    for stream in streams:
        stream.close()
    while server.worker.running:
        time.sleep(0.005)
    answer = server.http().post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == "2"


def test_tokens_waiting_for_prefill_are_limited_too(serve, answering):
    server = serve(script=answering("x", prefill_s=30), max_queued_tokens=100)
    client = server.http()
    client.timeout = 0.3
    with pytest.raises(Exception, match="timed out"):
        # more tokens than may be queued, but admitted because no other request waits
        client.post("/v1/completions", json={"prompt": "x" * 200})
    # Poll until the server notices that the client has disconnected, and removes the request from the queue.
    end = time.monotonic() + 60
    while server.worker.running and time.monotonic() < end:
        time.sleep(0.005)
    assert server.registry.models()[0].loaded.admission.num_queued_tokens == 0


def test_cors_only_for_named_origins(serve):
    server = serve(cors_origins=("https://ok.example",))
    client = server.http()
    asked = {"access-control-request-method": "POST"}
    fine = client.options("/v1/completions", headers={"origin": "https://ok.example", **asked})
    assert fine.headers["access-control-allow-origin"] == "https://ok.example"
    other = client.options("/v1/completions", headers={"origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in other.headers


def test_a_deadline_does_not_move_with_the_clock(serve, answering, monkeypatch):
    server = serve(script=answering("x" * 10, interval_s=0.01))
    began = time.time()
    monkeypatch.setattr(time, "time", lambda: began + 3600 * time.monotonic())
    assert server.complete(timeout=60).status_code == 200


def test_idle_connections_give_way_to_new_ones(serve):
    """When the limit of connections is reached, each new connection closes an idle one. So probes and requests are answered, and busy
    connections stay open."""
    server = serve(max_connections=8, script=NullScript(answer=lambda _submit, _choice: [[120]] * 400, interval_s=0.005))
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 400}).encode()
    with ExitStack() as stack:
        busy = stack.enter_context(server.connect())
        busy.sendall(f"{HEAD}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        first = busy.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        idle = [stack.enter_context(server.connect()) for _ in range(40)]
        assert server.http().get("/health/ready").status_code == 200
        assert server.complete(max_tokens=1).status_code == 200
        assert idle[0].recv(1) == b"", "the connection that was idle longest must be closed"
        assert server.read_all(busy).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_when_all_connections_are_busy_probes_are_answered_and_requests_told_to_wait(serve):
    server = serve(max_connections=3, script=NullScript(answer=lambda _submit, _choice: [[120]] * 4000, interval_s=0.005))
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 4000}).encode()
    with ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(server.connect())
            sock.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        refused = server.complete(max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"] and refused.headers["x-should-retry"] == "true"
        for path in HEALTH_PATHS:
            for _ in range(4):
                assert server.http().get(path).status_code == 200
    end = time.monotonic() + 60
    while server.complete(max_tokens=1).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "permission", "body", "status"),
    [
        ({"api_keys": ("a-long-key",)}, "", b" " * 4_000_000, 401),
        ({"strict": True}, "", json.dumps({"prompt": "x", **{f"unknown {i}": 0 for i in range(20_000)}}).encode() + b" " * 3_000_000, 400),
        ({}, "", b"[" + b"{}," * 1_000_000 + b"{}]", 413),
        ({"max_body_bytes": 4_000_000}, "", b" " * 5_000_000, 413),
        ({"max_header_bytes": 4096}, "x: " + "y" * 5000 + "\r\n", b" " * 4_000_000, 431),
    ],
)
def test_early_refusals_of_large_bodies_arrive(serve, options, permission, body, status):
    """A client that sends its whole body before it reads gets the error, not a reset."""
    server = serve(**options)
    with server.connect() as sock:
        sock.sendall(f"{HEAD}{permission}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.1)  # the answer waits in the socket; a reset would destroy it
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    assert int(answer.split()[1]) == status, answer


def test_a_refused_body_is_not_read_for_ever(serve, monkeypatch):
    """The server reads the rest within limits of bytes and of time."""
    server = serve(max_body_bytes=100_000)
    with server.connect() as sock, pytest.raises(ConnectionError):
        sock.sendall(f"{HEAD}content-length: {1 << 40}\r\n\r\n".encode())
        for _ in range(1000):
            sock.sendall(b" " * 100_000)
    monkeypatch.setattr("server.http.protocol.LINGER_S", 0.1)
    with server.connect() as sock:
        sock.sendall(f"{HEAD}content-length: {1 << 40}\r\n\r\n".encode())
        server.read_all(sock)
        end = time.monotonic() + 60
        while server.server.server_state.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.server.server_state.connections


def test_a_client_that_leaves_is_noticed_while_reading_is_paused(serve, answering):
    """The server stops reading a client that pipelines too much, and still notices that it leaves."""
    server = serve(script=answering("x" * 4000, interval_s=0.05))
    body = json.dumps({"prompt": "x", "max_tokens": 2000}).encode()
    with server.connect() as sock:
        sock.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000)
        end = time.monotonic() + 60
        while not server.worker.running and time.monotonic() < end:
            time.sleep(0.005)
    while not server.worker.aborted and time.monotonic() < end:
        time.sleep(0.005)
    assert server.worker.aborted, "the worker still writes for a client that is gone"


def test_a_line_end_between_requests_keeps_no_connection_open(serve):
    """Some clients send a line end after a body, which belongs to no request."""
    server = serve(keep_alive_s=2.0, header_timeout_s=2.0)
    with server.connect() as sock:
        sock.settimeout(60)
        sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        answer = b""
        while b"ok" not in answer:
            received = sock.recv(1 << 16)
            assert received, answer
            answer += received
        sock.sendall(b"\r\n")
        assert server.read_all(sock) == b""
