"""Append requests and their answers to a file, for `relaxserve replay`. No request is stored unless the setting `keep_requests` names the
file, since the file holds what users write.

The setting `keep_requests_of`, or the administration while the server runs, says for which models and keys requests are kept. Each line is
a JSON object. Only requests that a model answered are kept, never headers, keys or the administration's requests. Another
thread writes, so that a slow disk delays no request; requests beyond MOST_WAITING or MOST_WAITING_BYTES are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import Final

from runtime.files import append_whole
from server.http.record import RequestRecord
from server.settings import SettingsError

log = logging.getLogger(__name__)

MOST_WAITING: Final = 1000  # maximum number of requests that wait to be written
MOST_WAITING_BYTES: Final = 256 << 20  # maximum size of the waiting requests and their answers
MOST_ANSWER_BYTES: Final = 16 << 20  # longer answers are not kept
CLOSE_S: Final = 5.0  # time to wait for the writer when the server stops


class Exchange:
    """A request and the answer so far."""

    __slots__ = ("answer", "body", "is_complete", "is_compressed", "num_bytes")

    def __init__(self) -> None:
        self.body = b""  # empty: the request has no body, or its endpoint reads the body
        self.is_compressed = False  # whether the answer is compressed with gzip
        self.answer: list[bytes] = []
        self.num_bytes = 0  # size of the answer so far
        self.is_complete = False  # whether the last part of the answer was added

    def add(self, part: bytes, *, more: bool) -> None:
        """Add a part of the answer. `more`: further parts follow. A part beyond MOST_ANSWER_BYTES is only counted, and the answer to a
        request without a body is ignored."""
        if not self.body:
            return
        self.num_bytes += len(part)
        self.is_complete = not more
        if self.num_bytes <= MOST_ANSWER_BYTES:
            self.answer.append(part)

    @property
    def size(self) -> int:
        return len(self.body) + self.num_bytes

    @property
    def is_kept(self) -> bool:
        """Whether the request has a body, and the answer is not too long."""
        return bool(self.body) and self.num_bytes <= MOST_ANSWER_BYTES


class KeptRequests:
    """The file of requests, and the thread that writes it."""

    def __init__(self, path: Path, of: Sequence[str]) -> None:
        """`of`: the requests to keep, as `model=PATTERN` or `key=PATTERN`."""
        self.path = path
        self.of = tuple(of)
        self._file = _open(path)
        self._ended: queue.SimpleQueue[tuple[RequestRecord, Exchange] | None] = queue.SimpleQueue()
        self._num_lost = 0  # requests that were dropped since the thread last wrote one
        self._num_taken_bytes = 0  # bytes of all exchanges that were put into the queue
        self._num_written_bytes = 0  # bytes of all exchanges that the thread has written or given up; only the thread changes this number
        self._thread = threading.Thread(target=self._write_all, name="kept requests", daemon=True)
        self._thread.start()

    def keep(self, record: RequestRecord, exchange: Exchange) -> None:
        """Queue an exchange that has ended, if a model answered it, `is_kept` is true, and `of` names its model or key. If too many
        exchanges or bytes wait already, only count this exchange as lost."""
        if not record.model or not exchange.is_kept or not self._is_wanted(record):
            return
        waiting = self.num_waiting_bytes
        if self._ended.qsize() >= MOST_WAITING or (waiting and waiting + exchange.size > MOST_WAITING_BYTES):
            self._num_lost += 1
            return
        self._num_taken_bytes += exchange.size
        self._ended.put((record, exchange))

    @property
    def num_waiting_bytes(self) -> int:
        return self._num_taken_bytes - self._num_written_bytes

    def _is_wanted(self, record: RequestRecord) -> bool:
        """Return whether `of` names the model or the key of a request."""
        named = {"model": record.model, "key": record.key}
        return any(fnmatchcase(named[kind], pattern) for kind, _, pattern in (each.partition("=") for each in self.of))

    def close(self) -> None:
        """Wait until the queued exchanges are written, for at most CLOSE_S."""
        self._ended.put(None)
        self._thread.join(CLOSE_S)

    def _write_all(self) -> None:
        """Write exchanges until the server stops. Log why an exchange could not be written, and how many were lost. This method runs on a
        thread of its own."""
        with self._file as file:
            while (ended := self._ended.get()) is not None:
                lost, self._num_lost = self._num_lost, 0
                try:
                    append_whole(file, f"{_line(*ended)}\n".encode())
                except OSError as error:
                    log.warning("a request could not be kept: %s", error.strerror or error)
                except Exception:  # the thread goes on with further exchanges
                    log.exception("request %s could not be kept", ended[0].request_id)
                self._num_written_bytes += ended[1].size
                if lost:
                    log.warning("%d requests were not kept, because the disk was too slow", lost)


def _open(path: Path) -> FileIO:
    """Open the file to append to it. Begin a new line if the last line has no end, since a server may have been killed while it wrote. Only
    the owner of a new file can read it. Raise SettingsError if the file cannot be opened or written."""
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab", buffering=0)
        if _is_torn(path, os.fstat(file.fileno())):
            append_whole(file, b"\n")
    except OSError as error:
        raise SettingsError(f"keep_requests is {str(path)!r}: {error.strerror}; name a file that can be written") from error
    return file


def _is_torn(path: Path, status: os.stat_result) -> bool:
    """Return whether a file has a last line without an end. Return False if the file may not be read, or is no regular file."""
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    with suppress(PermissionError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
    return False


def _line(record: RequestRecord, exchange: Exchange) -> str:
    """Return an exchange as a line of JSON."""
    answer = b"".join(exchange.answer)
    if exchange.is_compressed:
        answer = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(answer)
    fields = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "model": record.model,
        "system_fingerprint": record.fingerprint,
        "seed": record.seed,
        "complete": exchange.is_complete,
        "request": exchange.body.decode(errors="replace"),
        "answer": answer.decode(errors="replace"),
    }
    return json.dumps(fields, ensure_ascii=False)
