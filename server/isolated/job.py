"""Define the job that a process runs for each call, and the answers of that process to the front."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Job(Protocol):
    """The work of a process. The front pickles the job and sends it to the process."""

    prepare_s: float  # CPU time that `prepare` may take
    call_s: float  # CPU time that a call may take
    call_bytes: int  # memory that a call may take

    def prepare(self) -> None:
        """Do what all calls share. A call cannot open files, so this also imports every module that a call may need."""
        ...

    def warm(self) -> None:
        """Run in each fork before its call arrives: first writes to shared pages copy them, which takes longer than a short call."""
        ...

    def run(self, work: bytes) -> bytes:
        """Answer a call. If this raises, other than MemoryError or RecursionError, the fork ends without an answer, as if it was killed."""
        ...


PID_BYTES = 4  # bytes of a process id in an answer


def taken(pid: int) -> bytes:
    """Return what the front gets when a call is taken: TAKEN, and the id of the process that runs it, 0 if there is none."""
    return bytes([Said.TAKEN]) + pid.to_bytes(PID_BYTES, "little")


def taker(answer: bytes | bytearray) -> int:
    """Return the id of the process that runs a call, by what the front got so far; 0 if there is none."""
    return int.from_bytes(answer[1 : 1 + PID_BYTES], "little") if len(answer) > PID_BYTES else 0


class Said(IntEnum):
    """The first bytes of an answer. A fork sends TAKEN and its id when it takes a call, and then DONE or TOO_LARGE. If no fork can be
    started, the process sends TAKEN, the id 0 and NO_FORK."""

    TAKEN = 1
    DONE = 2  # followed by what `run` returned
    TOO_LARGE = 3  # the call ran out of memory or nests too deeply; followed by the name of the exception
    NO_FORK = 4  # no process could be started; followed by the reason


class Failure(IntEnum):
    """Why a call has no answer."""

    TOO_LARGE = 1  # it ran out of memory or nests too deeply
    NO_FORK = 2  # the system had no process, or no descriptor, for the call
    KILLED = 3  # two processes that ran the call ended without an answer; probably it took too much time or memory
    LATE = 4  # no answer in time
    NOT_TAKEN = 5  # no process took the call


class CallError(Exception):
    """Raised for a call without an answer."""

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(failure.name, detail)
        self.failure, self.detail = failure, detail
