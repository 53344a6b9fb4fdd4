"""The server behind a worker: one that the worker starts, or one that runs already."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.error import HTTPError

from deploy.replicas.process import ServerProcess, ask
from deploy.settings import PREFIX

log = logging.getLogger(__name__)

READY_POLL_S = 0.1  # interval at which a server is asked whether it is ready
SAY_S = 30.0  # interval at which the log says why the server is not ready yet
NOT_YET = (502, 503, 504)  # statuses of a server that is not ready yet, and of a proxy in front of it
KEYS = ("api_keys", "api_key_file", "admin_keys", "admin_key_file")  # settings that name keys; the worker's own server ignores them


class Server(Protocol):
    """A server. A method raises OSError if the server does not answer, and ServerEnded if it has ended."""

    @property
    def url(self) -> str: ...

    @property
    def events(self) -> str | None:
        """The address of its cache events, or None if it publishes none."""
        ...

    @property
    def access_key(self) -> str | None:
        """The API key for requests to the server, or None if it needs none."""
        ...

    def require(self) -> None:
        """Raise ServerEnded if the server has ended, as far as this process can see without asking the server."""
        ...

    def require_answer(self) -> None:
        """Ask the server whether it is alive. Raise OSError if it does not answer, and ServerEnded if it has ended."""
        ...

    def ask(self, path: str) -> bytes:
        """Send a GET request for `path`, and return the body of the answer. Raise HTTPError, which is an OSError, if the server answers
        with an error."""
        ...

    def stop(self, within_s: float | None = None) -> None:
        """Stop the server if the worker has started it, at the latest after `within_s` seconds."""
        ...


class OwnServer(ServerProcess):
    """A server that the worker has started. Only the worker has its key, and the kernel kills it when the worker ends."""

    def __init__(self, model: str | dict[str, Any], settings: Mapping[str, Any]) -> None:
        """Start the server. The server accepts only a key that the worker makes. Ignore the keys in `settings`, and remove those in the
        environment of this process. Raise SettingsError if the model or a setting is wrong."""
        self.access_key = secrets.token_hex(16)
        for name in KEYS:
            os.environ.pop(f"{PREFIX}{name.upper()}", None)
        kept = {name: value for name, value in settings.items() if name not in KEYS}
        super().__init__([model], {**kept, "api_keys": [self.access_key]}, address="127.0.0.1")


class FoundServer:
    """A server that runs already. It runs on when the worker ends."""

    def __init__(self, url: str, access_key: str | None, events: str | None) -> None:
        """`events`: the address of its cache events; None: Dynamo gets no events."""
        self.url = url.rstrip("/")
        self.access_key = access_key
        self.events = events

    def require(self) -> None:
        """Do nothing: the worker has no process of this server to look at. If the server has ended, `require_answer` raises OSError."""

    def require_answer(self) -> None:
        self.ask("/health/live")

    def ask(self, path: str) -> bytes:
        return ask(self.url + path, self.access_key)

    def stop(self, within_s: float | None = None) -> None:
        """Leave it running."""


class GivenUp(Exception):
    """Raised if the worker must end before its server is ready."""


async def until_ready(server: Server, must_end: Callable[[], bool] = lambda: False) -> None:
    """Wait until the server is ready, and log from time to time why it is not. Raise ServerEnded if the server ends first, GivenUp once
    `must_end` returns True, and OSError if waiting does not help: TLS fails, or the server answers with an error that does not mean that it
    is not ready yet."""
    log.info("waiting for the server at %s", server.url)
    said_s = time.monotonic()
    while True:
        server.require()
        if must_end():
            raise GivenUp(f"the server at {server.url} is not waited for any more")
        try:
            await asyncio.to_thread(server.ask, "/health/ready")
            return
        except OSError as error:
            if isinstance(error, ssl.SSLError) or (isinstance(error, HTTPError) and error.code not in NOT_YET):
                raise
            if time.monotonic() - said_s >= SAY_S:
                log.warning("the server at %s is not ready yet: %s", server.url, error)
                said_s = time.monotonic()
        await asyncio.sleep(READY_POLL_S)
