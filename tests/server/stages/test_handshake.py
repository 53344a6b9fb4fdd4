"""Only ends that know the same secret introduce themselves, and nobody waits long for a stranger."""

from __future__ import annotations

import socket
import threading

import pytest

from server.stages import handshake
from server.stages.handshake import MAGIC, HandshakeFailed, TurnedAway, introduce, welcome

SECRET = "a secret of some length"


def meet(worker: str, host: str) -> tuple[str, str]:
    """Let a worker and a host with these secrets meet. Return what each of them says, or "" if it trusts the other."""
    near, far = socket.socketpair()
    said: list[str] = []

    def as_host() -> None:
        try:
            welcome(far, host)
            said.append("")
        except HandshakeFailed as error:
            said.append(str(error))
        finally:
            if said[-1]:
                far.close()

    thread = threading.Thread(target=as_host)
    thread.start()
    try:
        introduce(near, worker)
        own = ""
    except HandshakeFailed as error:
        own = str(error)
    finally:
        thread.join()
        near.close()
        far.close()
    return own, said[0]


def test_equal_secrets() -> None:
    assert meet(SECRET, SECRET) == ("", "")


def test_other_secrets() -> None:
    own, other = meet(SECRET, SECRET + "!")
    assert "refuses this server's stage secret" in own and "another stage secret" in other


@pytest.mark.parametrize("rubbish", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", MAGIC, MAGIC + bytes(64), b"", bytes(200)])
def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch, rubbish: bytes) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    near, far = socket.socketpair()
    near.sendall(rubbish)
    with pytest.raises(HandshakeFailed):
        welcome(far, SECRET)
    near.close()
    far.close()


def test_an_answer_of_an_earlier_meeting_is_worth_nothing() -> None:
    """The proof depends on random bytes of both ends."""
    proofs: list[bytes] = []
    for replay in (False, True):
        near, far = socket.socketpair()
        near.sendall(MAGIC + bytes(32))
        thread = threading.Thread(target=lambda end=far: proofs.append(_outcome(end)))
        thread.start()
        theirs = near.recv(32)
        near.sendall(proofs[0] if replay else handshake._proof(SECRET, b"worker", bytes(32), theirs))
        if not replay:
            proofs.insert(0, handshake._proof(SECRET, b"worker", bytes(32), theirs))
        thread.join()
        near.close()
        far.close()
    assert proofs[1:] == [b"trusted", b"refused"]


def _outcome(end: socket.socket) -> bytes:
    try:
        welcome(end, SECRET)
    except HandshakeFailed:
        return b"refused"
    return b"trusted"


def test_who_is_turned_away_hears_what_to_do() -> None:
    near, far = socket.socketpair()
    far.close()
    with pytest.raises(TurnedAway, match="no `relaxserve stage` of this version, or has too many connections"):
        introduce(near, SECRET)
    near.close()
