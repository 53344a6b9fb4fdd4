"""A proxy that changes what a server answers: it stands between two servers that exchange pages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Meddler:
    """Passes each request on, and gives the whole answer to `change`, which returns the bytes to send. If it returns None, the client gets
    nothing until the meddler closes."""

    def __init__(self, port: int, change: Callable[[bytes], bytes | None]) -> None:
        self.change = change
        self.num_answers = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._held:
            client.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            server.sendall(message_of(client))
            answer = b""
            with suppress(ConnectionError):
                while data := server.recv(1 << 16):
                    answer += data
        changed = self.change(answer)
        self.num_answers += 1
        if changed is None:
            self._held.append(client)
            return
        with suppress(OSError), client:  # the client may have gone
            client.sendall(changed)


def message_of(client: socket.socket) -> bytes:
    """Read the next message of HTTP, which states its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line.partition(b":")[2]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += client.recv(1 << 16)
    return head + b"\r\n\r\n" + body
