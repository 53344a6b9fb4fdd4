"""Define the records of files and of batches, which the store keeps as JSON beside the data."""

from __future__ import annotations

import secrets
import time
from enum import StrEnum

import msgspec

DAY_S = 86400
INPUT, REQUESTS = "batch", "requests"  # purposes of input files; "requests": a file with the requests from the body of an Anthropic batch


class Status(StrEnum):
    """The stages of a batch, in the names of OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"  # the input file is not valid, and no line ran
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


class FileRecord(msgspec.Struct):
    """A file that a client uploaded, or that a batch wrote."""

    id: str
    owner: str  # tenant of the key that made it; "" on a server without keys
    filename: str
    purpose: str
    num_bytes: int
    created_at: int  # seconds since 1970
    expires_at: int | None = None  # None: never

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= now()


class Fault(msgspec.Struct):
    """An error in an input file."""

    code: str
    message: str
    line: int | None = None  # number of the line, from 1; None: the file as a whole is at fault
    param: str | None = None  # the field that is at fault, if one is


class BatchRecord(msgspec.Struct):
    """A batch. Times are seconds since 1970. `times` says when the batch reached each of its stages after
    `validating`, which begins at `created_at`."""

    id: str
    owner: str
    key_digest: str  # digest of the key that made the batch; the requests of different keys take turns
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    created_at: int
    expires_at: int
    models: tuple[str, ...] = ()  # patterns of the model names that the key may use; they apply even if the key is gone
    window: str = "24h"  # the completion window that clients see
    metadata: dict[str, str] | None = None  # the client's own notes
    status: Status = Status.VALIDATING
    total: int = 0  # lines of the input file
    completed: int = 0  # lines that were answered with status 200
    failed: int = 0  # lines that were answered with an error
    unanswered: int = 0  # lines that were not answered before the batch ended
    faults: list[Fault] = msgspec.field(default_factory=list[Fault])  # errors in the input file; with any, the batch fails
    times: dict[Status, int] = msgspec.field(default_factory=dict[Status, int])

    @property
    def has_ended(self) -> bool:
        """Whether the batch has ended, in any way."""
        return self.status in ENDED

    @property
    def file_ids(self) -> tuple[str, str, str]:
        """The ids of the files that the batch reads and writes."""
        return self.input_file_id, self.output_file_id, self.error_file_id

    @property
    def num_done(self) -> int:
        """The number of lines that have a line in an output file."""
        return self.completed + self.failed + self.unanswered

    def reach(self, status: Status) -> None:
        """Note that the batch has reached a stage now."""
        self.status = status
        self.times[status] = now()


def now() -> int:
    """Return the time in seconds since 1970."""
    return int(time.time())


def new_id(prefix: str) -> str:
    """Return a random id that begins with `prefix`."""
    return f"{prefix}{secrets.token_hex(12)}"
