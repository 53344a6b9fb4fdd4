"""The ledger of running requests: the data to continue each request in another worker, and how much each request is blamed for the deaths
of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from server.interfaces import RequestError
from server.messages import Embed, Embedding, FinishReason, Submit, TokenEvent

CRASH = 1.0  # blame for a crash of the worker
KILLED = 1 / 32  # blame for a kill from outside, rarely caused by a request; above 0, so that kills do not restart workers for ever
SUSPECT = 2.0  # a job with at least this blame is a suspect and runs alone
PROVEN = 1.0  # a suspect with at least this proof ends with an error


@dataclass(slots=True, eq=False)
class Job:
    """Work that a worker runs or will run. `blame` adds up over the deaths of workers that ran the job, `proof` over the deaths for which
    `assign_blame` accuses only this job. Both are cleared when the job makes progress."""

    in_worker: bool = False  # the job was sent to the present worker, which has not ended it
    is_shelved: bool = False  # the job waits for its client, and is not to be submitted now
    blame: float = 0.0
    proof: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether the job has so much blame that it must run alone."""
        return self.blame >= SUSPECT

    @property
    def stays(self) -> bool:
        """Whether a worker runs the job and is to run it to its end."""
        return self.in_worker

    def lost(self) -> None:
        """Record that no worker runs the job any more."""
        self.in_worker = False

    def clear(self) -> None:
        """Forget the deaths: the job makes progress."""
        self.blame = self.proof = 0.0


J = TypeVar("J", bound=Job)


MOST_UNREAD = 256  # events per choice that the client has not read; with more, the request leaves the worker
FEW_UNREAD = 16  # events per choice that the client has not read; with no more, a shelved request returns to the worker


@dataclass(slots=True, eq=False)
class Generation(Job):
    """A request that generates. If its client stops reading, the request leaves the worker and is shelved, so that the front stores few
    events of it. Once the client has read most of them, a worker continues the request, as after the death of a worker.

        in the worker -- too much is unread --> leaving -- the worker has ended all choices --> shelved -- little is unread --> to submit
    """

    submit: Submit = field(kw_only=True)
    is_leaving: bool = False  # the worker was told to abort the request
    ended: set[int] = field(default_factory=set[int])  # choices that the worker has ended because the request leaves
    emitted: list[list[int]] = field(init=False)  # by choice, the tokens that workers have sent
    finished: set[int] = field(init=False)  # choices that have ended
    dropped: set[int] = field(default_factory=set[int])  # finished choices that the front itself ended
    # Events for the client, or the error with which the request fails; None: the front has ended the last choice. The queue is unbounded,
    # because a client that reads slowly must not hold up others. A request leaves the worker once it `is_unread`.
    news: asyncio.Queue[TokenEvent | RequestError | None] = field(init=False)
    num_cached: int | None = None  # prompt tokens in the prefix cache, as the first worker has reported them

    def __post_init__(self) -> None:
        submit = self.submit
        self.emitted = [list(ids) for ids in submit.emitted] or [[] for _ in range(submit.num_choices)]
        self.finished = set(submit.finished)
        self.news = asyncio.Queue()

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return len(self.finished) == self.submit.num_choices

    @property
    def stays(self) -> bool:
        return self.in_worker and not self.is_leaving

    @property
    def is_unread(self) -> bool:
        """Whether the client has so much to read that the request must leave the worker."""
        return self.news.qsize() > MOST_UNREAD * self.submit.num_choices

    @property
    def may_return(self) -> bool:
        """True if the request is shelved, and its client has only a few events left to read."""
        return self.is_shelved and self.news.qsize() <= self._few_unread

    @property
    def _few_unread(self) -> int:
        """The largest number of unread events with which the request returns to the worker."""
        return FEW_UNREAD * self.submit.num_choices

    def lost(self) -> None:
        """Record that no worker runs the request any more. If the request was leaving, and its client still has much to read, shelve the
        request."""
        Job.lost(self)
        self.is_shelved |= self.is_leaving and self.news.qsize() > self._few_unread
        self.is_leaving = False
        self.ended.clear()

    def _leave(self) -> None:
        """If the request is leaving, and the worker has ended all of the request's choices, record that the request has left."""
        if self.is_leaving and len(self.ended | self.finished) == self.submit.num_choices:
            self.lost()

    def message(self) -> Submit:
        """Return the Submit with which a worker begins or continues the request."""
        return msgspec.structs.replace(self.submit, emitted=tuple(map(tuple, self.emitted)), finished=tuple(sorted(self.finished)))

    def record(self, event: TokenEvent) -> None:
        """Record an event of the worker, and pass it on to the client. Ignore events of a choice that the front has ended. If the worker
        aborts a choice because the request leaves, only add the choice to `ended`."""
        if event.choice in self.finished:
            return  # the front has ended this choice, and the worker did not know yet
        self.clear()
        if self.is_leaving and event.finish_reason is FinishReason.ABORT:
            self.ended.add(event.choice)
            self._leave()
            return
        if self.num_cached is None:
            self.num_cached = event.num_cached
        elif event.num_cached != self.num_cached:  # the client has already received the first worker's figure
            event = msgspec.structs.replace(event, num_cached=self.num_cached)
        self.emitted[event.choice].extend(event.token_ids)
        if event.finish_reason is not None:
            self.finished.add(event.choice)
            self._leave()
        self.news.put_nowait(event)

    def drop(self, choice: int) -> None:
        """End a choice that the client does not want any more."""
        self.finished.add(choice)
        self.dropped.add(choice)
        self._leave()
        if self.is_finished:
            self.news.put_nowait(None)

    def fail(self, error: RequestError) -> None:
        """Pass an error on to the client."""
        self.news.put_nowait(error)


@dataclass(slots=True, eq=False)
class Embedded(Job):
    """A text or an image whose vectors a worker computes."""

    embed: Embed = field(kw_only=True)
    result: asyncio.Future[Embedding] = field(default_factory=asyncio.Future[Embedding])

    def message(self) -> Embed:
        """Return the message for a worker."""
        return self.embed

    def record(self, embedding: Embedding) -> None:
        """Pass the vectors on to the client."""
        if not self.result.done():
            self.result.set_result(embedding)

    def fail(self, error: RequestError) -> None:
        """Pass an error on to the client."""
        if not self.result.done():
            self.result.set_exception(error)


def assign_blame(jobs: Iterable[J], weight: float) -> J | None:
    """Blame the jobs that ran in a worker that died, and record that no worker runs them. Return the job to fail, or None if no job is to
    fail.

    If suspects ran, only the suspects are accused; otherwise all jobs that ran are accused. The job to fail is a suspect, is the only
    accused job, and has a proof of at least PROVEN.
    """
    present = [job for job in jobs if job.in_worker]
    accused = [job for job in present if job.is_suspect] or present
    for job in present:
        job.blame += weight
        job.lost()
    if len(accused) != 1:
        return None
    (job,) = accused
    job.proof += weight
    return job if job.is_suspect and job.proof >= PROVEN else None


def next_to_run(jobs: Iterable[J]) -> list[J]:
    """Return the jobs to submit now. Suspects run one at a time and before all other jobs, so that only one job can cause a death."""
    jobs = [job for job in jobs if not job.is_shelved]
    suspects = [job for job in jobs if job.is_suspect]
    if any(job.in_worker for job in suspects):
        return []
    return suspects[:1] or [job for job in jobs if not job.in_worker]
