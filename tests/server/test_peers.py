"""Two servers with real worker processes give each other pages of their prefix caches. The null model answers with other tokens if a page
has other contents than those of its prompt."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from server.api import peers
from server.messages import Load, Peering
from server.models.state import ModelSpec
from server.peers.named import HEADER, header_of
from server.peers.wire import PATH, PROOF_HEADER, SKEW_S, Ask, Proofs, encode_ask
from server.workers.supervisor import Supervisor
from tests.doubles.process import NullConfig, null_source
from tests.doubles.worker import NullScript
from tests.server.conftest import Running
from tests.server.meddler import Meddler

KEY = "0123456789abcdef"
SECRET = "a secret of the fleet"
SOURCE = null_source(NullConfig(vocab_size=256))
ANSWER = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "logprobs": 2}
UNLIMITED = Peering(SECRET, 1e18, 600.0, 0.0)  # a busy machine must not make a transfer too late


def make_worker(spec: ModelSpec, progress, peering: Peering | None = UNLIMITED, source: str = SOURCE) -> Supervisor:
    load = Load(spec.name, source, max_batch=spec.max_batch, peers=peering)
    return Supervisor([sys.executable, "-m", "tests.doubles.process"], load, progress=progress)


@pytest.fixture
def peer(serve, tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return lambda **options: serve(**{"make_worker": make_worker, "ingress_key": KEY, "peer_secret_file": file, **options})


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 256 for i in range(num_tokens)]


def ask(server, ids: list[int], giver=None, **options) -> httpx.Response:
    headers = {} if giver is None else {HEADER: header_of(KEY, giver.url, computes=options.pop("computes", False))}
    return server.http().post("/v1/completions", json={"prompt": ids, **ANSWER, **options}, headers=headers)


def choices(answer: httpx.Response) -> object:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until(holds: Callable[[], object]) -> bool:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s, "not within 60 s"
        time.sleep(0.02)
    return True


def counted(server, name: str, wanted: float) -> bool:
    """Wait until a counter has a value: workers report at intervals."""
    client, form = server.http(), re.compile(rf"^relaxserve:{name}_total{{[^}}]*}} (\S+)$", re.MULTILINE)
    return wait_until(lambda: (found := form.search(client.get("/metrics").text)) is not None and float(found[1]) == wanted)


def test_a_prompt_that_one_server_computed_is_continued_by_another(peer):
    giver, taker = peer(), peer()
    ids = prompt(500)
    first = ask(giver, ids)
    second = ask(taker, ids, giver)
    assert choices(second) == choices(first)
    assert (cached(first), cached(second)) == (0, 496)
    assert counted(taker, "peer_pages_taken", 31) and counted(giver, "peer_pages_given", 31)
    assert counted(taker, "peer_takes_failed", 0)
    again = ask(taker, [*ids, *prompt(100, 3)], giver)
    assert choices(again) == choices(ask(giver, [*ids, *prompt(100, 3)])) and cached(again) == 496


@pytest.fixture
def meddled(peer):
    """Return a giver, a taker, and a proxy between them that changes what the giver answers."""
    made: list[Meddler] = []

    def make(change, **options) -> tuple[Running, Running, Meddler]:
        giver, taker = peer(), peer(**options)
        made.append(Meddler(giver.port, change))
        return giver, taker, made[-1]

    yield make
    for one in made:
        one.close()


def mutation(answer: bytes, rng: random.Random) -> bytes:
    """Return the answer with one change, in most cases in its body, or random bytes in its place."""
    body = answer.index(b"\r\n\r\n") + 4
    at = rng.randrange(body if rng.random() < 0.8 else 0, len(answer))
    stop = min(len(answer), at + rng.choice((1, 1, 4, 40, len(answer))))
    part = answer[at:stop]
    flipped = bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:]
    return rng.choice(
        (
            answer[:at],
            answer[:at] + answer[stop:],
            answer[:at] + flipped + answer[stop:],
            answer[:at] + rng.randbytes(len(part)) + answer[stop:],
            answer[:at] + part + part + answer[stop:],
            answer[:at] + b"\xff" * 8 + answer[at:],
            rng.randbytes(rng.randrange(2000)),
        )
    )


def test_the_taker_answers_right_whatever_arrives(meddled):
    """Each change is of another prompt, so that no page of an earlier one helps."""
    rng, number = random.Random(0), 500
    giver, taker, meddler = meddled(lambda answer: mutation(answer, rng))
    pid = taker.registry.models()[0].loaded.worker.pid
    for i in range(number):
        ids = [i % 256, i // 256, *prompt(80)]
        assert choices(ask(taker, ids, meddler, max_tokens=4)) == choices(ask(giver, ids, max_tokens=4)), i
    assert meddler.num_answers == number
    assert taker.registry.models()[0].loaded.worker.pid == pid
    meddler.change = lambda answer: answer
    ids = prompt(400, 5)
    assert choices(ask(giver, ids)) == choices(last := ask(taker, ids, meddler)) and cached(last) == 384


def test_an_answer_of_another_ask_is_not_taken(meddled):
    """A stored answer has right proofs, but of another nonce. The same tenant may ask for it again, so it must not be mistaken."""
    stored: list[bytes] = []

    def repeat(answer: bytes) -> bytes:
        stored.append(answer)
        return stored[0]

    giver, taker, meddler = meddled(repeat)
    for first in (1, 2):
        ids = prompt(300, first)
        assert choices(ask(giver, ids)) == choices(ask(taker, ids, meddler))
    assert counted(taker, "peer_takes_failed", 1) and counted(taker, "peer_pages_taken", 299 // 16)


def test_a_giver_that_dies_in_the_middle(meddled):
    giver, taker, meddler = meddled(lambda answer: answer[: len(answer) // 2])
    worker = giver.registry.models()[0].loaded.worker

    def die(answer: bytes) -> bytes:
        os.kill(worker.pid, signal.SIGKILL)
        return answer[: len(answer) // 2]

    meddler.change = die
    ids = prompt(400)
    first = ask(giver, ids)
    assert choices(ask(taker, ids, meddler)) == choices(first)
    assert choices(ask(taker, prompt(400, 9), meddler)) == choices(ask(giver, prompt(400, 9)))


def test_a_giver_that_hangs_is_waited_for_no_longer_than_the_patience(meddled):
    patience = Peering(SECRET, 1e18, 0.2, 0.0)
    giver, taker, meddler = meddled(lambda _answer: None, make_worker=partial(make_worker, peering=patience))
    ids = prompt(400)
    first = ask(giver, ids)
    assert choices(ask(taker, ids, meddler)) == choices(first)
    assert counted(taker, "peer_takes_failed", 1)


def test_a_giver_that_is_away(peer):
    taker, other = peer(), peer()
    url, ids = SimpleNamespace(url="http://127.0.0.1:1"), prompt(300)
    assert choices(ask(taker, ids, url)) == choices(ask(other, ids))


def test_a_giver_computes_the_prompt(peer):
    giver, taker, alone = peer(), peer(), peer()
    ids = prompt(500)
    answer = ask(taker, ids, giver, computes=True)
    assert choices(answer) == choices(ask(alone, ids)) and cached(answer) == 496
    assert counted(giver, "prefill_tokens", 496) and counted(taker, "prefill_tokens", 4)


def test_pages_of_another_model_are_refused_by_name(peer, tmp_path, caplog):
    mark = tmp_path / "renamed"
    mark.touch()
    other = null_source(NullConfig(vocab_size=256, renamed_when=str(mark)))
    giver, taker = peer(make_worker=partial(make_worker, source=other)), peer()
    ids = prompt(300)
    ask(giver, ids)
    answer = ask(taker, ids, giver)
    assert cached(answer) == 0 and counted(taker, "peer_takes_failed", 1)
    ready = giver.registry.models()[0].loaded.worker.ready
    body = asked(b"\0" * 16, fingerprint="fp_null", sizes=(ready.cache_groups[0].page_bytes,))
    refused = give(giver, body)
    assert refused.status_code == 412
    assert "fp_null" in refused.text and "null (fp_other" in refused.text


def asked(digests: bytes, *, fingerprint: str = "fp_null", sizes: tuple[int, ...] = (196,), **more) -> bytes:
    return encode_ask(Ask(fingerprint, sizes, b"\1" * 16, digests, 0, 5.0, **{"sent_s": time.time(), **more}))


def give(server, body: bytes, secret: str = SECRET, proved: bytes | None = None) -> httpx.Response:
    headers = {PROOF_HEADER: Proofs(secret).head_of(body if proved is None else proved)}
    return server.http().post(PATH, content=body, headers=headers)


def test_only_who_knows_the_secret_gets_pages(peer):
    server, body = peer(api_keys=("a-key-of-a-client",)), asked(b"\0" * 32)
    assert give(server, body).status_code == 200
    assert give(server, body, "another secret of a fleet").status_code == 401
    assert give(server, body + b" ", proved=body).status_code == 401
    for headers in ({}, {"authorization": "Bearer a-key-of-a-client"}, {PROOF_HEADER: "0" * 64 + " " + "0" * 64}):
        assert server.http().post(PATH, content=body, headers=headers).status_code == 401


def test_a_server_without_the_secret_gives_nothing(serve):
    assert give(serve(), asked(b"\0" * 32)).status_code == 404


def test_a_giver_is_named_only_with_the_key_of_the_ingress(peer):
    giver, taker = peer(), peer()
    ids = prompt(300)
    ask(giver, ids)
    for header in (header_of("another-key-0123", giver.url, computes=False), giver.url, f"{KEY} file:///etc/passwd"):
        answer = taker.http().post("/v1/completions", json={"prompt": ids, **ANSWER}, headers={HEADER: header})
        assert answer.status_code == 200 and cached(answer) == 0
        ids = ids[1:]
    assert counted(taker, "peer_takes", 0)


def test_hostile_asks(peer):
    """A peer with the secret may still be broken: it gets an error, or no pages."""
    server, rng = peer(), random.Random(1)
    whole = asked(rng.randbytes(320), prompt_ids=rng.randbytes(8), cache_salt="x")
    for _ in range(300):
        at = rng.randrange(len(whole))
        body = whole[:at] + rng.choice((b"", b'"', b"[" * 100, b"-1", rng.randbytes(5))) + whole[at + rng.randrange(20) :]
        assert give(server, body).status_code in (200, 400, 401, 412, 413), body
    ids = b"\xff\xff\xff\x7f" * 16
    refused = give(server, asked(b"\0" * 16, prompt_ids=ids))
    assert refused.status_code == 400 and "expected 0 to 255" in refused.text
    assert choices(ask(server, prompt(50)))


def test_a_prompt_is_not_computed_for_a_taker_that_has_gone(serve, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    server = serve(script=NullScript(prefill_s=3600.0), peer_secret_file=tmp_path / "secret")
    group = server.worker.ready.cache_groups[0]
    body = asked(b"\0" * 16, sizes=(group.page_bytes,), prompt_ids=bytes(64))
    with server.connect() as taker:
        head = f"POST {PATH} HTTP/1.1", "host: a", f"content-length: {len(body)}", f"{PROOF_HEADER}: {Proofs(SECRET).head_of(body)}"
        taker.sendall("\r\n".join((*head, "", "")).encode() + body)
        wait_until(lambda: server.worker.submits)
        assert server.worker.submits[0].params.max_tokens == 1 and not server.worker.aborted
    wait_until(lambda: server.worker.aborted)


def test_a_prompt_that_is_computed_too_late_is_refused_with_the_reason(serve, tmp_path, caplog):
    (tmp_path / "secret").write_text(SECRET)
    server = serve(script=NullScript(prefill_s=0.2), peer_secret_file=tmp_path / "secret")
    sizes = tuple(group.page_bytes for group in server.worker.ready.cache_groups)
    late = give(server, encode_ask(Ask("fp_null", sizes, b"\1" * 16, bytes(16), 0, 0.1, time.time(), prompt_ids=bytes(64))))
    assert late.status_code == 504 and "expected at most limit_s, 0.1 s" in late.text
    assert [record.getMessage() for record in caplog.records if record.name != "server.access"] == []


def test_an_ask_is_not_answered_much_later(peer):
    """Whoever has recorded an ask cannot get pages for it for ever."""
    server, now_s = peer(), time.time()
    for sent_s, status in ((now_s, 200), (now_s - 5 - SKEW_S - 60, 400), (now_s + SKEW_S + 60, 400), (0.0, 400)):
        answer = give(server, asked(b"\0" * 16, sent_s=sent_s))
        assert answer.status_code == status, answer.text
    assert "sent_s is 0.0" in answer.text and "set the clocks" in answer.text


def test_more_pages_than_a_prompt_may_have_are_refused(peer):
    server = peer()
    most = server.registry.models()[0].loaded.ready.max_context
    assert give(server, asked(b"\0" * (most // 16 * 16))).status_code == 200
    refused = give(server, asked(b"\0" * (most // 16 * 16 + 16)))
    assert refused.status_code == 400 and f"expected at most max_context, {most}" in refused.text


@pytest.mark.parametrize("reads", [False, True])
def test_a_taker_that_does_not_go_on_loses_its_place(serve, tmp_path, monkeypatch, reads: bool):
    """The taker neither reads nor leaves, or it reads and the worker sends nothing more. The place is free again when the time is over for
    which the taker said that it waits."""
    monkeypatch.setattr(peers, "MOST_GIVINGS", 1)
    (tmp_path / "secret").write_text(SECRET)
    script = NullScript(pages=repeat(bytes(1 << 20)))
    server = serve(script=script, peer_secret_file=tmp_path / "secret")
    sizes = tuple(group.page_bytes for group in server.worker.ready.cache_groups)
    body = encode_ask(Ask(server.worker.ready.fingerprint, sizes, b"\1" * 16, bytes(16), 0, 1.0, time.time()))
    with server.connect() as taker:
        head = f"POST {PATH} HTTP/1.1", "host: a", f"content-length: {len(body)}", f"{PROOF_HEADER}: {Proofs(SECRET).head_of(body)}"
        taker.sendall("\r\n".join((*head, "", "")).encode() + body)
        assert taker.recv(12) == b"HTTP/1.1 200"
        while reads and taker.recv(1 << 20):
            pass  # until the server ends the stream
        script.pages = ()
        wait_until(lambda: give(server, asked(bytes(16), fingerprint=server.worker.ready.fingerprint, sizes=sizes)).status_code == 200)


def test_only_so_many_are_given_pages_at_a_time(peer, monkeypatch):
    monkeypatch.setattr(peers, "MOST_GIVINGS", 0)
    refused = give(peer(), asked(b"\0" * 16))
    assert refused.status_code == 429 and "compute the prompt" in refused.text
