"""When a worker dies, the ledger decides which request it blames for the death, and which requests run in the next worker."""

from __future__ import annotations

import asyncio

from server.messages import FinishReason, SamplingParams, Submit, TokenEvent
from server.workers.ledger import CRASH, KILLED, MOST_UNREAD, Generation, Job, assign_blame, next_to_run


def jobs(num: int) -> list[Job]:
    return [Job() for _ in range(num)]


def run(some: list[Job]) -> list[Job]:
    started = next_to_run(some)
    for job in started:
        job.in_worker = True
    return started


def test_one_alone_is_failed_at_the_second_death() -> None:
    (job,) = some = jobs(1)
    assert run(some) == [job] and assign_blame(some, CRASH) is None
    assert run(some) == [job] and assign_blame(some, CRASH) is job


def test_in_a_crowd_suspects_are_tried_one_by_one_and_the_guilty_fails_alone() -> None:
    some = jobs(4)
    for _ in range(2):
        assert run(some) == some
        assert assign_blame(some, CRASH) is None
    guilty = some[2]
    failed = None
    num_deaths = 0
    while failed is None:
        started = run(some)
        assert len(started) == 1, "a suspect must run alone"
        if started == [guilty]:
            num_deaths += 1
            failed = assign_blame(some, CRASH)
        else:
            started[0].clear()  # the request made progress, so the ledger no longer suspects it
    assert failed is guilty and num_deaths == 1
    assert run([job for job in some if job is not guilty]) != []


def test_while_one_is_tried_the_others_wait() -> None:
    some = jobs(3)
    some[1].blame = 2.0
    assert run(some) == [some[1]]
    assert run([*some, Job()]) == []


def test_kills_from_outside_say_little() -> None:
    (job,) = some = jobs(1)
    for _ in range(63):
        run(some)
        assert assign_blame(some, KILLED) is None
    run(some)
    assert assign_blame(some, KILLED) is job


def test_a_kill_during_a_trial_is_no_proof() -> None:
    some = jobs(2)
    for _ in range(2):
        run(some)
        assign_blame(some, CRASH)
    for _ in range(3):
        assert len(run(some)) == 1
        assert assign_blame(some, KILLED) is None


def test_progress_clears() -> None:
    async def scenario() -> None:
        job = Generation(submit=Submit("a", (1,), SamplingParams(max_tokens=9), num_choices=2))
        job.blame = 1.0
        job.record(TokenEvent("a", 1, (5, 6), num_cached=16))
        assert job.blame == 0.0
        job.record(TokenEvent("a", 1, (7,), finish_reason=FinishReason.STOP, num_cached=3))
        job.record(TokenEvent("a", 1, (8,)))
        resumed = job.message()
        assert resumed.emitted == ((), (5, 6, 7)) and resumed.finished == (1,)
        heard = [job.news.get_nowait() for _ in range(job.news.qsize())]
        assert [event.token_ids for event in heard] == [(5, 6), (7,)]
        assert [event.num_cached for event in heard] == [16, 16], "cache hits of a later worker are not reported"
        job.drop(0)
        assert job.is_finished and job.news.get_nowait() is None

    asyncio.run(scenario())


def event_of(choice: int, *token_ids: int, ends: FinishReason | None = None) -> TokenEvent:
    return TokenEvent("a", choice, token_ids, finish_reason=ends)


def test_an_unread_request_leaves_the_worker_and_returns_once_it_is_read() -> None:
    """A stream that nobody reads is not computed any further, so the front stores few events of it. Once it is read, it continues after the
    tokens that its client gets, like a request whose worker has died."""

    async def scenario() -> None:
        job = Generation(submit=Submit("a", (1,), SamplingParams(max_tokens=1000), num_choices=2, cache_salt="tenant:"))
        other = Generation(submit=Submit("b", (1,), SamplingParams(max_tokens=1000)))
        job.in_worker = True
        while not job.is_unread:
            job.record(event_of(0, 5))
        assert job.news.qsize() == 2 * MOST_UNREAD + 1
        job.is_leaving = True
        job.record(event_of(1, 6))  # was on its way
        job.record(event_of(0, ends=FinishReason.ABORT))
        assert job.in_worker and not job.is_shelved, "the other choice has not ended yet"
        job.record(event_of(1, ends=FinishReason.ABORT))
        assert job.is_shelved and not job.in_worker and next_to_run([job, other]) == [other]
        heard: list[TokenEvent | None] = []
        while not job.may_return:
            heard.append(await job.news.get())
        job.is_shelved = False
        assert next_to_run([job]) == [job]
        assert job.message().emitted == ((5,) * (2 * MOST_UNREAD + 1), (6,)) and job.message().finished == ()
        assert job.message().cache_salt == "tenant:"
        assert all(event is not None and event.finish_reason is None for event in heard)

    asyncio.run(scenario())


def test_a_request_that_leaves_is_shelved_when_its_last_choice_ends_in_any_way() -> None:
    async def scenario() -> None:
        for end in ("dropped", "finished", "died"):
            job = Generation(submit=Submit("a", (1,), SamplingParams(max_tokens=1000), num_choices=2))
            job.in_worker = job.is_leaving = True
            for _ in range(2 * MOST_UNREAD + 1):
                job.news.put_nowait(event_of(0, 5))
            job.record(event_of(0, ends=FinishReason.ABORT))
            match end:
                case "dropped":
                    job.drop(1)
                case "finished":
                    job.record(event_of(1, ends=FinishReason.LENGTH))
                case _:
                    assign_blame([job], KILLED)
            assert job.is_shelved and not job.in_worker and not job.is_leaving, end

    asyncio.run(scenario())
