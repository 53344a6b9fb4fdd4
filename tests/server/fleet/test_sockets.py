"""The ZMQ sockets of cache events, and a server whose events tell what its cache will find."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator

import httpx
import pytest

from deploy.serve import serve
from server.settings import ServerSettings, SettingsError
from tests.conftest import serving_demo, workers_of
from tests.server.fleet.index import Index

zmq = pytest.importorskip("zmq", reason="needs pyzmq (the extra fleet)")

from server.fleet.sockets import EventSockets  # noqa: E402  # imports zmq

WAIT_MS = 60_000


class Router:
    """Subscribes to a server's events, and asks for those that it missed."""

    def __init__(self, address: str, replay_address: str) -> None:
        self.context = zmq.Context()
        self.heard = self.context.socket(zmq.SUB)
        self.heard.setsockopt(zmq.RCVHWM, 0)  # this test reads late
        self.heard.connect(address)
        self.heard.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(replay_address)
        for socket in (self.heard, self.asking):
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)

    def replay(self, first: int, *topic: bytes) -> list[tuple[int, bytes]]:
        self.asking.send_multipart((b"", first.to_bytes(8, "big"), *topic))
        found = []
        while (received := self.asking.recv_multipart())[1] != b"\xff" * 8:
            found.append((int.from_bytes(received[1], "big"), received[2]))
        assert received == [b"", b"\xff" * 8, b""]
        return found

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_batches_arrive_and_are_replayed() -> None:
    kept = [(4, b"four"), (5, b"five")]
    asked: list[tuple[int, bytes | None]] = []

    def replay(first: int, topic: bytes | None) -> list[tuple[int, bytes]]:
        asked.append((first, topic))
        return kept

    sockets = EventSockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", replay)
    router = Router(sockets.address, sockets.replay_address)
    try:
        router.heard.setsockopt(zmq.RCVTIMEO, 50)
        while True:  # a subscription takes a moment, and what is sent before it is lost
            sockets.send(b"kv@me@a", 4, b"four")
            try:
                received = router.heard.recv_multipart()
                break
            except zmq.Again:
                pass
        assert received == [b"kv@me@a", (4).to_bytes(8, "big"), b"four"]
        router.asking.send_multipart((b"", b"short"))  # no number: it gets no answer, and the next request does
        assert router.replay(4) == kept and router.replay(5, b"kv@me@a") == kept
        assert asked == [(4, None), (5, b"kv@me@a")]
    finally:
        router.close()
        sockets.close()


# --- a whole server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("events")
    return f"ipc://{folder}/events", f"ipc://{folder}/replay"


@pytest.fixture(scope="module")
def demo(cache_folder, places) -> Iterator[object]:
    options = ("demo", "--kv-events", places[0], "--kv-events-replay", places[1], "--kv-events-name", "me")
    with serving_demo(cache_folder, *options, "--kv-cache-bytes", "600K") as server:
        yield server


@pytest.mark.parametrize("num_requests", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_router_knows_what_the_cache_of_a_server_has(demo, places, num_requests: int) -> None:
    """The number of tokens that each request finds in the cache is what an index of the events says, also after pages were evicted, and
    after the worker was killed."""
    rng, index = random.Random(3), Index()
    router = Router(*places)
    client = httpx.Client(base_url=demo.url, timeout=120)
    beginnings = [[rng.randrange(1, 250) for _ in range(rng.randrange(16, 120))] for _ in range(12)]

    def ask(prompt: list[int]) -> int:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def catch_up() -> None:
        # a worker reports in order, so what it reported before it answered this request has arrived at the front
        client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).raise_for_status()
        for number, batch in router.replay(index.number, b"kv@me@demo"):
            index.feed(number, batch)

    try:
        found = 0
        for number in range(num_requests):
            prompt = rng.choice(beginnings) + [rng.randrange(1, 250) for _ in range(rng.randrange(1, 60))]
            catch_up()
            expected = index.num_found(prompt, len(prompt) - 1)
            assert ask(prompt) == expected
            found += expected
            if number == num_requests // 2:
                (worker,) = workers_of(demo.pid)
                os.kill(worker, signal.SIGKILL)
                catch_up()  # answered by the next worker
                assert not index.pages and ask(prompt) == 0
        assert found > 1000
        catch_up()
        published = [0]
        while published[-1] != index.number - 1:
            topic, number, _ = router.heard.recv_multipart()
            assert topic == b"kv@me@demo"
            published.append(int.from_bytes(number, "big"))
        assert published[1:] == list(range(published[1], index.number)), "a batch was lost after the subscription began"
    finally:
        client.close()
        router.close()


# --- what stops the start -------------------------------------------------------------------------------------------------


async def _never(*_: object) -> bool:
    raise AssertionError("it started")


def test_a_start_without_pyzmq_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SettingsError, match=r"kv_events needs pyzmq, which is not installed; in a checkout, install '\.\[fleet\]'"):
        serve(ServerSettings(port=0, kv_events="tcp://127.0.0.1:*"), [], _never)


def test_a_taken_address_stops_the_start(tmp_path) -> None:
    context = zmq.Context()
    try:
        taken = context.socket(zmq.PUB)
        taken.bind("tcp://127.0.0.1:*")
        address = taken.get_string(zmq.LAST_ENDPOINT)
        with pytest.raises(SettingsError, match=f"cannot be published at {address}: Address already in use; choose another"):
            serve(ServerSettings(port=0, kv_events=address), [], _never)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kv_events": "5557"}, "kv_events is '5557'; expected tcp"),
        ({"kv_events": "http://x:1"}, "kv_events is 'http://x:1'"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://x"}, "kv_events_replay is 'tcp://x'"),
        ({"kv_events": "tcp://*:5557", "kv_events_name": "a@b"}, "expected a name without @"),
    ],
)
def test_settings_are_checked(settings, complaint) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ServerSettings(**settings)
