"""Run batches: send each line to this server as a request that gets only the part of each step that other requests leave free.

A batch runs a file's lines in order, as many at a time as the model's batch holds. Lines of several batches for one model take turns. A
line that the server cannot take now, such as one for a model that is still loading, is tried again until the batch expires. Every line
gets exactly one line in the output or the error file: a restarted server continues with the lines that have none, and so does a server that
could not write to the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.types import ASGIApp

from server.batches import inward, lines
from server.batches.lines import Head, Line
from server.batches.records import BatchRecord, FileRecord, Status, now
from server.batches.store import Store
from server.errors import ApiError
from server.http.auth import Access, Passed
from server.http.keys import KeyLimits
from server.models.registry import Registry

log = logging.getLogger(__name__)

AT_ONCE = 16  # requests at a time for a model that is not loaded
LONGEST_WAIT_S = 30.0  # longest time between two tries of a line
AGAIN_S = 60.0  # pause of a batch that an error has stopped, before the batch goes on
READ_AT_ONCE = 64  # lines read from the disk at a time
AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)  # statuses after which a line is tried again
T = TypeVar("T")


@dataclass(slots=True)
class Run:
    """A batch while it runs."""

    record: BatchRecord
    # set when the batch is cancelled or expires: from then on no line begins, and running lines are aborted
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Slot:
    """The place of a line among those that run at the same time for a model. The place is given back once, however often `release` is
    called."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots

    def release(self) -> None:
        if self._slots is not None:
            self._slots.release()
            self._slots = None


class Runner:
    """Runs the batches of a server."""

    def __init__(self, store: Store, registry: Registry, app: ASGIApp, *, max_line_bytes: int, keep_s: int) -> None:
        """Lines are sent as requests to `app`. The output and error files of a batch are kept for `keep_s` seconds."""
        self._store = store
        self._registry = registry
        self._app = app
        self._max_line_bytes = max_line_bytes
        self._keep_s = keep_s
        # Semaphores, by the model's name ("": all models that are not loaded) and by the number of lines at a time. Another load of a model
        # may change this number. A semaphore is freed once no line uses it.
        self._slots: WeakValueDictionary[tuple[str, int], asyncio.Semaphore] = WeakValueDictionary()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the batch's id, like _runs
        self._runs: dict[str, Run] = {}
        self._is_closing = False

    def start(self, record: BatchRecord) -> None:
        """Begin or continue a batch. A batch that is being cancelled begins no further lines."""
        run = self._runs[record.id] = Run(record)
        if record.status is Status.CANCELLING:
            run.stopped.set()
        self._tasks[record.id] = asyncio.create_task(self._guarded(run), name=record.id)

    def cancel(self, record: BatchRecord) -> None:
        """Stop a batch that runs, and abort its running lines. Raise OSError if the disk refuses the record. The lines are aborted all the
        same, because a later cancellation would do nothing."""
        record.reach(Status.CANCELLING)
        self._runs[record.id].stopped.set()
        self._store.save(record)

    async def close(self) -> None:
        """Leave all batches as they are. The next start continues them."""
        self._is_closing = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # --- one batch -------------------------------------------------------------------------------------------------------

    async def _guarded(self, run: Run) -> None:
        """Run a batch to its end. After an error, go on in AGAIN_S seconds, or as soon as the batch is to stop. If the server stops, return
        instead."""
        while True:
            was_stopped = run.stopped.is_set()
            try:
                await self._whole(run)
            except* OSError as errors:
                log.error("batch %s has stopped: %s; it goes on in %g s", run.record.id, errors.exceptions[0], AGAIN_S)
            except* Exception:
                log.exception("batch %s has stopped; it goes on in %g s", run.record.id, AGAIN_S)
            else:
                del self._runs[run.record.id], self._tasks[run.record.id]
                return
            if self._is_closing:
                # before Python 3.13, a TaskGroup that ends because of an error may drop a cancellation, and may leave cancelling() at 1
                return
            if was_stopped:
                await asyncio.sleep(AGAIN_S)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(run.stopped.wait(), AGAIN_S)

    async def _whole(self, run: Run) -> None:
        """Run a batch to its end, from the stage that it has reached."""
        record = run.record
        if not record.total or record.faults:  # if there are faults, an earlier try could not store that the batch has failed
            await self._validate(record)
        if record.has_ended:
            return
        done = await asyncio.to_thread(self._recovered, record)
        timer = asyncio.get_running_loop().call_later(max(0, record.expires_at - now()), run.stopped.set)
        try:
            await self._answer_all(run, done)
        finally:
            timer.cancel()
        await asyncio.to_thread(self._finish, record)

    async def _validate(self, record: BatchRecord) -> None:
        """Check the input file of a batch. The batch fails if the file has faults."""
        record.total, record.faults = await asyncio.to_thread(self._check, record)
        if record.faults:
            await asyncio.to_thread(self._store.end, record, Status.FAILED)
        elif record.status is Status.VALIDATING:  # the batch was not cancelled meanwhile
            record.reach(Status.IN_PROGRESS)
            await asyncio.to_thread(self._store.save, record)
        log.info("batch %s of %d lines for %s: %s", record.id, record.total, record.endpoint, record.status)

    def _check(self, record: BatchRecord) -> tuple[int, list[lines.Fault]]:
        """Return the number of lines of a batch, and its faults."""
        return lines.check(self._lines(record.input_file_id), record.endpoint, self._max_line_bytes)

    def _lines(self, file_id: str) -> Iterator[bytes]:
        """Yield the lines of a file."""
        return self._store.lines(file_id, self._max_line_bytes)

    def _recovered(self, record: BatchRecord) -> set[str]:
        """Return the ids of the requests that have a line in the output or the error file, and count these lines in the record. Remove an
        incomplete last line from these files first."""
        done: set[str] = set()
        record.completed = record.failed = record.unanswered = 0
        for file_id in (record.output_file_id, record.error_file_id):
            self._store.recover(file_id)
            for line in lines.written(self._store.lines(file_id)):
                done.add(line.custom_id)
                record.unanswered += line.response is None
                is_completed = line.response is not None and line.response.status_code == HTTPStatus.OK
                record.completed += is_completed
                record.failed += line.response is not None and not is_completed
        return done

    async def _answer_all(self, run: Run, done: set[str]) -> None:
        """Answer the lines that are not in `done`, until the batch is stopped."""
        record = run.record
        todo = (line for line in lines.read(self._lines(record.input_file_id)) if line.custom_id not in done)
        async with asyncio.TaskGroup() as tasks:
            async for line in _in_portions(todo):
                slots = self._slots_of(msgspec.json.decode(line.body, type=Head).model)
                if not await _is_slot_taken(slots, run.stopped):
                    break
                slot = Slot(slots)
                task = tasks.create_task(self._answer(run, line, slot))
                task.add_done_callback(lambda _, slot=slot: slot.release())  # also after an error, and if the task never began

    def _slots_of(self, model: str | None) -> asyncio.Semaphore:
        """Return the semaphore that limits how many lines run at the same time for a model. Batches wait for it in the order of arrival."""
        name, count = "", AT_ONCE  # the lines of all models that are not loaded share one semaphore
        with suppress(ApiError):
            found, loaded = self._registry.serve(model)
            name, count = found.spec.name, loaded.admission.max_running
        return self._slots.setdefault((name, count), asyncio.Semaphore(count))

    # --- one line --------------------------------------------------------------------------------------------------------

    async def _answer(self, run: Run, asked: Line, slot: Slot) -> None:
        """Answer a line, and give its slot back. Then write the answer into the output file, or into the error file if the status is not
        200. Write nothing if the batch was stopped before there was an answer."""
        answer = await self._call(run, asked)
        slot.release()
        if answer is None:
            return
        is_error = answer.status != HTTPStatus.OK
        record = run.record
        line = lines.answered(asked.custom_id, answer.status, answer.headers.get("x-request-id", ""), bytes(answer.body))
        await asyncio.to_thread(self._store.append, record.error_file_id if is_error else record.output_file_id, line)
        record.failed += is_error
        record.completed += not is_error

    async def _call(self, run: Run, line: Line) -> inward.Answer | None:
        """Return the answer to a line. While the server cannot take the line, try again, with growing pauses. Return None if the batch was
        stopped before there was an answer. Raise CancelledError if the server stops."""
        record, wait_s = run.record, 1.0
        passed = Passed(Access.KEY, record.key_digest, record.owner, limits=KeyLimits(record.models))
        while not run.stopped.is_set():
            answer = await inward.call(self._app, line.url, bytes(line.body), passed, record.id, run.stopped)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # the gateway caught the cancellation of this task and answered that the server stops, so end the task here
                raise asyncio.CancelledError
            if run.stopped.is_set() and answer.status != HTTPStatus.OK:
                break  # the request was aborted
            if answer.status not in AGAIN:
                return answer
            with suppress(TimeoutError):
                await asyncio.wait_for(run.stopped.wait(), wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return None

    # --- the end ---------------------------------------------------------------------------------------------------------

    def _finish(self, record: BatchRecord) -> None:
        """Write lines for the requests that have no answer, make the output files readable, and end the batch."""
        is_cancelled = record.status is Status.CANCELLING
        if record.num_done < record.total:
            code, why = ("batch_cancelled", "the batch was cancelled") if is_cancelled else ("batch_expired", "the batch expired")
            done = self._recovered(record)
            for line in lines.read(self._lines(record.input_file_id)):
                if line.custom_id not in done:
                    text = f"{why} before this request was answered"
                    self._store.append(record.error_file_id, lines.unanswered(line.custom_id, code, text))
                    record.unanswered += 1
        for file_id, kind in ((record.output_file_id, "output"), (record.error_file_id, "errors")):
            self._publish(record, file_id, kind)
        # a new dictionary, because the event loop may be reading the old one while this runs on another thread
        record.times = {**record.times, Status.FINALIZING: record.times.get(Status.FINALIZING, now())}
        self._store.end(record, Status.CANCELLED if is_cancelled else Status.EXPIRED if record.unanswered else Status.COMPLETED)
        log.info("batch %s %s: %d answers, %d errors", record.id, record.status, record.completed, record.failed)

    def _publish(self, record: BatchRecord, file_id: str, kind: str) -> None:
        """Let clients read a file that the batch has written, unless they can already or the batch has written no such file. `kind` is a
        part of the name that clients see."""
        path = self._store.data(file_id)
        if path.exists() and file_id not in self._store.files:
            name = f"{record.id}_{kind}.jsonl"
            size, expires_at = path.stat().st_size, now() + self._keep_s
            self._store.keep(FileRecord(file_id, record.owner, name, "batch_output", size, now(), expires_at))


async def _is_slot_taken(slots: asyncio.Semaphore, stopped: asyncio.Event) -> bool:
    """Take a slot and return True, or return False, without a slot, if `stopped` is set before there is one. If this task is cancelled, a
    slot that the task has just got is given back."""
    tasks = [asyncio.create_task(slots.acquire()), asyncio.create_task(stopped.wait())]
    is_taken = False
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        is_taken = not stopped.is_set() and tasks[0].done()
    finally:
        if tasks[0].done() and not is_taken:
            slots.release()
        for task in tasks:
            task.cancel()
    return is_taken


async def _in_portions(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items that another thread reads from the disk, READ_AT_ONCE at a time."""
    iterator = iter(items)

    def portion() -> list[T]:
        return [item for _, item in zip(range(READ_AT_ONCE), iterator, strict=False)]

    while found := await asyncio.to_thread(portion):
        for item in found:
            yield item
