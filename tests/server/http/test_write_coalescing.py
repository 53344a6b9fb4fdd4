from __future__ import annotations

import asyncio
from typing import Any

from server.http.write_coalescing import MAX_HELD_BYTES, CoalescingTransport, PendingWrites


class Recorder(asyncio.Transport):
    def __init__(self, log: list[tuple[str, bytes]], name: str) -> None:
        super().__init__()
        self._log = log
        self._name = name

    def write(self, data: Any) -> None:
        self._log.append((self._name, bytes(data)))

    def close(self) -> None:
        self._log.append((self._name, b"closed"))

    def abort(self) -> None:
        self._log.append((self._name, b"aborted"))


def _run(work: Any) -> list[tuple[str, bytes]]:
    log: list[tuple[str, bytes]] = []

    async def run() -> None:
        pending = PendingWrites()
        await work(*(CoalescingTransport(Recorder(log, name), pending) for name in "ab"), log)
        await asyncio.sleep(0)

    asyncio.run(run())
    return log


def test_writes_of_a_turn_leave_together_and_in_order():
    async def work(a: CoalescingTransport, b: CoalescingTransport, log: list[tuple[str, bytes]]) -> None:
        a.write(b"1")
        b.write(b"2")
        a.write(b"3")
        assert log == []
        await asyncio.sleep(0)
        assert log == [("a", b"13"), ("b", b"2")]
        b.write(b"4")

    assert _run(work) == [("a", b"13"), ("b", b"2"), ("b", b"4")]


def test_closing_sends_what_is_held_and_aborting_does_not():
    async def work(a: CoalescingTransport, b: CoalescingTransport, log: list[tuple[str, bytes]]) -> None:
        a.write(b"last words")
        a.close()
        b.write(b"unsaid")
        b.abort()

    assert _run(work) == [("a", b"last words"), ("a", b"closed"), ("b", b"aborted")]


def test_much_is_not_held():
    async def work(a: CoalescingTransport, b: CoalescingTransport, log: list[tuple[str, bytes]]) -> None:
        a.write(b"." * MAX_HELD_BYTES)
        assert log == []
        a.write(b"!")
        assert [len(data) for _, data in log] == [MAX_HELD_BYTES + 1]

    assert len(_run(work)) == 1
