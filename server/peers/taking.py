"""Ask another server for pages of its prefix cache. A thread receives and checks pages, and the engine takes them between steps."""

from __future__ import annotations

import http.client
import queue
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field

import msgspec

from server.peers.named import Giver
from server.peers.wire import HEAD, PATH, PROOF_HEADER, Ask, Offer, PeerFault, Proofs, decode_offer, encode_ask

CONNECT_S = 1.0  # time to connect to the other server
FRAMES_AHEAD = 4  # maximum number of frames in the queue to the engine
MOST_REFUSAL_BYTES = 4096  # bytes of a refusal that are read, for the log

Arrival = Offer | bytes | None  # None: nothing follows


class _Connection(http.client.HTTPConnection):
    """A connection for one request. In HTTP/1.0 the answer ends when the connection ends, so the other server sends no lengths of chunks,
    which this server would have to trust."""

    _http_vsn = 10
    _http_vsn_str = "HTTP/1.0"


@dataclass(slots=True, eq=False)
class Transfer:
    """The transfer of the pages that one request waits for. A thread puts the offer and the pages into a queue. `fault` says why the
    transfer ended early; it is empty while there is no fault."""

    giver: Giver
    ask: Ask
    proofs: Proofs
    end_s: float = 0.0  # monotonic time at which the request stops waiting
    fault: str = ""
    arrivals: queue.Queue[Arrival] = field(default_factory=lambda: queue.Queue[Arrival](FRAMES_AHEAD))
    _socket: socket.socket | None = None  # None: the connection is not open yet
    _is_cancelled: bool = False  # nobody takes from `arrivals` any more

    def begin(self) -> None:
        """Start the thread that receives the pages. The time for which the request waits begins now."""
        self.end_s = time.monotonic() + self.ask.limit_s
        threading.Thread(target=self._run, name="take-pages", daemon=True).start()

    def cancel(self) -> None:
        """Make the thread end. Nothing that arrives later is used."""
        self._is_cancelled = True
        if (connection := self._socket) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with suppress(queue.Empty):
            while True:  # empty the queue, because the thread may wait for room in it
                self.arrivals.get_nowait()

    def _run(self) -> None:
        """Receive the pages, and then put None into the queue. If the transfer fails, set `fault` first. This runs on the thread."""
        try:
            self._exchange()
        except PeerFault as error:
            self.fault = str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.fault = f"the connection has failed: {error or type(error).__name__}"
        finally:
            self._put(None)

    def _exchange(self) -> None:
        """Send the ask, and read the answer. Raise PeerFault if the other server refuses, or if its answer is not valid. Return early if
        the transfer is cancelled."""
        body = encode_ask(self.ask)
        headers = {PROOF_HEADER: self.proofs.head_of(body), "content-type": "application/json"}
        with closing(_Connection(self.giver.host, self.giver.port, timeout=CONNECT_S)) as connection:
            connection.connect()
            self._socket = plain = connection.sock
            if self._is_cancelled:  # `cancel` was called before there was a socket to shut down
                return
            plain.settimeout(self._left_s)
            connection.request("POST", PATH, body, headers)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise PeerFault(f"it answers {answer.status}: {_refusal(answer.read(MOST_REFUSAL_BYTES))}")
                if answer.chunked:
                    raise PeerFault("it answers in chunks, which HTTP/1.0 has not")
                self._read(answer, plain)

    def _read(self, answer: http.client.HTTPResponse, plain: socket.socket) -> None:
        """Put the frames of an answer into the queue: first the offer, then pages. Raise PeerFault if a frame is not valid. Return early if
        the transfer is cancelled."""
        number = 0
        while head := answer.read(HEAD.size):
            if len(head) < HEAD.size:
                raise PeerFault("it ended in the middle of a frame")
            size, proof = HEAD.unpack(head)
            if size > self.ask.most_frame_bytes:  # the length is not proved until the whole frame has arrived
                raise PeerFault(f"it announces a frame of {size} bytes; expected at most {self.ask.most_frame_bytes}")
            payload = answer.read(size)
            if len(payload) < size:
                raise PeerFault("it ended in the middle of a frame")
            self.proofs.check_frame(self.ask.nonce, number, payload, proof)
            self._put(_offer_in(payload) if number == 0 else payload)
            number += 1
            if self._is_cancelled:
                return
            plain.settimeout(self._left_s)

    @property
    def _left_s(self) -> float:
        """The seconds for which the request still waits."""
        return max(self.end_s - time.monotonic(), 0.001)

    def _put(self, arrival: Arrival) -> None:
        """Put an arrival into the queue, once the queue has room, unless the transfer is cancelled."""
        while not self._is_cancelled:
            with suppress(queue.Full):
                self.arrivals.put(arrival, timeout=0.05)
                return


def _offer_in(payload: bytes) -> Offer:
    """Return the offer in a frame. Raise PeerFault if the frame has none."""
    try:
        return decode_offer(payload)
    except msgspec.MsgspecError as error:
        raise PeerFault(f"its first frame is no offer: {error}") from error


def _refusal(body: bytes) -> str:
    """Return the message of a refusal, for the log, or the beginning of the body if it has no message."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:500]
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError, UnicodeDecodeError):
        return repr(body[:200])
