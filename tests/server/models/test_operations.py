"""Watchers of an operation see its end."""

from __future__ import annotations

import asyncio

from server.messages import Progress
from server.models.operations import Operation, OperationState


def test_a_watcher_sees_the_end_even_if_it_comes_while_a_report_is_sent() -> None:
    async def watch() -> list[str]:
        operation = Operation("load", "m")
        seen: list[str] = []
        async for report in operation.watch():
            seen.append(report["state"])
            if len(seen) == 1:
                operation.report(Progress("compile", 0.5))
                operation.end(OperationState.SUCCEEDED)
        return seen

    assert asyncio.run(watch()) == ["running", "succeeded"]
