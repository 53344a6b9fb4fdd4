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
        """Do the work that all calls share. A call cannot open files, so this also imports every module that a call may need."""
        ...

    def warm(self) -> None:
        """Do once what a call does. Each fork does this before its call arrives: the first write to a memory page that the fork shares with
        its parent copies the page, and these copies take longer than a short call."""
        ...

    def run(self, work: bytes) -> bytes:
        """Answer a call. Any exception other than MemoryError and RecursionError is logged, and the call fails with STOPPED."""
        ...


PID_BYTES = 4  # bytes of a process id in an answer
HEAD_BYTES = 1 + PID_BYTES  # bytes that begin an answer: TAKEN, and the id of the process that runs the call
LENGTH_BYTES = 8  # bytes of the length of a result in an answer


def taken(pid: int) -> bytes:
    """Return what the front gets when a call is taken: TAKEN, and the id of the process that runs it, 0 if there is none."""
    return bytes([Said.TAKEN]) + pid.to_bytes(PID_BYTES, "little")


def taker(answer: bytes | bytearray) -> int:
    """Return the id of the process that runs a call, from the bytes that the front has received so far; 0 if no process runs the call."""
    return int.from_bytes(answer[1 : 1 + PID_BYTES], "little") if len(answer) > PID_BYTES else 0


def done(result: bytes) -> bytes:
    """Return what the front gets when `run` has returned a result."""
    return b"".join([bytes([Said.DONE]), len(result).to_bytes(LENGTH_BYTES, "little"), result])


class Said(IntEnum):
    """Bytes in an answer that say what happens to the call. A fork sends TAKEN and its id when it takes a call, and then DONE, TOO_LARGE or
    STOPPED. If its CPU time is over, or if it crashes, it sends a text of `faulthandler` instead, which begins with none of these bytes. If
    no fork can be started, the process sends TAKEN, the id 0 and NO_FORK. A fork that is killed from outside, for example by the kernel
    because the machine lacks memory, sends nothing after its id, or only a part of a result."""

    TAKEN = 1
    DONE = 2  # followed by the length of the result of `run`, and by the result
    TOO_LARGE = 3  # the call ran out of memory or nests too deeply; followed by the name of the exception
    NO_FORK = 4  # no process could be started; followed by the reason
    STOPPED = 5  # `run` has raised another exception


class Failure(IntEnum):
    """Why a call has no answer."""

    TOO_LARGE = 1  # the call ran out of memory or nests too deeply
    NO_FORK = 2  # the system had no process, or no descriptor, for the call
    STOPPED = 3  # the call took more CPU time than it may, crashed its process, or failed by a bug
    KILLED = 4  # two processes that ran the call were killed from outside, so the call is not at fault
    LATE = 5  # no answer in time
    NOT_TAKEN = 6  # no process took the call


class CallError(Exception):
    """Raised for a call without an answer."""

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(failure.name, detail)
        self.failure, self.detail = failure, detail
