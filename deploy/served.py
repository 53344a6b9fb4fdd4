"""A server in a process of its own, for a process that measures a model as clients see it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from deploy.bound import end_with
from deploy.logs import configure
from deploy.serve import serve
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings


@contextmanager
def served(spec: ModelSpec, log_level: str = "warning") -> Generator[str]:
    """Start a server with this model in a separate process, which ends with this one, and yield its address once it is ready. At the end of
    the `with` block, stop the server and wait for its end. Raise LoadError if the model cannot be loaded."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(spec, log_level, os.getpid(), sender))
    process.start()
    sender.close()
    try:
        yield _greeting(receiver.recv, spec.name)
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        process.join()


def _greeting(receive: Callable[[], tuple[str, str]], name: str) -> str:
    """Wait until the server is ready, and return its address. Raise LoadError if the server sends a fault, or ends."""
    try:
        url, fault = receive()
    except EOFError:
        url, fault = "", f"the server of {name} ended before it was ready; its log says why"
    if fault:
        raise LoadError(ErrorCode.LOAD_FAILED, fault)
    return url


def _serve(spec: ModelSpec, log_level: str, parent: int, sender: Connection) -> None:
    """Run the server in the separate process. Send its address and "" once the model is loaded, or "" and the fault if the load fails; then
    end."""
    end_with(parent)
    configure(log_level, "text")

    async def greet(registry: Registry, url: str) -> bool:
        while not registry.ready:
            if faults := [operation.error.message for operation in registry.operations.all() if operation.error is not None]:
                sender.send(("", faults[0]))
                return False
            await asyncio.sleep(0.02)
        sender.send((url, ""))
        return True

    serve(ServerSettings(port=0, log_level=log_level), [spec], greet)
