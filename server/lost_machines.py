"""Break a TCP connection soon after the other machine has lost power or its network, or the program there has stopped reading."""

from __future__ import annotations

import socket

NUM_PROBES = 3


def notice_loss(connection: socket.socket, within_s: float) -> None:
    """Let the kernel break a TCP connection if, for about `within_s` seconds, the other machine acknowledges neither data nor probes, or
    takes no bytes although some wait to be sent. Linux has one limit for both cases, so use this only for connections whose other end
    always reads."""
    pause_s = max(1, round(within_s / (NUM_PROBES + 1)))  # the kernel takes whole seconds
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, pause_s),
        (socket.TCP_KEEPINTVL, pause_s),
        (socket.TCP_KEEPCNT, NUM_PROBES),
        # how long data may stay unacknowledged, or wait because the other end takes none
        (socket.TCP_USER_TIMEOUT, round(within_s * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
