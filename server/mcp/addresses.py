"""Resolve the host names of MCP servers. The name of a server on the internet must not lead a request to this machine or its private
network."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress

from server.addresses import is_public, parsed
from server.mcp.attempt import Attempt
from server.mcp.errors import McpLost

_running: dict[tuple[str, int], Future[list[str]]] = {}  # the look-ups that run now, by host and port
_lock = threading.Lock()  # held to change `_running`


def resolve(host: str, port: int, name: str, attempt: Attempt, *, may_be_private: bool) -> list[str]:
    """Return the addresses of a host. Raise McpLost if the host has no address, or has a private one without `may_be_private`. Raise
    McpStopped if the attempt ends first. A look-up runs on a thread of its own, because nothing can interrupt it, and it may take a minute.
    Attempts for the same host and port share a running look-up, so that there are no more such threads than servers."""
    ends: queue.SimpleQueue[object] = queue.SimpleQueue()  # gets an item when the look-up ends or the attempt is cancelled
    asked = _asked(host, port)
    asked.add_done_callback(ends.put)
    with attempt.stopping(lambda: ends.put(None)), suppress(queue.Empty):
        ends.get(timeout=attempt.remaining_s)
    if not asked.done():
        raise attempt.fault(name)
    if (error := asked.exception()) is not None:
        raise McpLost(f"MCP server {name!r} cannot be reached: {host} has no address ({error})")
    found = asked.result()
    if not may_be_private:
        for text in found:
            if not is_public(parsed(text)):
                raise McpLost(f"MCP server {name!r} has the private address {text}; allow it in its entry, as NAME=private+URL")
    return found


def _asked(host: str, port: int) -> Future[list[str]]:
    """Return the running look-up of a host's addresses. If none runs, begin one."""
    with _lock:
        if (running := _running.get((host, port))) is not None:
            return running
        asked = Future[list[str]]()
        threading.Thread(target=_look_up, args=(host, port, asked), name="resolve", daemon=True).start()
        _running[host, port] = asked
    return asked


def _look_up(host: str, port: int, asked: Future[list[str]]) -> None:
    """Look up the addresses of a host. Complete `asked` with the addresses, or with the error if there are none."""
    found, fault = list[str](), None
    try:
        found = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    except Exception as error:  # any error completes `asked`, because attempts must not wait for a thread that has ended
        fault = error
    with _lock:
        del _running[host, port]
    if fault is None:
        asked.set_result(found)
    else:
        asked.set_exception(fault)


def is_address(host: str) -> bool:
    """Return whether a host is given as an address, or as `localhost`."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
