"""Both ends of a connection to a stage prove that they know the same secret, without sending it.

    worker -> host    MAGIC, 32 random bytes
    host -> worker    32 random bytes
    worker -> host    HMAC(secret, "worker", both random bytes)
    host -> worker    HMAC(secret, "host", both random bytes)

All later data is neither encrypted nor signed, so the network between stages must be trusted, or be a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

MAGIC = b"relaxserve stage 1\n"
NONCE_BYTES = 32
HANDSHAKE_S = 5.0
REMEDY = "give both the same secret file, and load the model again if its secret has changed"


class HandshakeFailed(Exception):
    """The other end is no stage or worker of this version, has another secret, or does not answer in time."""


class Ended(HandshakeFailed):
    """The other end has ended the connection."""


class TurnedAway(HandshakeFailed):
    """The host has ended the connection before it sent its random bytes."""


def introduce(connection: socket.socket, secret: str) -> None:
    """Introduce this worker to a host. Afterwards, the connection still has a timeout. Raise TurnedAway if the host ends the connection at
    once, HandshakeFailed if the host does not know the secret or does not answer in time, or OSError if the connection fails later."""
    end_s = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(NONCE_BYTES)
    try:
        connection.sendall(MAGIC + ours)
        theirs = _read(connection, NONCE_BYTES, end_s)
    except (Ended, ConnectionError):
        text = "it ended the connection at once: it is no `relaxserve stage` of this version, or has too many connections of others"
        raise TurnedAway(f"{text}; install the same version on both") from None
    connection.sendall(_proof(secret, b"worker", ours, theirs))
    try:
        proof = _read(connection, NONCE_BYTES, end_s)
    except HandshakeFailed:
        raise HandshakeFailed(f"it refuses this server's stage secret: {REMEDY}") from None
    if not hmac.compare_digest(proof, _proof(secret, b"host", ours, theirs)):
        raise HandshakeFailed(f"it does not know this server's stage secret: {REMEDY}")


def welcome(connection: socket.socket, secret: str) -> None:
    """Let a worker introduce itself to this host. Afterwards, the connection still has a timeout. Raise HandshakeFailed if the worker is of
    another version, does not know the secret, or does not answer in time, or OSError if the connection fails."""
    end_s = time.monotonic() + HANDSHAKE_S
    if _read(connection, len(MAGIC), end_s) != MAGIC:
        raise HandshakeFailed("it is no worker of this version of relaxserve")
    theirs, ours = _read(connection, NONCE_BYTES, end_s), secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    if not hmac.compare_digest(_read(connection, NONCE_BYTES, end_s), _proof(secret, b"worker", theirs, ours)):
        raise HandshakeFailed("it has another stage secret: give both the same secret file")
    connection.sendall(_proof(secret, b"host", theirs, ours))


def _proof(secret: str, role: bytes, worker: bytes, host: bytes) -> bytes:
    """Return the proof of the end `role`. `worker` and `host` are the random bytes that these ends have sent."""
    return hmac.new(secret.encode(), role + worker + host, hashlib.sha256).digest()


def _read(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Read `num_bytes`. Raise HandshakeFailed if they have not come at the monotonic time `end_s`, or Ended if the connection ends."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        try:
            more = connection.recv(num_bytes - len(data))
        except TimeoutError:
            raise HandshakeFailed(f"it did not introduce itself within {HANDSHAKE_S:g} s: is it `relaxserve stage`?") from None
        if not more:
            raise Ended("it ended the connection")
        data += more
    return data
