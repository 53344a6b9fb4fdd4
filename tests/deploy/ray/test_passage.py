"""Requests that lose their replicas: the replicas are HTTP servers with scripts, and there is no Ray."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from subprocess import PIPE
from types import SimpleNamespace

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs aiohttp (the extra ray)")

from aiohttp import web  # noqa: E402

from deploy.ray.passage import MOST_LOST, GivenUp  # noqa: E402
from deploy.ray.progress import Departure  # noqa: E402
from deploy.ray.refusal import refusal  # noqa: E402
from deploy.ray.wish import Lease, Wish, place_of  # noqa: E402
from server.api.request.fields import MAX_NAMES  # noqa: E402
from server.errors import NO_REPLICA, SHUTTING_DOWN, TABLE, ApiError, ErrorKind  # noqa: E402
from server.open_values import HEADER  # noqa: E402
from server.peers.named import HEADER as GIVER_HEADER  # noqa: E402
from tests.deploy.ray.scripted import CHAT, SSE, Client, Script, answers, ask, dies, replicas, run, streams  # noqa: E402
from tests.network import can_cut, other_machine  # noqa: E402


def event(at: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"t%d"}}]}\n\n' % at


WHOLE = b"".join(event(at) for at in range(8)) + b"data: [DONE]\n\n"


def test_a_request_and_its_answer_pass_unchanged() -> None:
    async def go() -> None:
        async with replicas(answers(201, b'{"a": 1}', **{"x-own": "v"})) as made:
            body = b'{"model": "m",  "odd" : [1.0, null]}'
            client = await ask(made, path="/v1/x%20y?q=a%2Fb&r", body=body, content_type="application/json", x_given="g")
            assert (client.status, client.body, client.headers["x-own"]) == (201, b'{"a": 1}', "v")
            ((target, headers, sent),) = made.seen
            assert (target, sent) == ("/v1/x%20y?q=a%2Fb&r", body)
            assert headers["x-given"] == "g"
            assert {*headers} == {"host", "content-type", "x-given", "content-length", HEADER}
            key, nonce, _ = headers[HEADER].split(" ")
            assert key == "key-of-r0"
            assert bytes.fromhex(nonce)[:4] == place_of("r0")
            assert HEADER not in client.headers
            assert made.open_requests["r0"] == 0

    run(go())


def test_large_headers_of_an_answer_pass() -> None:
    """The server names the fields that it ignores: MAX_NAMES names of 64 characters, each of which may take 12 bytes."""

    async def go() -> None:
        names = ", ".join(["%F0%9F%98%80" * 64] * MAX_NAMES)
        async with replicas(answers(200, b"{}", **{"x-ignored-params": names})) as made:
            client = await ask(made)
            assert (client.status, client.headers["x-ignored-params"], len(made.seen)) == (200, names, 1)

    run(go())


def test_the_server_hears_who_gives_it_pages() -> None:
    async def go() -> None:
        async with replicas(answers(200, b"{}"), num=1) as made:
            lease = await made.borrow(Wish())
            assert lease is not None

            async def borrow(_wish: Wish) -> Lease:
                return replace(lease, giver="http://10.0.0.7:8000", computes=True)

            made.borrow = borrow
            await ask(made, **{GIVER_HEADER: "mine http://10.0.0.8:1"})
            assert made.seen[0][1][GIVER_HEADER] == "key-of-r0 http://10.0.0.7:8000 compute"

    run(go())


def test_the_server_hears_by_which_name_the_client_asks() -> None:
    """Without keys, a server answers to its own names only, and to pages of its own origin only. So the ingress passes on both headers."""

    async def go() -> None:
        async with replicas(answers(200, b"{}")) as made:
            await ask(made, host="fleet.example:8000", origin="http://fleet.example:8000")
            headers = made.seen[0][1]
            assert (headers["host"], headers["origin"]) == ("fleet.example:8000", "http://fleet.example:8000")

    run(go())


def test_a_client_cannot_name_a_giver() -> None:
    async def go() -> None:
        async with replicas(answers(200, b"{}")) as made:
            await ask(made, **{GIVER_HEADER: "key-of-r0 http://10.0.0.8:1"})
            assert GIVER_HEADER not in made.seen[0][1]

    run(go())


def test_a_client_cannot_give_open_values() -> None:
    async def go() -> None:
        async with replicas(answers(200, b"{}")) as made:
            await ask(made, **{HEADER: "mine 00112233445566778899 1"})
            assert made.seen[0][1][HEADER].startswith("key-of-r0 ")

    run(go())


@pytest.mark.parametrize("cut", [0, 1, 61, 150, len(WHOLE) - 20, len(WHOLE) - 1])
def test_a_stream_goes_on_where_the_dead_replica_ended(cut: int) -> None:
    async def go() -> None:
        async with replicas(streams(WHOLE[:cut], dies=True), streams(WHOLE)) as made:
            client = await ask(made)
            assert (client.status, client.body, client.is_whole) == (200, WHOLE, True)
            first, second = (headers for _, headers, _ in made.seen)
            assert first[HEADER].split(" ")[1:] == second[HEADER].split(" ")[1:]  # the same open values
            assert second[HEADER].startswith("key-of-r1 ")
            assert "if-match" not in first
            assert second.get("if-match") == "fp_1"
            assert made.wishes[1].avoided == {"r0"}

    run(go())


def test_a_response_is_stored_where_its_stream_ends() -> None:
    """The id of the response still names the replica that has begun it."""
    created = (
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_00ff","previous_response_id":"resp_1"}}\n\n'
    )
    whole = created + b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_00ff"}}\n\n'

    async def go() -> None:
        for path, moved in (("/v1/responses", {"resp_00ff": "r1"}), (CHAT, {})):
            async with replicas(streams(whole[:-30], dies=True), streams(whole)) as made:
                assert (await ask(made, path=path)).body == whole
                assert made.moved == moved
        for scripts in ((streams(whole),), (answers(503, b"{}"), streams(whole))):
            async with replicas(*scripts) as made:
                assert (await ask(made, path="/v1/responses")).body == whole
                assert made.moved == {}, "the replica that its id names has it"

    run(go())


def test_comments_are_passed_on_and_do_not_count() -> None:
    async def go() -> None:
        beat = b": still working\n\n"
        async with replicas(streams(beat + event(0) + beat + event(1), dies=True), streams(event(0) + event(1) + beat + event(2))) as made:
            assert (await ask(made)).body == beat + event(0) + beat + event(1) + beat + event(2)

    run(go())


def test_lines_of_json_go_on_too() -> None:
    async def go() -> None:
        headers = {"content-type": "application/x-ndjson"}
        lines = b"".join(b'{"response":"t%d","done":false}\n' % at for at in range(6))
        async with replicas(streams(lines[:80], dies=True, headers=headers), streams(lines, headers=headers)) as made:
            assert (await ask(made, path="/api/generate")).body == lines

    run(go())


def test_an_answer_in_one_piece_is_asked_for_again() -> None:
    async def go() -> None:
        async def half(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
            await answer.prepare(request)
            await answer.write(b'{"id": 1')
            request.transport.abort()
            return answer

        async with replicas(dies, half, answers(200, b'{"id": 2}')) as made:
            client = await ask(made, path="/v1/embeddings")
            assert (client.status, client.body) == (200, b'{"id": 2}')

    run(go())


def test_a_replica_that_is_not_there_is_passed_over() -> None:
    async def go() -> None:
        async with replicas(streams(WHOLE)) as made:
            made.urls[0] = "http://127.0.0.1:9"
            assert (await ask(made)).body == WHOLE
            made.wishes.clear()
            assert (await ask(made, path="/v1/files/x")).status == 200  # it got nothing, so any request may go elsewhere

    run(go())


def test_a_replica_whose_machine_is_silent_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers the connection, as when a machine is lost. The request was not sent, so any request may go elsewhere."""
    monkeypatch.setattr("deploy.replicas.session.CONNECT_S", 0.2)
    with socket.socket() as silent, ExitStack() as clients:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):  # fill the queue of connections that nobody accepts
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(silent.getsockname())

        async def go() -> None:
            async with replicas(streams(WHOLE)) as made:
                made.urls[0] = f"http://127.0.0.1:{silent.getsockname()[1]}"
                assert (await ask(made, path="/v1/files/x")).status == 200

        run(go())


SILENT = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7000))
print(flush=True)
connection, _ = listener.accept()
connection.recv(1 << 16)
head = "HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ncontent-length: 9999\\r\\n\\r\\n"
connection.sendall(head.encode() + sys.argv[2].encode())
sys.stdin.read()
"""


@pytest.mark.skipif(not can_cut(), reason="may not make a network of its own, which tests cut")
def test_a_stream_goes_on_when_its_machine_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is lost in the middle of a stream, after a few events, and no packet says so."""
    monkeypatch.setattr("deploy.replicas.session.LOST_S", 1.0)

    async def go() -> None:
        with other_machine() as machine:
            words = [*machine.inside, sys.executable, "-c", SILENT, machine.far, WHOLE[:150].decode()]
            far = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
            assert far.stdout is not None
            await far.stdout.readline()
            try:
                async with replicas(streams(WHOLE)) as made:
                    made.urls[0] = f"http://{machine.far}:7000"
                    client = Client()
                    asking = asyncio.create_task(ask(made, client=client))
                    while len(client.body) < 100:
                        await asyncio.sleep(0.01)
                    machine.cut()
                    async with asyncio.timeout(30):
                        await asking
                    assert (client.status, client.body, client.is_whole) == (200, WHOLE, True)
                    assert made.wishes[1].avoided == {"r0"}
            finally:
                far.kill()
                await far.wait()

    run(go())


def test_a_request_that_acts_is_not_sent_twice() -> None:
    async def go() -> None:
        async with replicas(dies) as made:
            client = await ask(made, path="/v1/responses", body=b'{"background": true}')
            assert client.status == 502
            assert b"replica_lost" in client.body
            assert len(made.seen) == 1

    run(go())


@pytest.mark.parametrize(
    ("scripts", "status", "num"),
    [
        ((answers(429, b'{"error":{"code":"queue_full"}}'), streams(WHOLE)), 200, 2),
        ((*[answers(503, b"{}")] * 4, streams(WHOLE)), 200, 5),  # a server that starts or stops
        ((answers(429, b'{"error":{"code":"queue_full"}}'),), 429, 2),
        ((answers(429, b'{"error":{"code":"rate_limit_exceeded"}}'),), 429, 1),
        ((answers(400, b"{}"),), 400, 1),
        ((answers(500, b"{}"),), 500, 1),
    ],
)
def test_a_busy_replica_is_passed_over_and_other_errors_are_answers(scripts: Sequence[Script], status: int, num: int) -> None:
    async def go() -> None:
        async with replicas(*scripts) as made:
            assert (await ask(made)).status == status
            assert len(made.seen) == num

    run(go())


@pytest.mark.parametrize(("num", "num_asked"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_each_busy_replica_is_asked_once(num: int, num_asked: int) -> None:
    async def go() -> None:
        async with replicas(answers(429, b'{"error":{"code":"queue_full"}}', **{"retry-after": "7"}), num=num) as made:
            client = await ask(made)
            assert (client.status, client.headers["retry-after"], len(made.seen)) == (429, "7", num_asked)
            assert b"queue_full" in client.body

    run(go())


def test_a_replica_that_stops_costs_no_try_at_a_full_queue() -> None:
    async def go() -> None:
        full = answers(429, b'{"error":{"code":"queue_full"}}')
        async with replicas(*[answers(503, b"{}")] * 2, full, full, streams(WHOLE), num=5) as made:
            assert ((await ask(made)).status, len(made.seen)) == (200, 5)

    run(go())


def test_a_busy_replica_is_asked_again_after_another_one_died() -> None:
    """The other replica may have had the request for so long that the busy one has room meanwhile."""

    async def go() -> None:
        full = answers(429, b'{"error":{"code":"queue_full"}}')
        for last, status in ((answers(200, b"{}"), 200), (full, 429)):
            async with replicas(full, dies, last) as made:
                assert ((await ask(made)).status, len(made.seen)) == (status, 3)
                assert made.wishes[2].avoided == made.wishes[2].lost == {"r1"}

    run(go())


def test_other_requests_hear_which_replicas_may_be_gone() -> None:
    async def go() -> None:
        stops = answers(503, ApiError(SHUTTING_DOWN, "the server stops").body())
        scripts = dies, answers(429, b'{"error":{"code":"queue_full"}}'), stops, streams(WHOLE)
        async with replicas(*scripts, num=5) as made:
            made.urls[3] = "http://127.0.0.1:9"
            assert (await ask(made)).body == WHOLE
            assert made.wishes[-1].avoided == {"r0", "r1", "r2", "r3"} and made.wishes[-1].lost == {"r0", "r2", "r3"}

    run(go())


OF_503 = [kind for kind in TABLE if kind.status == 503 and kind is not NO_REPLICA]


@pytest.mark.parametrize("kind", OF_503, ids=lambda kind: kind.code)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
def test_only_a_replica_that_stops_may_be_gone(kind: ErrorKind, path: str) -> None:
    """One that has too many connections, or one model that is not ready, still serves other requests best if it has their prompts."""

    async def go() -> None:
        refused = refusal(path, ApiError(kind, "retry later"))
        refuses = answers(refused.status_code, bytes(refused.body))
        for scripts in ((refuses, streams(WHOLE)), (streams(WHOLE[:150], dies=True), refuses, streams(WHOLE))):
            async with replicas(*scripts, num=3) as made:
                assert (await ask(made, path=path)).body == WHOLE
                *died, away = (f"r{at}" for at in range(len(scripts) - 1))
                assert made.wishes[-1].avoided == {*died, away}
                assert made.wishes[-1].lost == ({*died, away} if kind is SHUTTING_DOWN else {*died})

    run(go())


def test_a_busy_replica_continues_the_stream_of_another_one() -> None:
    async def go() -> None:
        scripts = answers(429, b'{"error":{"code":"queue_full"}}'), streams(WHOLE[:150], dies=True), streams(WHOLE)
        async with replicas(*scripts) as made:
            client = await ask(made)
            assert (client.status, client.body, len(made.seen)) == (200, WHOLE, 3)

    run(go())


def test_ids_name_the_replica_that_answers() -> None:
    """A later request that names such an id goes to this replica."""

    async def go() -> None:
        async with replicas(answers(429, b'{"error":{"code":"queue_full"}}'), dies, answers(200, b"{}"), num=3) as made:
            assert (await ask(made, path="/v1/responses")).status == 200
            nonces = [headers[HEADER].split(" ")[1] for _, headers, _ in made.seen]
            assert [bytes.fromhex(nonce)[:4] for nonce in nonces] == [place_of(f"r{at}") for at in range(3)]

    run(go())


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_replica_that_has_the_earlier_response_is_not_passed_over(status: int) -> None:
    """The request is not sent to another replica, which would answer that there is no such response."""

    async def go() -> None:
        async with replicas(answers(status, b'{"error":{"code":"queue_full"}}', **{"retry-after": "7"})) as made:
            body = json.dumps({"previous_response_id": f"resp_{place_of('r0').hex()}00"}).encode()
            client = await ask(made, path="/v1/responses", body=body)
            assert (client.status, client.headers["retry-after"], len(made.seen)) == (status, "7", 1)

    run(go())


def test_a_probe_hears_that_no_server_is_ready() -> None:
    async def go() -> None:
        async with replicas(answers(503, b"{}")) as made:
            assert (await ask(made, method="GET", path="/health/ready")).status == 503
            assert len(made.seen) == 2

    run(go())


def test_a_replica_that_would_go_on_otherwise_ends_the_stream() -> None:
    async def go() -> None:
        async with replicas(streams(WHOLE[:150], dies=True), streams(event(9) + WHOLE)) as made:
            with pytest.raises(Departure):
                await ask(made)

    run(go())


def test_a_replica_with_another_model_is_passed_over() -> None:
    async def go() -> None:
        async with replicas(streams(WHOLE[:150], dies=True), answers(412, b"{}"), streams(WHOLE)) as made:
            assert (await ask(made)).body == WHOLE

    run(go())


def test_a_request_that_ends_replicas_does_not_get_all_of_them() -> None:
    async def go() -> None:
        async with replicas(dies) as made:
            client = await ask(made)
            assert client.status == 503
            assert len(made.seen) == MOST_LOST
        async with replicas(streams(WHOLE[:150], dies=True), dies) as made:
            client = Client()
            with pytest.raises(GivenUp, match="replicas have ended"):
                await ask(made, client=client)
            assert not client.is_whole

    run(go())


def test_comments_of_replicas_that_end_are_no_progress() -> None:
    """A stream that has no token yet sends comments, so a request that ends replicas before its first token gets some from each of them."""

    async def go() -> None:
        async with replicas(*[streams(b": still working\n\n", dies=True)] * MOST_LOST, streams(WHOLE)) as made:
            client = Client()
            with pytest.raises(GivenUp, match="replicas have ended"):
                await ask(made, client=client)
            assert len(made.seen) == MOST_LOST and not client.is_whole

    run(go())


def test_patience_ends() -> None:
    async def go() -> None:
        async def nothing(_wish: Wish) -> Lease | None:
            return None

        async with replicas(streams(WHOLE)) as made:
            made.borrow = nothing  # type: ignore[method-assign]
            client = await ask(made, patience_s=0.01)
            assert client.status == 503
            assert b"no replica has answered within 0.01 s" in client.body
            assert client.headers["retry-after"] and client.headers["x-should-retry"] == "true"

    run(go())


def test_a_wait_for_a_replica_ends_with_the_patience() -> None:
    """Ray may let a request wait for a replica for longer."""

    async def go() -> None:
        async def waits(_wish: Wish) -> Lease | None:
            await asyncio.sleep(60)
            return None

        async with replicas(streams(WHOLE)) as made:
            made.borrow = waits  # type: ignore[method-assign]
            async with asyncio.timeout(30):
                client = await ask(made, patience_s=0.01)
            assert client.status == 503 and b"no replica has answered within 0.01 s" in client.body

    run(go())


def test_time_in_which_a_replica_has_the_request_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has the request for longer than the patience: two end, and one says then that it stops."""
    skipped_s = [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + skipped_s[0])
    monkeypatch.setattr("deploy.ray.passage.time", clock)

    async def go() -> None:
        async def ends(request: web.Request) -> web.StreamResponse:
            skipped_s[0] += 1000.0
            return await dies(request)

        async def stops(request: web.Request) -> web.StreamResponse:
            skipped_s[0] += 1000.0
            return await answers(503, b"{}")(request)

        async with replicas(stops, ends, ends, stops, answers(200, b"{}"), num=6) as made:
            client = await ask(made, path="/v1/embeddings", patience_s=600.0)
            assert (client.status, len(made.seen)) == (200, 5)

    run(go())


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", dict), ("/v1/messages", dict), ("/api/chat", str)])
def test_a_refusal_has_the_shape_of_its_api(path: str, kind: type) -> None:
    async def go() -> None:
        async with replicas(dies, num=1) as made:
            refused = json.loads((await ask(made, path=path)).body)
            assert isinstance(refused["error"], kind)
            assert ("type" in refused) is (path == "/v1/messages")

    run(go())


def test_a_client_that_leaves_ends_the_request() -> None:
    async def go() -> None:
        left = asyncio.Event()

        async def endless(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse(headers=SSE)
            await answer.prepare(request)
            try:
                while True:
                    await answer.write(event(0))
                    await asyncio.sleep(0.001)
            finally:
                left.set()

        async with replicas(endless) as made:
            client = Client()
            asking = asyncio.create_task(ask(made, client=client))
            while not client.body:
                await asyncio.sleep(0.001)
            client.gone.set()
            await asking
            await left.wait()
            assert not client.is_whole
            assert made.open_requests["r0"] == 0

    run(go())


def test_other_content_is_passed_on_as_it_comes() -> None:
    async def go() -> None:
        headers = {"content-type": "application/wasm"}
        async with replicas(streams(WHOLE, headers=headers)) as made:
            assert (await ask(made, method="GET", path="/web/m/x.wasm")).body == WHOLE
        async with replicas(streams(WHOLE, headers=headers, dies=True)) as made:
            with pytest.raises(aiohttp.ClientError):
                await ask(made, method="GET", path="/web/m/x.wasm")

    run(go())
