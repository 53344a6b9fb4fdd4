"""Have a worker's process load a model: the process gets the message `Load`, and answers with its progress, then with `Ready` or an
error."""

from __future__ import annotations

import asyncio

from server.interfaces import LoadError, ProgressCallback
from server.messages import ErrorCode, Load, LoadFailed, Progress, Ready, Working
from server.workers.worker_process import WorkerProcess


class EndedWhileLoading(LoadError):
    """The worker has ended while it loaded. `from_outside`: see `WorkerProcess.ended_from_outside`."""

    def __init__(self, message: str, *, from_outside: bool) -> None:
        super().__init__(ErrorCode.LOAD_FAILED, message)
        self.from_outside = from_outside


async def load_in(worker: WorkerProcess, load: Load, progress: ProgressCallback, *, silence_s: float | None, stop_s: float) -> Ready:
    """Load a model in a process, and return its Ready message. Raise LoadError if the load fails, or makes no progress for `silence_s`
    (None: no limit). If the process closes its connection or sends an unexpected message, kill it after `stop_s` seconds if it has not
    ended by then, and raise EndedWhileLoading."""
    worker.send(load)
    try:
        while True:
            async with asyncio.timeout(silence_s):
                message = await worker.receive()
            match message:
                case Progress():
                    progress(message)
                case Working():
                    pass
                case Ready():
                    return message
                case LoadFailed():
                    raise LoadError(message.code, message.message, message.required_bytes, message.free_bytes)
                case _:
                    how = await worker.close(stop_s)
                    text = f"the worker ended while loading: {how}; see its log"
                    raise EndedWhileLoading(text, from_outside=worker.ended_from_outside)
    except TimeoutError:
        raise LoadError(ErrorCode.LOAD_FAILED, f"the worker's load made no progress for {silence_s:g} s") from None
