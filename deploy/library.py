"""Download, remove and list models in processes separate from the server, so that this work delays no stream.

python -m deploy.library    reads an `Order` from standard input, and writes a `Line` for each report: both are JSON
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Literal

import msgspec

from deploy.bound import bound
from deploy.catalogue import ENTRIES
from runtime import generated_code
from runtime.launch import command
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.models.library import Listed, Pulled, Stored
from server.signal_names import describe_status

COMMAND = command("deploy.library")
encode = msgspec.json.encode


class Order(msgspec.Struct):
    """An order for the process: download (`pull`) or remove the model `source`, or list the downloaded models."""

    what: Literal["pull", "remove", "list"]
    source: str = ""
    token: str | None = None  # token for the hub, for a download


class Line(msgspec.Struct, omit_defaults=True):
    """A message from the process: progress of a download (`total`, `completed`), bytes that a removal freed, a stored model, or an error
    (`fault`, `code`)."""

    total: int = 0  # bytes that were missing when the download began; 0 if that is not known
    completed: int = 0  # bytes of these that have arrived
    freed: int = 0
    stored: Stored | None = None
    fault: str = ""  # why the order failed, in words; "": it has not failed
    code: ErrorCode = ErrorCode.FETCH_FAILED  # code of the fault, if there is one


class Downloads:
    """The server's library of models (`server.models.library.Library`). Each of its methods starts a process."""

    names = frozenset(entry.name for entry in ENTRIES)
    catalogue = tuple(Listed(entry.name, entry.about, entry.licence) for entry in ENTRIES)

    def __init__(self, token: str | None = None) -> None:
        """`token`: token for downloads from the hub."""
        self._token = token

    async def stored(self) -> list[Stored]:
        async with aclosing(_lines(Order("list"))) as lines:
            return [line.stored async for line in lines if line.stored is not None]

    async def pull(self, source: str) -> AsyncGenerator[Pulled, None]:
        async with aclosing(_lines(Order("pull", source, self._token))) as lines:
            async for line in lines:
                yield Pulled(line.total, line.completed)

    async def remove(self, source: str) -> int:
        async with aclosing(_lines(Order("remove", source))) as lines:
            return sum([line.freed async for line in lines])


async def _lines(order: Order) -> AsyncGenerator[Line, None]:
    """Let a process carry out an order, and yield its reports. Raise LoadError if the order fails. If the caller stops early, or this
    process ends, the process is killed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*bound(COMMAND), stdin=pipe, stdout=pipe, process_group=0)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(encode(order))
        process.stdin.close()
        while text := await process.stdout.readline():
            line = msgspec.json.decode(text, type=Line)
            if line.fault:
                raise LoadError(line.code, line.fault)
            yield line
        if status := await process.wait():
            what = f"{order.what} {order.source!r}" if order.source else f"{order.what} the downloaded models"
            raise LoadError(ErrorCode.FETCH_FAILED, f"cannot {what}: the process that tried it ended early ({describe_status(status)})")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kill pip too, which would go on downloading
        await process.wait()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        _carry_out(order)
    except LoadError as error:
        _say(Line(fault=error.message, code=error.code))


def _carry_out(order: Order) -> None:
    """Carry out an order and write a line for each report. Raise LoadError if the order fails."""
    from deploy.model_loading import origins

    generated_code.keep()
    if order.what == "list":
        for one in origins.held():
            _say(Line(stored=Stored(one.source, one.num_bytes, one.used_s, one.names)))
        return
    if order.what == "remove":
        _say(Line(freed=origins.remove(order.source)))
        return
    total = origins.missing_bytes(order.source, order.token)
    _say(Line(total))
    origins.download(order.source, lambda fraction: _say(Line(total, round(fraction * total))), order.token)
    _say(Line(total, total))


def _say(line: Line) -> None:
    sys.stdout.buffer.write(encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
