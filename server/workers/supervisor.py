"""The front's supervisor of one worker. It starts and watches the worker. If the worker dies, the supervisor starts another one, and
submits the dead worker's requests to it.

    STARTING -> READY <-> RESTARTING      READY | RESTARTING -> DRAINING -> STOPPED      READY -> SLEEPING -> RESTARTING

`stop` leads to STOPPED from every state, and so does a first load that fails: `start` then raises LoadError. If the worker of a model that
was ready once dies, the supervisor starts workers until one is ready: the files were usable, so the cause of a failed start may be
temporary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import assert_never

import msgspec

from runtime.device.base import CardUsage
from server.interfaces import CacheListener, LoadError, Outage, ProgressCallback, RequestError
from server.messages import (
    Abort,
    CacheChanged,
    Card,
    Damaged,
    Drain,
    Embed,
    Embedding,
    ErrorCode,
    Failed,
    FromWorker,
    GivePages,
    Load,
    LoadFailed,
    MorePages,
    PagesGiven,
    Progress,
    Ready,
    Shutdown,
    Stats,
    Step,
    Submit,
    TokenEvent,
    Tokens,
    Working,
)
from server.models.processes import usage_of
from server.workers.care import Care, EarlyDeaths
from server.workers.ledger import CRASH, KILLED, Embedded, Generation, assign_blame, next_to_run
from server.workers.loading import EndedWhileLoading, load_in
from server.workers.watchdog import Watchdog
from server.workers.worker_process import WorkerProcess

log = logging.getLogger(__name__)


class WorkerState(StrEnum):
    """The states of a model's worker. The module's docstring shows the transitions."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    STOPPED = "stopped"


async def _unchanged(_ready: Ready) -> None:
    """Let a worker with any fingerprint serve."""


class Supervisor:
    """One loaded model, and the worker that serves it. The class implements `server.interfaces.WorkerHandle`."""

    def __init__(
        self,
        command: Sequence[str],
        load: Load,
        *,
        progress: ProgressCallback = lambda _progress: None,
        care: Care | None = None,
        cache: CacheListener | None = None,
    ) -> None:
        """`command` starts a worker, which gets the message `load`. `progress` is called while the worker loads. `cache` is told the
        changes of the worker's prefix cache."""
        self.state = WorkerState.STARTING
        self.stats: Stats | None = None
        self.card: CardUsage | None = None
        self.ready: Ready | None = None
        self.outage: Outage | None = None  # set from the death of a worker, or from `wake`, until the next worker is ready
        self.restarts = 0
        self.resubmitted = 0
        self.before_wake: Callable[[], None] = lambda: None  # raises RequestError if the memory does not suffice
        self.before_change: Callable[[Ready], Awaitable[None]] = _unchanged
        self._command = command
        self._load = load
        self._progress = progress
        self._care = care or Care()
        self._cache = cache
        self._jobs: dict[str, Generation | Embedded] = {}
        self._givings: dict[str, asyncio.Queue[PagesGiven | None]] = {}  # offers and pages for other servers, by request id; None: no more
        self._worker: WorkerProcess | None = None  # the worker that serves
        self._loading: WorkerProcess | None = None  # the worker that loads
        self.ready_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._watchdog = Watchdog(self._care.stall_s)
        # The worker may have hundreds of processes for constraints, so a thread measures their CPU time. The event loop's executor is not
        # used, because all of its threads may be waiting for a disk.
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._stages_cpu_s = 0.0  # CPU time of the other stages of the model, as the worker last reported
        self._early_deaths = EarlyDeaths(self._care)
        self._is_down = asyncio.Event()  # cleared while a worker that was put to sleep still runs
        self._is_down.set()
        self._is_called = asyncio.Event()  # set when the sleeping model is to wake up

    @property
    def pid(self) -> int | None:
        """The process id of the worker that serves, or else of the worker that is loading."""
        worker = self._worker or self._loading
        return None if worker is None else worker.pid

    async def start(self) -> Ready:
        """Start the worker and return its Ready message. If the load fails, raise LoadError, and leave no process."""
        try:
            self.ready = await self._launch()
        except BaseException:
            self.state = WorkerState.STOPPED
            raise
        self.state = WorkerState.READY
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]
        return self.ready

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of all choices until each has ended. Closing the generator aborts the choices that still run. Raise RequestError
        if the request fails."""
        job = Generation(submit=submit)
        self._enter(submit.request_id, job)
        try:
            while not (job.is_finished and job.news.empty()):
                news = await job.news.get()
                if job.may_return:
                    job.is_shelved = False
                    self._hand_over()
                if isinstance(news, RequestError):
                    raise news
                if news is not None and news.choice not in job.dropped:
                    yield news
        finally:
            self._leave(submit.request_id, job)

    def abort(self, request_id: str, choice: int) -> None:
        """End one choice. The generator of its request yields no further events of the choice. Do nothing if the choice or its request has
        ended."""
        job = self._jobs.get(request_id)
        if isinstance(job, Generation) and choice not in job.finished:
            job.drop(choice)
            if job.in_worker and self._worker is not None:
                self._worker.send(Abort(request_id, choice))
            if job.is_finished:
                self._let_go(request_id, job)
            elif not job.in_worker:
                self._hand_over()

    async def embed(self, embed: Embed) -> Embedding:
        """Return the vectors of a text or of an image. Raise RequestError if the text or the image cannot be embedded."""
        job = Embedded(embed=embed)
        self._enter(embed.request_id, job)
        try:
            return await job.result
        finally:
            self._leave(embed.request_id, job)

    async def give(self, asked: GivePages) -> AsyncGenerator[PagesGiven, None]:
        """Yield the offer (`server.peers.wire.Offer`) of the pages that another server asks for, then the pages. Yield nothing if no worker
        serves, and end early if the worker ends."""
        worker, news = self._worker, asyncio.Queue[PagesGiven | None]()
        if worker is None or self.state not in (WorkerState.READY, WorkerState.DRAINING):
            return
        self._givings[asked.request_id] = news
        worker.send(asked)
        try:
            while (given := await news.get()) is not None:
                yield given
                if given.offer is not None:
                    continue
                if not given.data:
                    return
                worker.send(MorePages(asked.request_id))
        finally:
            del self._givings[asked.request_id]
            if worker is self._worker:
                worker.send(Abort(asked.request_id))

    async def sleep(self, *, keep: bool) -> None:
        """End the worker, which frees all of its memory. With `keep`, running requests continue when the model wakes, otherwise they fail.
        If the model sleeps already, only wait until its worker has ended. Raise RequestError if the model is not ready."""
        if self.state is WorkerState.SLEEPING:
            await self._is_down.wait()
            return
        if self.state is not WorkerState.READY or self._worker is None:
            raise RequestError(ErrorCode.MODEL_NOT_READY, f"the model {self._load.name} is {self.state.value}")
        self.state = WorkerState.SLEEPING
        self._is_down.clear()
        self._is_called.clear()
        if not keep:
            self._fail_all(RequestError(ErrorCode.SHUTTING_DOWN, f"the model {self._load.name} was put to sleep"))
        worker = self._worker
        worker.send(Shutdown())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_down.wait(), self._care.stop_s)
        worker.kill(is_blameless=True)
        await self._is_down.wait()

    def wake(self) -> None:
        """Begin to load the model again if it sleeps. Requests wait meanwhile, as during a restart. Raise RequestError if `before_wake`
        does."""
        if self.state is WorkerState.SLEEPING:
            self.before_wake()
            self.state = WorkerState.RESTARTING
            self.outage = Outage(time.monotonic(), self._care.patience_s)
            self._is_called.set()

    async def drain(self, timeout_s: float) -> None:
        """Give the running requests up to `timeout_s` seconds to end, fail those that have not ended, and stop. New requests are refused. A
        model that is neither ready nor restarting is stopped at once."""
        if self.state in (WorkerState.READY, WorkerState.RESTARTING):
            self.state = WorkerState.DRAINING
            self._hand_over()
            if self._worker is not None or not self._is_over:
                _, running = await asyncio.wait(self._tasks[:1], timeout=timeout_s)
                if running:
                    log.warning("model %s still had running requests after %.1f s; they fail", self._load.name, timeout_s)
        await self.stop()

    async def stop(self) -> None:
        """Fail all requests, and end the worker. Do nothing if the model was stopped already."""
        was, self.state = self.state, WorkerState.STOPPED
        if was is WorkerState.STOPPED:
            return
        self._is_down.set()
        self._fail_all(RequestError(ErrorCode.SHUTTING_DOWN, f"the model {self._load.name} is being unloaded"))
        if self._worker is not None:
            self._worker.send(Shutdown())
            await self._worker.close(self._care.stop_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._watcher.shutdown(wait=False)
        self._forget_cache()

    # --- requests --------------------------------------------------------------------------------------------------------

    def _enter(self, request_id: str, job: Generation | Embedded) -> None:
        """Add a job, and submit it if it may run. Wake the model if it sleeps. Raise RequestError if the model takes no requests now, or if
        the id is in use."""
        self.wake()
        if self.state not in (WorkerState.READY, WorkerState.RESTARTING):
            raise RequestError(ErrorCode.MODEL_NOT_READY, f"the model {self._load.name} is {self.state.value}")
        if self.outage is not None and self.outage.is_long:
            raise RequestError(
                ErrorCode.MODEL_NOT_READY, f"the model {self._load.name} is being restarted; see /admin/models", self._care.longest_delay_s
            )
        if request_id in self._jobs:
            raise RequestError(ErrorCode.INTERNAL_ERROR, f"request_id {request_id} is running already")
        self._jobs[request_id] = job
        self._hand_over()

    def _leave(self, request_id: str, job: Generation | Embedded) -> None:
        """Forget a job whose client has left or has read the whole result. If a worker still runs the job, abort it."""
        if self._jobs.get(request_id) is not job:
            return  # the request has ended already
        if job.in_worker and self._worker is not None:
            self._worker.send(Abort(request_id))
        self._let_go(request_id, job)

    def _let_go(self, request_id: str, job: Generation | Embedded) -> None:
        """Forget a job that no worker needs to run any more. Its client may still be reading events."""
        del self._jobs[request_id]
        if job.is_suspect or job.is_shelved or self.state is WorkerState.DRAINING:  # other jobs, or the drain, may have waited for this one
            self._hand_over()

    def _shelve(self, request_id: str, job: Generation) -> None:
        """Take a request out of the worker, because its client does not read. Do nothing while the worker drains, because it would not take
        the request back."""
        if self.state is not WorkerState.DRAINING and self._worker is not None:
            job.is_leaving = True
            self._worker.send(Abort(request_id))

    def _hand_over(self) -> None:
        """Submit the jobs that may run now. If the model drains and its worker has all jobs, tell the worker to drain."""
        if self._worker is None:
            return  # the restart will submit the jobs
        if self.state is WorkerState.DRAINING:
            for job in self._jobs.values():
                job.is_shelved = False  # the worker accepts no requests once it drains
        for job in next_to_run(self._jobs.values()):
            job.in_worker = True
            self._worker.send(job.message())
        if self.state is WorkerState.DRAINING and all(job.stays for job in self._jobs.values()):
            self._worker.send(Drain())

    def _fail_all(self, error: RequestError) -> None:
        """Fail all jobs, and forget them: no worker is to run them any more."""
        for job in self._jobs.values():
            job.fail(error)
        self._jobs = {}

    # --- the worker ------------------------------------------------------------------------------------------------------

    async def _launch(self, silence_s: float | None = None) -> Ready:
        """Start a process, load the model in it, and make it the worker. Raise LoadError if the load fails, or makes no progress for
        `silence_s` (None: no limit); no process is left then."""
        try:
            worker = self._loading = await WorkerProcess.open(self._command, self._heed)
        except (OSError, RuntimeError, MemoryError) as error:
            raise LoadError(ErrorCode.LOAD_FAILED, f"the worker could not be started: {error or type(error).__name__}") from error
        try:
            ready = await load_in(worker, self._load, self._progress, silence_s=silence_s, stop_s=self._care.stop_s)
            if self.ready is not None and ready.fingerprint != self.ready.fingerprint:
                await self.before_change(ready)
            worker.is_up()
            self._watchdog.expect(0.0)
            self._stages_cpu_s = 0.0
            self._worker, self.card = worker, ready.card
            self.ready_s = time.monotonic()
            self._load = msgspec.structs.replace(self._load, restart=True, verify=False, least_context=ready.max_context, cuts=ready.cuts)
            return ready
        finally:
            self._loading = None
            if self._worker is not worker:
                worker.kill()
                await worker.close(self._care.stop_s)

    async def _supervise(self) -> None:
        """Handle the messages of the worker. When a worker ends, start another one, until no worker is needed."""
        while self._worker is not None:
            while (message := await self._worker.receive()) is not None:
                if not isinstance(message, Working):
                    self._watchdog.hear()
                self._heed(message)
            worker, self._worker, self.card, self.stats = self._worker, None, None, None
            for news in self._givings.values():
                news.put_nowait(None)
            self._forget_cache()
            if not self._is_down.is_set():  # the worker was put to sleep, even if a request has woken the model already
                await self._sleep(worker)
                continue
            if self.state is WorkerState.READY:
                self.state = WorkerState.RESTARTING
            self.outage = Outage(time.monotonic(), self._care.patience_s)
            how = await worker.close(self._care.stop_s)
            if self._is_over:
                return
            log.warning("%s: worker %d died (%s) with %d requests", self._load.name, worker.pid, how, len(self._jobs))
            self.resubmitted += sum(job.in_worker for job in self._jobs.values())
            guilty = assign_blame(self._jobs.values(), KILLED if worker.ended_from_outside else CRASH)
            if guilty is not None:
                self._quarantine(guilty, how)
            self._early_deaths.count(self.outage.began_s - self.ready_s)
            await self._restart(self.outage, killed=worker.ended_from_outside)
            self.restarts += self._worker is not None
            self._hand_over()

    def _forget_cache(self) -> None:
        """Tell the listener, if there is one, that the prefix cache is gone."""
        if self._cache is not None:
            self._cache.cleared()

    async def _sleep(self, worker: WorkerProcess) -> None:
        """Record that the worker of the sleeping model has ended. Wait until `wake` is called, then start another worker."""
        await worker.close(self._care.stop_s)
        for job in self._jobs.values():
            job.lost()
        self._is_down.set()
        await self._is_called.wait()
        if self.outage is not None:
            self._early_deaths.clear()
            await self._restart(self.outage, killed=False, is_wake=True)
            self._hand_over()

    async def _restart(self, outage: Outage, *, killed: bool, is_wake: bool = False) -> None:
        """Start workers, with growing delays, until one is ready or no worker is needed. `killed`: the last worker was killed from outside.
        `is_wake`: the model wakes from sleep, so success at the first try is logged at level INFO instead of WARNING."""
        while not self._is_over:
            if (delay_s := self._early_deaths.delay_s(killed=killed)) > 0:
                outage.next_try_s = time.monotonic() + delay_s
                await asyncio.sleep(delay_s)
            outage.next_try_s = None
            outage.num_tries += 1
            try:
                ready = await self._launch(self._care.load_silence_s)
            except LoadError as error:
                killed = isinstance(error, EndedWhileLoading) and error.from_outside
                self._early_deaths.count()
                if outage.error != error.message:  # log a cause only if it differs from that of the try before
                    log.error("%s: restart failed at try %d: %s", self._load.name, outage.num_tries, error.message)
                outage.error = error.message
                continue
            self._end_what_differs(ready)
            self.ready, self.outage = ready, None
            if self.state is WorkerState.RESTARTING:
                self.state = WorkerState.READY
            lasted_s = time.monotonic() - outage.began_s
            level = logging.INFO if is_wake and outage.num_tries == 1 else logging.WARNING
            log.log(level, "%s: a new worker was ready after %.1f s, at try %d", self._load.name, lasted_s, outage.num_tries)
            return

    def _end_what_differs(self, ready: Ready) -> None:
        """Fail all requests if the new worker has another fingerprint: their prompts were tokenized with the old files, and the new worker
        would continue a begun answer with other bytes than the old one."""
        was = ready.fingerprint if self.ready is None else self.ready.fingerprint
        if was == ready.fingerprint:
            return
        log.warning("%s: the new worker has the fingerprint %s instead of %s", self._load.name, ready.fingerprint, was)
        text = f"the model has the fingerprint {ready.fingerprint} since its restart"
        begun = RequestError(ErrorCode.GENERATION_FAILED, f"{text}, so it cannot continue an answer of {was}; ask again")
        waiting = RequestError(ErrorCode.MODEL_NOT_READY, f"{text}, and this request came to {was}; ask again", 1.0)
        for job in self._jobs.values():
            job.fail(begun if isinstance(job, Generation) and any(job.emitted) else waiting)
        self._jobs = {}

    @property
    def _is_over(self) -> bool:
        """True if no further worker is needed."""
        return self.state is WorkerState.STOPPED or (self.state is WorkerState.DRAINING and not self._jobs)

    def _quarantine(self, guilty: Generation | Embedded, how: str) -> None:
        """Fail the request that is to blame for the deaths of workers."""
        self._jobs = {request_id: job for request_id, job in self._jobs.items() if job is not guilty}
        guilty.fail(RequestError(ErrorCode.GENERATION_FAILED, f"every worker that ran this request died, the last with {how}"))

    async def _watch(self) -> None:
        """Kill a worker that has stalled."""
        watchdog, loop = self._watchdog, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(watchdog.interval_s)
            worker = self._worker
            if worker is None or not any(job.in_worker for job in self._jobs.values()):
                watchdog.hear()
                continue
            usage = await loop.run_in_executor(self._watcher, usage_of, worker.pid)
            if worker is self._worker and (fault := watchdog.look(usage.cpu_s + self._stages_cpu_s)):
                log.warning("%s: worker %d %s", self._load.name, worker.pid, fault)
                watchdog.hear()
                worker.kill()

    def _heed(self, message: FromWorker) -> None:
        """Handle a message of the worker. `WorkerProcess` also calls this, with a Failed message, for each request that cannot be sent to
        the worker."""
        match message:
            case Tokens():
                self._early_deaths.clear()
                for event in message.events:
                    job = self._jobs.get(event.request_id)
                    if isinstance(job, Generation):
                        was_suspect = job.is_suspect
                        job.record(event)
                        if job.is_finished:
                            self._let_go(event.request_id, job)
                        elif job.is_unread and job.in_worker and not job.is_leaving:
                            self._shelve(event.request_id, job)
                        elif not job.in_worker:
                            self._hand_over()  # the request has left the worker, and returns at once unless it is shelved
                        if was_suspect:
                            self._hand_over()
            case Embedding():
                self._early_deaths.clear()
                job = self._jobs.get(message.request_id)
                if isinstance(job, Embedded):
                    job.record(message)
                    self._let_go(message.request_id, job)
            case Failed():
                job = self._jobs.get(message.request_id)
                if job is not None:
                    job.fail(RequestError(message.code, message.message))
                    self._let_go(message.request_id, job)
                elif (news := self._givings.get(message.request_id)) is not None:
                    news.put_nowait(None)
            case Damaged():
                log.error("%s: %s; worker %s used the damaged files and is replaced", self._load.name, message.fault, self.pid)
                self._load = msgspec.structs.replace(self._load, verify=True)
                if self._worker is not None:
                    self._worker.kill(is_blameless=True)
            case Step():
                self._watchdog.expect(message.limit_s)
            case Working():
                self._stages_cpu_s = message.cpu_s
            case Stats():
                self.stats = message
            case Card():
                self.card = message.usage
            case CacheChanged():
                if self._cache is not None:
                    self._cache.changed(message.changes)
            case PagesGiven():
                if (news := self._givings.get(message.request_id)) is not None:
                    news.put_nowait(message)
            case Progress() | Ready() | LoadFailed():
                log.error("%s: worker %s sent %r while serving", self._load.name, self.pid, message)
            case _:
                assert_never(message)
