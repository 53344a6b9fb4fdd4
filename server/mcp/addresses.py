"""Resolve the names of MCP servers. A server on the internet must not lead a request to this machine or to its private network."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from contextlib import suppress

from server.addresses import is_public, parsed
from server.mcp.attempt import Attempt
from server.mcp.errors import McpLost


def resolve(host: str, port: int, name: str, attempt: Attempt, *, may_be_private: bool) -> list[str]:
    """Return the addresses of a host. Raise McpLost if it has none, or if one of them is private and may not be, and McpStopped if the
    attempt ends first. A thread of its own asks the name servers: nothing can interrupt that, and it may take a minute."""
    answers: queue.SimpleQueue[list[str] | Exception | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_asked(host, port)), name="resolve", daemon=True).start()
    found: list[str] | Exception | None = None
    with attempt.stopping(lambda: answers.put(None)), suppress(queue.Empty):
        found = answers.get(timeout=attempt.remaining_s)
    if found is None:
        raise attempt.fault(name)
    if isinstance(found, Exception):
        raise McpLost(f"MCP server {name!r} cannot be reached: {host} has no address ({found})")
    if not may_be_private:
        for text in found:
            if not is_public(parsed(text)):
                raise McpLost(f"MCP server {name!r} has the private address {text}; allow it in its entry, as NAME=private+URL")
    return found


def _asked(host: str, port: int) -> list[str] | Exception:
    """Return the addresses of a host, or why it has none."""
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError) as error:
        return error


def is_address(host: str) -> bool:
    """Return whether a host is given as an address, or as `localhost`."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
