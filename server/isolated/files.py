"""Decode files that clients send, each in a call of a job, and turn every failure into an error for the client."""

from __future__ import annotations

import base64
import binascii
from typing import Generic, Protocol, TypeVar

import msgspec

from server.errors import ApiError, ErrorKind
from server.isolated.calls import Calls
from server.isolated.job import CallError, Failure, Job


class NotBase64(ValueError):
    """Raised for a text that is not base64. The message is for the client."""


def bytes_of(text: str) -> bytes:
    """Return the bytes of a text in base64, which may be in lines, and in which the padding may be missing. Raise NotBase64 for any other
    text."""
    if "\n" in text:
        text = text.replace("\r", "").replace("\n", "")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise NotBase64("its data is not base64") from None


class Decoded(Protocol):
    """The answer of a job that decodes files."""

    @property
    def fault(self) -> str:
        """Why the file cannot be decoded; "" if it is decoded."""
        ...


T = TypeVar("T", bound=Decoded)


class FileCalls(Generic[T]):
    """Decodes files by calls of one job."""

    def __init__(self, job: Job, answer: type[T], patience_s: float, *, invalid: ErrorKind, not_decoded: ErrorKind) -> None:
        """`answer` is the struct with which the job answers. `invalid` is the kind of the error if the file is at fault, `not_decoded` if
        the server is."""
        self._calls = Calls(job, patience_s)
        self._job = job
        self._answer = answer
        self._invalid, self._not_decoded = invalid, not_decoded

    async def decode(self, file: msgspec.Struct, param: str) -> T:
        """Return the job's answer. Raise ApiError if the file cannot be decoded. `param` is the request's field with the file."""
        try:
            found = msgspec.msgpack.decode(await self._calls.call(msgspec.msgpack.encode(file)), type=self._answer)
        except CallError as error:
            raise self._described(error, param) from None
        if found.fault:
            raise ApiError(self._invalid, f"{param} cannot be decoded: {found.fault}", param=param)
        return found

    def _described(self, error: CallError, param: str) -> ApiError:
        """Return the error for the client if a call has failed."""
        if error.failure in (Failure.TOO_LARGE, Failure.STOPPED):
            most = f"{self._job.call_s:g} s of CPU time or {self._job.call_bytes >> 20} MiB"
            return ApiError(self._invalid, f"{param} cannot be decoded: it takes more than {most}", param=param)
        lacks = "is busy, or lacks memory"
        return ApiError(self._not_decoded, f"{param} was not decoded, because the server {lacks}; try again later", param=param)
