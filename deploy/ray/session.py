"""The HTTP client of the ingress."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp

CONNECT_S = 5.0
IDLE_S = 30.0  # shorter than the keep_alive_s of servers


def new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_watched_socket)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _watched_socket(address: Any) -> socket.socket:
    """Return a socket whose connection breaks soon if the other machine is gone."""
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 20_000)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setblocking(False)
    return made
