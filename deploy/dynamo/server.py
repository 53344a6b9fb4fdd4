"""The server behind a worker: one that the worker starts, or one that runs already."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import urlsplit

from deploy.replicas.process import ServerProcess
from deploy.settings import PREFIX
from server.settings import is_loopback

log = logging.getLogger(__name__)

ASK_S = 5.0  # longest time for an answer to a question of the worker
READY_POLL_S = 0.1
KEYS = ("api_keys", "api_key_file", "admin_keys", "admin_key_file")  # settings of a server that only the worker reaches


class Server(Protocol):
    """A server. A method raises OSError if the server does not answer, and ServerEnded if it has ended."""

    @property
    def url(self) -> str: ...

    @property
    def events(self) -> str | None:
        """The address of its cache events, or None if it publishes none."""
        ...

    @property
    def access_key(self) -> str | None: ...

    def require(self) -> None: ...

    def ask(self, path: str) -> bytes: ...

    def stop(self) -> None: ...


class OwnServer(ServerProcess):
    """A server that the worker has started. Only the worker has its key, and the kernel kills it when the worker ends."""

    def __init__(self, model: str | dict[str, Any], settings: Mapping[str, Any]) -> None:
        """Raise SettingsError if the model or a setting is wrong."""
        self.access_key = secrets.token_hex(16)
        for name in KEYS:
            os.environ.pop(f"{PREFIX}{name.upper()}", None)
        kept = {name: value for name, value in settings.items() if name not in KEYS}
        super().__init__([model], {**kept, "api_keys": [self.access_key]}, address="127.0.0.1")

    def ask(self, path: str) -> bytes:
        return _ask(self.url + path, self.access_key)


class FoundServer:
    """A server that runs already. It goes on when the worker ends."""

    def __init__(self, url: str, access_key: str | None, events: str | None) -> None:
        self.url = url.rstrip("/")
        self.access_key = access_key
        self.events = events

    def require(self) -> None:
        """A server that has ended does not answer."""

    def ask(self, path: str) -> bytes:
        return _ask(self.url + path, self.access_key)

    def stop(self) -> None:
        """Leave it running."""


async def until_ready(server: Server) -> None:
    """Raise ServerEnded if the server ends first."""
    log.info("waiting for the server at %s", server.url)
    while True:
        server.require()
        try:
            await asyncio.to_thread(server.ask, "/health/ready")
            return
        except OSError:
            await asyncio.sleep(READY_POLL_S)


def _ask(url: str, key: str | None) -> bytes:
    host = urlsplit(url).hostname or ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if is_loopback(host) else None))
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with opener.open(request, timeout=ASK_S) as answer:
            return answer.read()
    except HTTPException as error:
        raise OSError(f"the answer is broken off: {error!r}") from error
