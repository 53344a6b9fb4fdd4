"""The ZMQ sockets of cache events, as in vLLM: one publishes the batches, the other one sends batches again that a subscriber has missed.

The first socket sends messages (topic, number, batch). A request to the second is the number of the first batch that is wanted, and may be
followed by a topic. Its answer is a message (number, batch) for each batch, and then one with the number -1. Numbers are big-endian, eight
bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import zmq

from server.fleet.cache_events import MOST_KEPT

log = logging.getLogger(__name__)

# Maximum number of batches that wait for a slow subscriber or for the receiver of a replay. Further ones are dropped, and the receiver sees
# by the numbers that it has missed some.
MOST_UNSENT = 2 * MOST_KEPT
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)

Replay = Callable[[int, bytes | None], Iterable[tuple[int, bytes]]]


class EventSockets:
    """The two sockets. `send` never waits: ZMQ's own thread writes to the subscribers, and batches that a slow subscriber does not take are
    dropped."""

    def __init__(self, address: str, replay_address: str | None, replay: Replay) -> None:
        """Bind the sockets. `replay` is `CacheEvents.replay`. If `replay_address` is None, there is no socket for replays. Raise
        zmq.ZMQError if an address cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay = replay
        self._thread: threading.Thread | None = None
        try:
            self._publishing = self._bound(zmq.PUB, address)
            if replay_address is not None:
                replaying = self._bound(zmq.ROUTER, replay_address)
                self.replay_address = replaying.get_string(zmq.LAST_ENDPOINT)
                self._thread = threading.Thread(target=self._serve_replays, args=(replaying,), name="cache-events", daemon=True)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.address = self._publishing.get_string(zmq.LAST_ENDPOINT)
        if self._thread is not None:
            self._thread.start()

    def send(self, topic: bytes, number: int, batch: bytes) -> None:
        """Publish a batch to all subscribers."""
        self._publishing.send_multipart((topic, number.to_bytes(NUMBER_BYTES, "big"), batch))

    def close(self) -> None:
        """Close both sockets, and end the thread that replays."""
        self._publishing.close(linger=0)
        self._context.term()  # raises ContextTerminated on the thread, and waits until the thread has closed its socket

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """Return a socket bound to an address. Raise zmq.ZMQError if that fails."""
        made = self._context.socket(kind)
        made.set_hwm(MOST_UNSENT)
        made.linger = 0
        made.bind(address)
        return made

    def _serve_replays(self, replaying: zmq.Socket[bytes]) -> None:
        """Answer requests for past batches until the context ends. This runs on a thread of its own."""
        while True:
            try:
                client, *asked = replaying.recv_multipart()
                self._answer(replaying, client, asked)
            except zmq.ContextTerminated:
                replaying.close(linger=0)
                return
            except zmq.ZMQError as error:
                log.warning("a replay of cache events ended early: %s", error)

    def _answer(self, replaying: zmq.Socket[bytes], client: bytes, asked: list[bytes]) -> None:
        """Send the batches that a client asks for, and then the message with the number -1. A request of another form is logged and gets no
        answer."""
        match asked:
            case [b"", first] if len(first) == NUMBER_BYTES:
                topic = None
            case [b"", first, topic] if len(first) == NUMBER_BYTES:
                pass
            case _:
                log.warning("a request for cache events has %d frames; expected a number of eight bytes, and maybe a topic", len(asked))
                return
        for number, batch in self._replay(int.from_bytes(first, "big"), topic):
            replaying.send_multipart((client, b"", number.to_bytes(NUMBER_BYTES, "big"), batch))
        replaying.send_multipart((client, b"", END, b""))
