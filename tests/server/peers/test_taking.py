"""The thread that asks another server for pages, against givers that do not keep to the protocol."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from server.peers import taking
from server.peers.named import Giver
from server.peers.taking import Arrival, Transfer
from server.peers.wire import FRAME_BYTES, HEAD, NONCE_BYTES, Ask, Offer, Proofs, encode_offer

NONCE = bytes(NONCE_BYTES)
PAGE_BYTES = 1000


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        made.settimeout(60)
        yield made


def transfer_from(listener: socket.socket) -> Transfer:
    ask = Ask("same", (10, PAGE_BYTES), NONCE, bytes(16), 0, 60.0, time.time())
    return Transfer(Giver("127.0.0.1", listener.getsockname()[1]), ask, Proofs("a secret of tests"))


def answered(listener: socket.socket, body: bytes) -> tuple[list[Arrival], str]:
    """Return what a transfer gets from a giver that answers with `body` and then waits, and why the transfer ends."""
    transfer, held = transfer_from(listener), list[socket.socket]()

    def answer() -> None:
        client, _ = listener.accept()
        held.append(client)
        client.recv(1 << 16)
        with suppress(OSError):
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)

    giver = threading.Thread(target=answer)
    giver.start()
    transfer.begin()
    found: list[Arrival] = []
    while (arrival := transfer.arrivals.get(timeout=60)) is not None:
        found.append(arrival)
    giver.join()
    for client in held:
        client.close()
    return found, transfer.fault


def test_no_more_is_read_before_its_proof_than_a_frame_may_have(listener: socket.socket) -> None:
    """A giver without the secret can announce any length. The giver of this test sends nothing after the head."""
    most = FRAME_BYTES + PAGE_BYTES
    found, fault = answered(listener, HEAD.pack(most + 1, bytes(32)))
    assert not found and fault == f"it announces a frame of {most + 1} bytes; expected at most {most}"


def test_the_largest_frame_is_taken(listener: socket.socket) -> None:
    proofs, offer, pages = Proofs("a secret of tests"), Offer(16, (0, 0)), bytes(FRAME_BYTES + PAGE_BYTES)
    body = proofs.frame(NONCE, 0, encode_offer(offer)) + proofs.frame(NONCE, 1, pages) + HEAD.pack(1 << 31, bytes(32))
    found, fault = answered(listener, body)
    assert found == [offer, pages] and "announces" in fault


def test_an_empty_frame_with_a_right_proof_arrives(listener: socket.socket) -> None:
    """The transfer passes such a frame on, and the engine refuses it: see `test_page_exchange.py`."""
    proofs = Proofs("a secret of tests")
    body = b"".join(proofs.frame(NONCE, number, data) for number, data in enumerate((encode_offer(Offer(16, (0, 0))), b"")))
    found, _ = answered(listener, body + HEAD.pack(1 << 31, bytes(32)))
    assert found == [Offer(16, (0, 0)), b""]


def test_a_transfer_that_is_cancelled_while_it_connects_asks_for_nothing(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = transfer_from(listener)

    class Cancelled(taking._Connection):
        def connect(self) -> None:
            super().connect()
            transfer.cancel()

    monkeypatch.setattr(taking, "_Connection", Cancelled)
    transfer.begin()
    client, _ = listener.accept()
    with client:
        client.settimeout(60)
        assert client.recv(1) == b"", "the connection is closed, and no ask was sent"
