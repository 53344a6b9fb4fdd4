"""Send all writes of one iteration of the event loop together, right after the iteration.

An engine step brings a token for every stream. If each token were sent as soon as it is formatted, each write would wake its client while
other tokens still wait to be formatted. All tokens of a step are sent sooner if they are written together. All data that a connection
writes in one iteration is sent by one call, unless it is more than MAX_HELD_BYTES.
"""

from __future__ import annotations

import asyncio
from typing import Any

MAX_HELD_BYTES = 64 << 10  # bytes delayed for one connection; more are passed on at once, so that the transport's flow control sees them


class PendingWrites:
    """The connections of one event loop that have something to send."""

    def __init__(self) -> None:
        self._waiting: list[CoalescingTransport] = []

    def add(self, transport: CoalescingTransport) -> None:
        """Flush a transport right after this iteration."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        """Flush all transports that wait."""
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class CoalescingTransport(asyncio.Transport):
    """A transport that delays writes until the loop's iteration has ended. Closing sends delayed writes, aborting drops them."""

    def __init__(self, transport: asyncio.Transport, pending: PendingWrites) -> None:
        super().__init__()
        self._transport = transport
        self._pending = pending
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    def write(self, data: Any) -> None:
        """Delay a write. If more than MAX_HELD_BYTES are delayed then, pass all of them on."""
        if not self._held:
            self._pending.add(self)
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass the delayed writes on."""
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held, self._num_held_bytes = [], 0
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held, self._num_held_bytes = [], 0
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
