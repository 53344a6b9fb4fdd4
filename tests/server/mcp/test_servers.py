"""Calls of MCP servers run beside the event loop: a cancelled call ends, and a slow server leaves threads to other servers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.mcp import servers
from server.mcp.attempt import Attempt
from server.mcp.errors import McpStopped
from server.mcp.servers import McpServers


def test_a_call_runs_beside_the_loop_and_its_cancellation_ends_it() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(attempt: Attempt) -> None:
        with attempt.stopping(ended.set):
            begun.set()
            assert ended.wait(60)

    async def main() -> None:
        allowed = McpServers(["a=http://localhost:1/"], 60.0)
        task = asyncio.create_task(allowed.run(allowed._entries[0], work))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 60)

    asyncio.run(main())


def test_a_server_that_is_slow_leaves_threads_to_others_and_few_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_WAITING", servers.MAX_PER_SERVER + 2)
    is_over = threading.Event()

    async def main() -> None:
        allowed = McpServers(["slow=http://localhost:1/", "quick=http://localhost:2/"], 60.0)
        slow, quick = allowed._entries
        tasks = [asyncio.create_task(allowed.run(slow, lambda _: is_over.wait(60))) for _ in range(servers.MAX_PER_SERVER + 1)]
        await asyncio.sleep(0)
        assert await allowed.run(quick, lambda _: "done") == "done"
        tasks.append(asyncio.create_task(allowed.run(slow, lambda _: is_over.wait(60))))
        await asyncio.sleep(0)
        with pytest.raises(McpStopped, match="wait already"):
            await allowed.run(quick, lambda _: "done")
        is_over.set()
        assert all(await asyncio.gather(*tasks))
        assert await allowed.run(quick, lambda _: "done") == "done"

    asyncio.run(main())
