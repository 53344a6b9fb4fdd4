"""The HTTP client that reaches the servers of replicas."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp

from server.lost_machines import notice_loss

CONNECT_S = 5.0
LOST_S = 20.0  # seconds without acknowledgements after which the kernel breaks a connection
IDLE_S = 30.0  # shorter than the keep_alive_s of servers
MOST_HEADER_BYTES = 64 << 10  # more than the longest header that servers write, which names the fields that they ignore


def new_session() -> aiohttp.ClientSession:
    """Return a client for requests to servers. Only connecting has a time limit; cookies are ignored, and answers stay compressed."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_watched_socket)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_field_size=MOST_HEADER_BYTES,
    )


def _watched_socket(address: Any) -> socket.socket:
    """Return a socket whose connection breaks after LOST_S if the other machine has lost power or its network, or accepts no bytes for that
    long. Servers read a body as it arrives, also while they are busy, so a server that accepts nothing hangs."""
    made = socket.socket(address[0], address[1], address[2])
    notice_loss(made, LOST_S)
    made.setblocking(False)
    return made
