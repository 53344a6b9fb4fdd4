"""Read a form with files (multipart/form-data, RFC 7578) while it arrives."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Callable
from urllib.parse import unquote

from server.errors import BAD_REQUEST, ApiError

MAX_FIELDS = 32
MAX_FIELD_BYTES = 64 << 10  # most bytes of the value of a field other than the file
MAX_HEADER_BYTES = 4096
MAX_FORM_BYTES = MAX_FIELDS * (MAX_FIELD_BYTES + MAX_HEADER_BYTES)  # most bytes of all parts but the file
FORM_TYPE = "multipart/form-data"
# A parameter of a header, with its value in quotes or without quotes. Python's own parser takes time that is quadratic in the length of the
# header.
PARAMETER = re.compile(r';\s*([^\s=;"]++)\s*=\s*(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*+))', re.DOTALL)
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")

Sink = Callable[[bytes], None]


class Form:
    """The fields of a form. The bytes of its one file go to `sink` as they arrive."""

    def __init__(self, content_type: str, sink: Sink) -> None:
        """`content_type` is the header that declares the form's boundary. Raise ApiError if it declares no boundary."""
        self.values: dict[str, list[str]] = {}  # values by the name of the field; a field may be repeated
        self.filename: str | None = None  # None: the file has not begun
        self._end = b"\r\n--" + _boundary_of(content_type).encode()
        self._sink = sink
        self._pending = bytearray(b"\r\n")  # in place of the line break that the first boundary lacks
        self._part: _Part | None = None  # None: outside of parts
        self._num_parts = 0
        self._is_complete = False

    @property
    def fields(self) -> dict[str, str]:
        """Return the last value of each field."""
        return {name: values[-1] for name, values in self.values.items()}

    async def read(self, body: AsyncIterable[bytes], file_name: str) -> None:
        """Read a whole body. The field `file_name` has the file. Raise ApiError if the form is malformed or exceeds a limit."""
        async for data in body:
            self._pending += data
            while self._advance(file_name):
                pass
        if not self._is_complete:
            raise _fault("it ends before its last boundary; send all of it")

    def _advance(self, file_name: str) -> bool:
        """Read the pending bytes up to those that may be the beginning of a boundary. Return whether a further call may read more pending
        bytes. Raise ApiError if the form is malformed or exceeds a limit."""
        if self._is_complete:
            self._pending.clear()  # an epilogue, which nobody reads
            return False
        at = self._pending.find(self._end)
        if self._part is not None:
            certain = at if at >= 0 else max(0, len(self._pending) - len(self._end) + 1)
            self._part.take(bytes(self._pending[:certain]))
            del self._pending[:certain]
            at = at if at < 0 else 0
        if at < 0:
            if self._part is None and len(self._pending) > MAX_HEADER_BYTES:
                raise _fault("it does not begin with its boundary")
            return False
        return self._begin_part(at + len(self._end), file_name)

    def _begin_part(self, at: int, file_name: str) -> bool:
        """Finish the part before a boundary that ends at `at`, and read what follows the boundary: the headers of a part, or the end of the
        form. If this has not arrived yet, do nothing and return False. Raise ApiError if the headers are too large or malformed."""
        head = bytes(self._pending[at : at + MAX_HEADER_BYTES])
        if head.startswith(b"--"):
            self._finish_part()
            self._is_complete = True
            return True
        end = head.find(b"\r\n\r\n")
        if end < 0:
            if len(head) == MAX_HEADER_BYTES:
                raise _fault(f"a part has headers of more than {MAX_HEADER_BYTES} bytes")
            return False
        self._finish_part()
        del self._pending[: at + end + 4]
        self._part = self._part_of(head[:end], file_name)
        return True

    def _part_of(self, headers: bytes, file_name: str) -> _Part:
        """Return the part with these headers. Raise ApiError if the part has no name, or if there are too many parts or two files."""
        given: dict[str, str] = {}
        for line in headers.decode(errors="replace").split("\r\n"):
            header, _, value = line.partition(":")
            if header.strip().lower() == "content-disposition":
                given |= _parameters(value)
        name = given.get("name")
        if name is None:
            raise _fault("a part has no name")
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise _fault(f"it has more than {MAX_FIELDS} fields")
        if name != file_name:
            return _Part(name, None)
        if self.filename is not None:
            raise _fault(f"it has more than one {file_name}")
        encoded = unquote(given.get("filename*", "").rpartition("'")[2])  # the text behind the name of its character set
        self.filename = encoded or given.get("filename") or file_name
        return _Part(name, self._sink)

    def _finish_part(self) -> None:
        """Keep the value of the part that has ended, unless it is the file."""
        part, self._part = self._part, None
        if part is not None and part.sink is None:
            self.values.setdefault(part.name, []).append(part.value.decode(errors="replace"))


class _Part:
    """A part while it arrives. `sink` takes the bytes of a file; the value of another field is kept."""

    def __init__(self, name: str, sink: Sink | None) -> None:
        self.name = name
        self.sink = sink
        self.value = bytearray()

    def take(self, data: bytes) -> None:
        """Add bytes of the part. Raise ApiError if a field other than the file has too many bytes."""
        if self.sink is not None:
            if data:
                self.sink(data)
            return
        self.value += data
        if len(self.value) > MAX_FIELD_BYTES:
            found = f"field {self.name!r:.40} has more than {MAX_FIELD_BYTES} bytes"
            raise _fault(f"{found}; expected at most as many: send the end of a longer text", self.name[:60])


def _boundary_of(content_type: str) -> str:
    """Return the boundary that a content type declares. Raise ApiError if it declares no boundary."""
    kind, boundary = content_type.partition(";")[0].strip().lower(), _parameters(content_type).get("boundary", "")
    if kind != FORM_TYPE or not BOUNDARY.fullmatch(boundary):
        raise ApiError(BAD_REQUEST, f"content-type is {content_type!r:.80}; expected {FORM_TYPE} with a boundary")
    return boundary


def _parameters(header: str) -> dict[str, str]:
    """Return the parameters of a header's value by their names in lower case. Of several parameters with the same name, return the
    first."""
    found: dict[str, str] = {}
    for name, quoted, plain in PARAMETER.findall(header):
        found.setdefault(name.lower(), quoted.replace("\\\\", "\\").replace('\\"', '"') or plain)
    return found


def _fault(found: str, param: str | None = None) -> ApiError:
    """Return the error for a malformed form."""
    return ApiError(BAD_REQUEST, f"the form cannot be read: {found}", param=param)
