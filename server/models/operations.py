"""Operations: long work that an administrator can watch, wait for and cancel."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.errors import ApiError
from server.messages import FETCH, Progress
from server.models.library import Pulled

KEPT_S = 3600.0  # least time for which an operation is remembered after its end


class OperationState(StrEnum):
    """Whether an operation runs, and how it ended."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class OperationReport(TypedDict):
    """An operation as the admin API describes it."""

    id: str
    object: Literal["operation"]
    kind: str
    model: str
    state: OperationState
    stage: str  # "queued", then the stages that the worker or the download reports
    fraction: float  # share of the stage that is done; 1 after success
    stages: dict[str, float]  # seconds spent in each stage
    started_at: float
    ended_at: float | None
    total_bytes: NotRequired[int]  # bytes that were missing when a download began; 0: unknown
    completed_bytes: NotRequired[int]
    error: dict[str, object] | None  # code, message, status, and further details of the error


class Operation:
    """The progress of one load or download. A slow watcher may miss changes, but each report has the times of all stages that have
    ended."""

    def __init__(self, kind: str, model: str) -> None:
        """`kind`: "load", "reload" or "download". `model`: the name of the model, or the source that is downloaded."""
        self.id = f"op-{secrets.token_hex(8)}"
        self.kind = kind
        self.model = model
        self.state = OperationState.RUNNING
        self.stage = "queued"
        self.fraction = 0.0
        self.stages: dict[str, float] = {}  # seconds spent in each stage
        self.error: ApiError | None = None
        self.pulled: Pulled | None = None  # progress of a download in bytes
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.task: asyncio.Task[None] | None = None  # does the work; None: the load was refused, or has not begun
        self._stage_began = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def outcome(self) -> str:
        """How the operation ended, as the end of a sentence that begins with "it"."""
        return f"was {self.state}" if self.state is OperationState.CANCELLED else str(self.state)

    def report(self, progress: Progress) -> None:
        """Record the progress, and wake the watchers."""
        if progress.stage != self.stage:
            self._close_stage()
            self.stage = progress.stage
        self.fraction = progress.fraction
        self._notify()

    def count(self, pulled: Pulled) -> None:
        """Report the bytes of a download."""
        self.pulled = pulled
        self.report(Progress(FETCH, pulled.completed_bytes / max(1, pulled.total_bytes)))

    def end(self, state: OperationState, error: ApiError | None = None) -> None:
        """End the operation, and wake the watchers."""
        self._close_stage()
        self.state = state
        self.error = error
        self.ended_at = time.time()
        if state is OperationState.SUCCEEDED:
            self.fraction = 1.0
        self._notify()

    def cancel(self) -> None:
        """Cancel the task, unless it has ended or was cancelled before: a second cancellation would interrupt what the task does at its
        end, such as stopping a worker."""
        if self.task is not None and not self.task.cancelling():
            self.task.cancel()

    async def wait(self) -> None:
        """Return when the operation has ended, with or without success."""
        while self.state is OperationState.RUNNING:
            await self._changed.wait()

    async def watch(self) -> AsyncGenerator[OperationReport, None]:
        """Yield a report now and after each change, until the operation ends."""
        while True:
            changed = self._changed
            report = self.describe()
            yield report
            if report["state"] is not OperationState.RUNNING:
                return
            await changed.wait()

    def describe(self) -> OperationReport:
        """Return a report of the present state."""
        error: dict[str, object] | None = None
        if self.error is not None:
            kind = self.error.kind
            error = {"code": kind.code, "message": self.error.message, "status": kind.status, **self.error.details}
        report: OperationReport = {
            "id": self.id,
            "object": "operation",
            "kind": self.kind,
            "model": self.model,
            "state": self.state,
            "stage": self.stage,
            "fraction": round(self.fraction, 4),
            "stages": {stage: round(spent_s, 4) for stage, spent_s in self.stages.items()},
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "error": error,
        }
        if self.pulled is not None:
            report["total_bytes"], report["completed_bytes"] = self.pulled.total_bytes, self.pulled.completed_bytes
        return report

    def _close_stage(self) -> None:
        """Add the time of the present stage to `stages`."""
        now = time.monotonic()
        self.stages[self.stage] = self.stages.get(self.stage, 0.0) + now - self._stage_began
        self._stage_began = now

    def _notify(self) -> None:
        """Wake the watchers, because something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()


class Operations:
    """The operations that run, or have ended. An operation that ended more than KEPT_S ago is forgotten when another one begins."""

    def __init__(self) -> None:
        self._by_id: dict[str, Operation] = {}

    def begin(self, kind: str, model: str) -> Operation:
        """Create an operation, and forget those that ended long ago. The caller sets its `task`."""
        forgotten = time.time() - KEPT_S
        for operation in [o for o in self._by_id.values() if o.ended_at is not None and o.ended_at < forgotten]:
            del self._by_id[operation.id]
        operation = Operation(kind, model)
        self._by_id[operation.id] = operation
        return operation

    def get(self, operation_id: str) -> Operation | None:
        return self._by_id.get(operation_id)

    def all(self) -> list[Operation]:
        return list(self._by_id.values())

    async def cancel_all(self) -> None:
        """Cancel all running operations, and wait until they have ended."""
        running = [o for o in self._by_id.values() if o.task is not None and not o.task.done()]
        for operation in running:
            operation.cancel()
        await asyncio.gather(*(o.task for o in running if o.task is not None), return_exceptions=True)
