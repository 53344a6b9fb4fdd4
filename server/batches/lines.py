"""Read and check the lines of a batch's input file, and read and write the lines of its output files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from server.batches.records import Fault, new_id

MAX_LINES = 50_000
MAX_FAULTS = 20  # most faults that a failed batch lists
MAX_ID_CHARS = 256


class Line(msgspec.Struct):
    """A request of an input file."""

    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


class Head(msgspec.Struct):
    """The fields of a request's body that decide how it runs."""

    model: str | None = None
    stream: bool | None = None
    background: Any = None  # a field of /v1/responses, which checks its type


class Response(msgspec.Struct):
    """The answer to a line."""

    status_code: int
    body: msgspec.Raw


class Written(msgspec.Struct):
    """A line that a batch has written. If there is no response, the request did not run to its end."""

    custom_id: str
    response: Response | None = None


def check(lines: Iterable[bytes], endpoint: str, most: int) -> tuple[int, list[Fault]]:
    """Return the number of lines of an input file, and its faults. Stop after MAX_LINES lines or MAX_FAULTS faults, and then return the
    number of lines that were read. `endpoint`: the path that each line must name. `most`: most bytes of a line."""
    seen: set[str] = set()
    faults: list[Fault] = []
    number = 0
    for number, line in enumerate(lines, 1):
        if number > MAX_LINES:
            faults.append(Fault("too_many_lines", f"the file has more than {MAX_LINES} lines; split it"))
            break
        fault = _fault_of(line, endpoint, most, seen)
        if fault is not None:
            fault.line = number
            faults.append(fault)
            if len(faults) == MAX_FAULTS:
                break
    if not number:
        faults.append(Fault("empty_file", "the file has no lines; expected one JSON object per line"))
    return number, faults


def _fault_of(line: bytes, endpoint: str, most: int, seen: set[str]) -> Fault | None:
    """Return what is wrong with a line. If nothing is wrong, add the line's id to `seen`, and return None."""
    if len(line.rstrip(b"\r\n")) > most:
        return Fault("line_too_long", f"the line is longer than {most} bytes (max_body_bytes)")
    try:
        read = msgspec.json.decode(line, type=Line)
        head = msgspec.json.decode(read.body, type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Fault("invalid_json_line", f"{error}; expected an object with custom_id, method, url and body")
    if read.method != "POST":
        return Fault("invalid_method", f"method is {read.method!r:.40}; expected 'POST'", param="method")
    if read.url != endpoint:
        return Fault("mismatched_url", f"url is {read.url!r:.80}; expected the batch's endpoint {endpoint!r}", param="url")
    if head.stream:
        return Fault("streaming_unsupported", "stream is true; answers of a batch are whole", param="body.stream")
    if head.background and endpoint == "/v1/responses":
        return Fault(
            "background_unsupported", "background is true; a batch waits for its answers, so leave background out", param="body.background"
        )
    if not 1 <= len(read.custom_id) <= MAX_ID_CHARS:
        text = f"custom_id has {len(read.custom_id)} characters; expected 1 to {MAX_ID_CHARS}"
        return Fault("invalid_custom_id", text, param="custom_id")
    if read.custom_id in seen:
        return Fault("duplicate_custom_id", f"custom_id {read.custom_id!r:.80} is that of an earlier line", param="custom_id")
    seen.add(read.custom_id)
    return None


def read(lines: Iterable[bytes]) -> Iterator[Line]:
    """Yield the requests of an input file in which `check` has found no fault."""
    for line in lines:
        yield msgspec.json.decode(line, type=Line)


def written(lines: Iterable[bytes]) -> Iterator[Written]:
    """Yield the lines of an output file."""
    for line in lines:
        yield msgspec.json.decode(line, type=Written)


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of a request that was answered, also if the answer is an error."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that did not run to its end."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """Return a line of an output file."""
    return msgspec.json.encode({"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}) + b"\n"
