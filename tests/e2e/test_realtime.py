"""End-to-end tests of transcription over a WebSocket, with the official OpenAI client and a real server that serves a small random Whisper:
a session's texts are those of the same samples in a file."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect, unix_connect

from server.audio.wav import pcm_file
from tests.conftest import DemoServer, serving_demo
from tests.deploy.test_nginx import nginx_before

MODEL = Path(__file__).parents[1] / "golden" / "whisper"
RATE, RECEIVE_S = 24_000, 60
MANUAL = {"type": "transcription", "audio": {"input": {"transcription": {"language": "en"}, "turn_detection": None}}}
pytestmark = [
    pytest.mark.xdist_group("realtime server"),
    # the official client connects in a way that its own library will not offer for ever
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("secret-key\nslow-key requests_per_minute=1\nleaving-key\n")
    return path


@pytest.fixture(scope="module")
def server(cache_folder: Path, keys: Path) -> Iterator[DemoServer]:
    with serving(cache_folder, keys) as server:
        yield server


def serving(cache_folder: Path, keys: Path, *options: str) -> AbstractContextManager[DemoServer]:
    return serving_demo(cache_folder, str(MODEL), "--quantize", "f32", "--max-audio-s", "5", "--api-key-file", str(keys), *options)


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    transport = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-key", max_retries=0, timeout=60, http_client=transport) as client:
        yield client


@contextmanager
def plain(server: DemoServer, path: str = "/v1/realtime", **options: Any) -> Iterator[ClientConnection]:
    """Connect without the official client, which hides what it does not expect."""
    url = server.url.replace("http", "ws", 1) + path
    with connect(url, **{"additional_headers": {"authorization": "Bearer secret-key"}, **options}) as connection:
        yield connection


def noise(seconds: float, seed: int = 0) -> bytes:
    samples = 6000 * np.random.default_rng(seed).standard_normal(round(RATE * seconds))
    return np.clip(samples, -32768, 32767).astype("<i2").tobytes()


def text_of(client: openai.OpenAI, samples: bytes) -> str:
    return client.audio.transcriptions.create(model="whisper", file=("a.wav", pcm_file(samples, RATE)), language="en").text


def until(connection: Any, kind: str) -> list[Any]:
    """Receive events up to one of a kind."""
    found = [connection.recv()]
    while found[-1].type != kind:
        assert found[-1].type != "error", found[-1]
        found.append(connection.recv())
    return found


def append(connection: Any, samples: bytes, step: int = 4800) -> None:
    for at in range(0, len(samples), step):
        connection.input_audio_buffer.append(audio=b64encode(samples[at : at + step]).decode())


def test_committed_audio_has_the_text_of_a_file(client: openai.OpenAI) -> None:
    pieces = [noise(0.5, 1), noise(0.3, 2)]
    with client.realtime.connect(model="whisper") as connection:
        (created,) = until(connection, "session.created")
        assert created.session.audio.input.turn_detection.type == "server_vad"
        connection.session.update(session=MANUAL)
        (updated,) = until(connection, "session.updated")
        assert updated.session.audio.input.turn_detection is None
        before = None
        for samples in pieces:
            append(connection, samples)
            connection.input_audio_buffer.commit()
            found = until(connection, "conversation.item.input_audio_transcription.completed")
            committed, added, done, *deltas, completed = found
            assert [event.type for event in (committed, added, done)] == [
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
            ]
            assert committed.previous_item_id == before
            before = committed.item_id
            assert {event.item_id for event in (*deltas, completed)} == {before} == {added.item.id}
            assert "".join(event.delta for event in deltas).strip() == completed.transcript == text_of(client, samples)
            assert completed.usage.seconds == 1 and completed.logprobs is None


def test_log_probabilities_if_the_session_includes_them(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="whisper") as connection:
        connection.session.update(session={**MANUAL, "include": ["item.input_audio_transcription.logprobs"]})
        append(connection, noise(0.3))
        connection.input_audio_buffer.commit()
        *_, delta, completed = until(connection, "conversation.item.input_audio_transcription.completed")
    assert "".join(entry.token for entry in completed.logprobs).strip() == completed.transcript != ""
    assert delta.logprobs == completed.logprobs[-len(delta.logprobs) :]


def test_the_server_commits_where_speech_ends(client: openai.OpenAI) -> None:
    silence = bytes(2 * RATE)
    with client.realtime.connect(model="whisper") as connection:
        append(connection, silence + noise(0.6) + silence)
        found = until(connection, "conversation.item.input_audio_transcription.completed")
        kinds = [event.type for event in found]
        assert kinds[1:4] == ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]
        started, stopped, committed = found[1:4]
        assert started.audio_start_ms == pytest.approx(700, abs=60) and stopped.audio_end_ms == pytest.approx(2100, abs=60)
        assert started.item_id == stopped.item_id == committed.item_id == found[-1].item_id


def test_several_connections_at_once(client: openai.OpenAI) -> None:
    pieces = [noise(0.3, seed) for seed in range(4)]
    alone = [text_of(client, samples) for samples in pieces]

    def talk(samples: bytes) -> str:
        with client.realtime.connect(model="whisper") as connection:
            connection.session.update(session=MANUAL)
            append(connection, samples)
            connection.input_audio_buffer.commit()
            return until(connection, "conversation.item.input_audio_transcription.completed")[-1].transcript

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(talk, pieces)] == alone


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ("no JSON", "invalid_json", None),
        pytest.param('{"type":"x","a":[' + "[]," * 100_000 + "[]]}", "body_too_complex", None, id="many values"),
        ([], "missing_field", "type"),
        ({"type": "response.create"}, "invalid_value", "type"),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append"}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": 5}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": "YQ=="}, "invalid_value", "audio"),
        ({"type": "input_audio_buffer.append", "audio": b64encode(bytes(2 * 6 * RATE)).decode()}, "input_audio_buffer_full", "audio"),
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty", None),
        ({"type": "session.update"}, "missing_field", "session"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "unsupported_field", "session.type"),
        (
            {"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": "klingon"}}}}},
            "invalid_value",
            "language",
        ),
        ({"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "other"}}}}}, "model_not_found", "model"),
    ],
)
def test_errors_name_the_field_and_the_session_goes_on(server: DemoServer, event: Any, code: str, param: str | None) -> None:
    sent = event if isinstance(event, str) else json.dumps({**event, "event_id": "mine"} if isinstance(event, dict) else event)
    with plain(server) as connection:
        assert json.loads(connection.recv(RECEIVE_S))["type"] == "session.created"
        connection.send(sent)
        found = json.loads(connection.recv(RECEIVE_S))
        assert (found["type"], found["error"]["code"], found["error"]["param"]) == ("error", code, param)
        assert found["error"]["event_id"] == ("mine" if isinstance(event, dict) else None)
        connection.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert json.loads(connection.recv(RECEIVE_S))["type"] == "input_audio_buffer.cleared"


@pytest.mark.parametrize(
    ("path", "options", "status", "code"),
    [
        ("/v1/realtime", {"additional_headers": {}}, 401, "invalid_api_key"),
        ("/v1/realtime?model=other", {}, 404, "model_not_found"),
        ("/v1/models/x/realtime", {}, 404, None),
    ],
)
def test_refusals_are_answers(server: DemoServer, path: str, options: dict[str, Any], status: int, code: str | None) -> None:
    with pytest.raises(InvalidStatus) as refused, plain(server, path, **options):
        pass
    assert refused.value.response.status_code == status
    assert code is None or json.loads(refused.value.response.body)["error"]["code"] == code


def test_a_key_may_be_a_protocol_as_in_browsers(server: DemoServer) -> None:
    for names in (["realtime", "openai-insecure-api-key.secret-key"], ["openai-insecure-api-key.secret-key", "realtime"]):
        with plain(server, additional_headers={}, subprotocols=names) as connection:
            assert connection.subprotocol == "realtime"
            assert json.loads(connection.recv(RECEIVE_S))["type"] == "session.created"


def test_a_plain_request_is_told_what_the_path_is(server: DemoServer) -> None:
    answer = httpx.get(f"{server.url}/v1/realtime", headers={"authorization": "Bearer secret-key"}, timeout=60, verify=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
    assert "asks for no upgrade; send `Upgrade: websocket`, and let a proxy in between" in answer.json()["error"]["message"]


def sent(event: str, **fields: Any) -> str:
    return json.dumps({"type": event, **fields})


def next_of(connection: ClientConnection, kind: str) -> Any:
    while (event := json.loads(connection.recv(RECEIVE_S)))["type"] != kind:
        assert event["type"] != "error", event
    return event


def commit(connection: ClientConnection, samples: bytes) -> None:
    connection.send(sent("session.update", session=MANUAL))
    connection.send(sent("input_audio_buffer.append", audio=b64encode(samples).decode()))
    connection.send(sent("input_audio_buffer.commit"))


def rest_of(connection: ClientConnection) -> tuple[list[str], tuple[int, str]]:
    """Return the types of the events until the server closes the connection, and its code and reason."""
    types = list[str]()
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            types.append(json.loads(connection.recv(RECEIVE_S))["type"])
    assert closed.value.rcvd is not None
    return types, (closed.value.rcvd.code, closed.value.rcvd.reason)


def test_a_session_goes_through_nginx(server: DemoServer, client: openai.OpenAI, tmp_path: Path) -> None:
    samples = noise(0.4)
    with nginx_before(server.url.removeprefix("http://"), tmp_path) as place:
        headers = {"authorization": "Bearer secret-key"}
        with unix_connect(str(place), "ws://localhost/v1/realtime?model=whisper", additional_headers=headers) as connection:
            commit(connection, samples)
            completed = next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed["transcript"] == text_of(client, samples)


def test_each_item_counts_for_the_rates_of_the_key(server: DemoServer) -> None:
    with plain(server, additional_headers={"authorization": "Bearer slow-key"}) as connection:
        commit(connection, noise(0.2))
        failed = next_of(connection, "conversation.item.input_audio_transcription.failed")
        assert failed["error"]["code"] == "rate_limit_exceeded" and "1 requests per minute" in failed["error"]["message"]


def test_a_key_that_is_removed_ends_its_sessions(server: DemoServer, keys: Path) -> None:
    with plain(server, additional_headers={"authorization": "Bearer leaving-key"}) as connection:
        commit(connection, noise(0.2))
        next_of(connection, "conversation.item.input_audio_transcription.completed")
        keys.write_text(keys.read_text().replace("leaving-key\n", ""))
        commit(connection, noise(0.2))
        assert rest_of(connection)[1] == (1008, "the API key is no longer valid")


def test_a_client_that_streams_hears_that_the_server_stops(cache_folder: Path, keys: Path) -> None:
    """The client hears it long before the server would end its requests."""
    with serving(cache_folder, keys, "--drain-s", "600") as server, plain(server) as connection, ThreadPoolExecutor(1) as pool:
        for seed in range(4):
            commit(connection, noise(0.5, seed))
        events = list[str]()
        while events.count("input_audio_buffer.committed") < 4:
            events.append(json.loads(connection.recv(RECEIVE_S))["type"])

        def stream() -> None:
            piece = sent("input_audio_buffer.append", audio=b64encode(bytes(4800)).decode())
            try:
                while True:
                    connection.send(piece)
                    connection.send(sent("input_audio_buffer.clear"))
                    time.sleep(0.01)
            except ConnectionClosed:
                pass

        streaming = pool.submit(stream)
        os.kill(server.pid, signal.SIGTERM)
        rest, closed = rest_of(connection)
        assert [*events, *rest].count("conversation.item.input_audio_transcription.completed") == 4, "what was committed is transcribed"
        assert closed == (1001, "the server stops")
        streaming.result(RECEIVE_S)


def test_what_breaks_the_protocol_closes_with_its_code(server: DemoServer) -> None:
    with plain(server) as connection:
        connection.recv()
        connection.send(b"binary")
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1003
    with plain(server) as connection:
        assert connection.ping().wait(RECEIVE_S), "no pong"
        connection.recv()
        connection.send("x" * ((1 << 20) + 1))
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def used(server: DemoServer) -> dict[str, float]:
    """Return the numbers of running and of waiting requests, and the used share of the KV cache."""
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer secret-key"}, timeout=60, verify=False).text
    found = re.findall(r"^(vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc))\{.*\} (\S+)$", text, re.MULTILINE)
    assert len(found) == 3
    return {name: float(value) for name, value in found}


def test_a_client_that_vanishes_leaves_the_server_whole(server: DemoServer, client: openai.OpenAI) -> None:
    address = urlsplit(server.url)
    for sent in (b"", b"\x81", b"\x81\xfe\x01"):
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            lines = (
                *("GET /v1/realtime HTTP/1.1", "host: 127.0.0.1", "authorization: Bearer secret-key", "connection: upgrade"),
                *("upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "", ""),
            )
            connection.sendall("\r\n".join(lines).encode() + sent)
            assert connection.recv(20).startswith(b"HTTP/1.1 101 ")
    with client.realtime.connect(model="whisper") as talk:
        append(talk, noise(1.0))
    with plain(server) as connection:
        commit(connection, noise(4.0))
        next_of(connection, "input_audio_buffer.committed")
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.socket.close()  # with a reset
    until_s = time.monotonic() + RECEIVE_S
    while any((left := used(server)).values()):
        assert time.monotonic() < until_s, left
        time.sleep(0.05)
    assert text_of(client, noise(0.3))
