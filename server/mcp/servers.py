"""Find the MCP servers that the operator allows, and call them from the event loop. A call runs on a thread, so it delays no other
request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from server.mcp.addresses import is_address
from server.mcp.attempt import Attempt
from server.mcp.errors import McpStopped
from server.mcp.http import HttpTransport, Place
from server.mcp.session import Session

MAX_AT_ONCE, MAX_PER_SERVER = 32, 8  # most calls that run at a time: of all servers together, and of one server
MAX_WAITING = 256  # most calls that run or wait for their turn
GRACE_S = 1.0  # seconds that the caller still waits for a thread after the deadline of its attempt
PRIVATE = "private+"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """A server that requests may use. Its address may be private if the host in the URL is an address or `localhost`, or if the setting has
    `private+` before the URL."""

    name: str
    url: str
    may_be_private: bool
    # one place for each call of this server that may run at a time
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PER_SERVER), repr=False, compare=False)

    @classmethod
    def of(cls, text: str) -> Entry:
        """Read `NAME=URL` or `NAME=private+URL`, which the settings have checked."""
        name, _, url = text.partition("=")
        return cls(name, url.removeprefix(PRIVATE), url.startswith(PRIVATE) or is_address(urlsplit(url).hostname or ""))


class McpServers:
    """The servers that requests may use, and the threads that call them."""

    def __init__(self, entries: Sequence[str], timeout_s: float) -> None:
        """`entries`: the servers, each as NAME=URL or NAME=private+URL. `timeout_s`: most seconds that a call may take."""
        self._entries = [Entry.of(text) for text in entries]
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "mcp")  # starts a thread only when one is needed
        self._num_waiting = 0

    @property
    def names(self) -> list[str]:
        """The names of the servers."""
        return [entry.name for entry in self._entries]

    def find(self, name: str, url: str | None) -> Entry | None:
        """Return the entry with a URL, or with a name if no URL is given; None if there is no such entry. Slashes at the ends of URLs are
        ignored."""
        if url is None:
            return next((entry for entry in self._entries if entry.name == name), None)
        return next((entry for entry in self._entries if entry.url.rstrip("/") == url.rstrip("/")), None)

    def session(self, name: str, entry: Entry, headers: Mapping[str, str]) -> Session:
        """Return a session, which connects when it is first used."""
        return Session(name, partial(HttpTransport, name, Place(entry.url, headers, entry.may_be_private)))

    async def run(self, entry: Entry, work: Callable[[Attempt], T]) -> T:
        """Run `work` on a thread, once the server has a place for it, and return its result. Raise McpError if `work` does, if waiting and
        `work` together take too long, or if too many calls wait already. If the caller is cancelled, so is the attempt."""
        if self._num_waiting >= MAX_WAITING:
            raise McpStopped(f"{MAX_WAITING} calls of MCP servers wait already; ask again later")
        attempt = Attempt(self._timeout_s)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S), entry.slots:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, attempt)
        except TimeoutError:
            raise McpStopped(f"MCP server {entry.name!r} did not answer within {self._timeout_s:g} s") from None
        finally:
            self._num_waiting -= 1
            attempt.cancel()

    def close(self, session: Session) -> None:
        """Close a session on a thread, without waiting for it."""
        self._threads.submit(session.close)
