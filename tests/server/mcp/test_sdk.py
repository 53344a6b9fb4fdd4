"""Servers of the official Python package. It is not installed for the tests; name an interpreter that has it, of version 1 or 2:

MCP_PYTHON=/path/to/python python -m pytest tests/server/mcp/test_sdk.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial

import pytest

from server.mcp.attempt import Attempt
from server.mcp.errors import McpStopped
from server.mcp.http import HttpTransport, Place
from server.mcp.session import Session
from server.mcp.stdio import StdioTransport

PYTHON = os.environ.get("MCP_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs MCP_PYTHON, an interpreter with the package mcp")
SERVER = """
import asyncio, sys
try:
    from mcp.server.mcpserver import Context, MCPServer
    server, options = MCPServer("peer"), {"port": int(sys.argv[2])}
except ImportError:
    from mcp.server.fastmcp import Context, FastMCP
    server, options = FastMCP("peer", port=int(sys.argv[2])), {}

@server.tool()
def add(a: int, b: int) -> int:
    "Add."
    return a + b

@server.tool()
async def slow(seconds: float, ctx: Context) -> str:
    await ctx.report_progress(1, 2)
    await asyncio.sleep(seconds)
    return "done"

server.run(transport=sys.argv[1], **(options if sys.argv[1] != "stdio" else {}))
"""


@pytest.fixture(params=["stdio", "streamable-http"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PYTHON, "-c", SERVER, request.param, str(port)]
    if request.param == "stdio":
        session = Session("peer", partial(StdioTransport, "peer", command, {}))
        yield session
        session.close()
        return
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        ends_s = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        session = Session("peer", partial(HttpTransport, "peer", Place(f"http://127.0.0.1:{port}/mcp", may_be_private=True)))
        yield session
        session.close()
        server.terminate()


def test_tools_are_listed_called_and_cancelled(session: Session) -> None:
    add, slow = session.tools(Attempt(60))
    assert add.name == "add" and add.schema["required"] == ["a", "b"]
    assert session.call(add, {"a": 2, "b": 3}, Attempt(60)).text == "5"
    heard: list[object] = []
    assert session.call(slow, {"seconds": 0}, Attempt(60, heard.append)).text == "done" and len(heard) == 1
    with pytest.raises(McpStopped):
        session.call(slow, {"seconds": 60}, Attempt(1))
    assert session.call(add, {"a": 2, "b": "x"}, Attempt(60)).is_error
    assert session.call(add, {"a": 3, "b": 3}, Attempt(60)).text == "6"
