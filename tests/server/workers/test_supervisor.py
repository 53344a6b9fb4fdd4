"""If a real worker process is killed, stopped, or crashed by a request, clients notice only a pause."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from runtime.cache_groups import PAGE_SIZE
from server.engine import channel
from server.engine.scheduling.page_pool import Chain
from server.interfaces import LoadError, RequestError
from server.messages import Clip, Embed, ErrorCode, FinishReason, GivePages, Load, PagesGiven, Peering, Ready, SamplingParams, Submit
from server.models.processes import usage_of
from server.workers import loading
from server.workers.care import Care
from server.workers.ledger import Generation
from server.workers.supervisor import Supervisor, WorkerState
from server.workers.worker_process import WorkerProcess
from tests.doubles.model import null_page_bytes
from tests.doubles.process import NullConfig, null_source

COMMAND = (sys.executable, "-m", "tests.doubles.process")
CONFIG = NullConfig(vocab_size=300, max_context=400, max_tokens=128, max_seqs=16, num_pages=300, step_s=0.003)
POISON = 299
CARE = Care(first_delay_s=0.05)

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def run(scenario: Callable[[], Coroutine[None, None, None]], timeout_s: float = 120) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await scenario()

    asyncio.run(bounded())
    gc.collect()  # an unclosed transport causes a warning when it is collected


@asynccontextmanager
async def worker(config: NullConfig = CONFIG, care: Care = CARE, peers: Peering | None = None, **kwargs):
    supervisor = Supervisor(COMMAND, Load("null", null_source(config), peers=peers), care=care, **kwargs)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def collect(supervisor: Supervisor, submit: Submit, heard: list[int] | None = None) -> list[tuple]:
    """Run a request. Return the tokens and the finish reason of each choice. Tokens are appended to `heard` as they arrive."""
    tokens: list[list[int]] = [[] for _ in range(submit.num_choices)]
    ends: list[FinishReason | None] = [None] * submit.num_choices
    async for event in supervisor.generate(submit):
        assert ends[event.choice] is None, "exactly one end per choice"
        tokens[event.choice] += event.token_ids
        ends[event.choice] = event.finish_reason
        if heard is not None:
            heard += event.token_ids
    return list(zip(tokens, ends, strict=True))


def submits(num: int, max_tokens: int = 60) -> list[Submit]:
    rng = random.Random(4)
    return [
        Submit(
            f"r{i}",
            tuple(rng.randrange(1, POISON) for _ in range(rng.randrange(1, 60))),
            SamplingParams(
                max_tokens=max_tokens,
                seed=i,
                temperature=rng.choice((0.0, 1.0)),
                frequency_penalty=0.3,
                banned_token_ids=(POISON,),
                logprobs=rng.choice((None, 1)),
            ),
            num_choices=rng.choice((1, 1, 3)),
        )
        for i in range(num)
    ]


ANSWERS: dict[bytes, list[tuple]] = {}  # request -> its answer, which depends on the request alone


async def undisturbed(some: list[Submit]) -> list[list[tuple]]:
    keys = [msgspec.msgpack.encode(submit) for submit in some]
    unknown = {key: submit for key, submit in zip(keys, some, strict=True) if key not in ANSWERS}
    if unknown:
        async with worker() as supervisor:
            found = await asyncio.gather(*(collect(supervisor, submit) for submit in unknown.values()))
        ANSWERS.update(zip(unknown, found, strict=True))
    return [ANSWERS[key] for key in keys]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_kills_and_stops_are_pauses() -> None:
    """This is a short version of `python -m tests.lab chaos`. Workers are killed or stopped, each after a random number of tokens. Clients
    notice only pauses."""

    async def scenario() -> None:
        some = submits(32)
        expected = await undisturbed(some)
        async with worker(care=Care(stall_s=2.0)) as supervisor:
            heard: list[int] = []
            streams = asyncio.gather(*(collect(supervisor, submit, heard) for submit in some))
            rng = random.Random(1)
            blows = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL]
            for number, blow in enumerate(blows):
                at = len(heard) + rng.randrange(1, 250)
                await until(lambda at=at: len(heard) >= at)
                assert supervisor.pid is not None
                os.kill(supervisor.pid, blow)
                await until(lambda number=number: supervisor.restarts > number)
            assert await streams == expected
            assert supervisor.restarts >= len(blows) and supervisor.resubmitted >= len(blows) * 8
            await until(lambda: supervisor.stats is not None and supervisor.stats.num_running == 0)
            assert supervisor.stats.num_pages_used == 0
            assert supervisor.state is WorkerState.READY

    run(scenario)


def test_a_request_too_large_for_its_worker_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker gets nothing of this request. What all recordings of a request have together is not limited here, because each travels
    alone."""

    async def scenario() -> None:
        some = submits(3, max_tokens=20)
        expected = await undisturbed(some)
        async with worker() as supervisor:
            pid = supervisor.pid
            monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 3000)
            long = Submit("long", tuple(1000 + number for number in range(1000)), SamplingParams(max_tokens=1))
            clip = Clip.of(bytes(3000), 1.0, 10, 5)
            heard = Submit("heard", (1,) * 10, SamplingParams(max_tokens=1), excerpts=(Clip.of(bytes(2000), 1.0, 10, 5),) * 4)
            wrong = [long, Submit("large", (1,), SamplingParams(max_tokens=1), excerpts=(heard.excerpts[0], clip)), heard]
            answers = await asyncio.gather(*(collect(supervisor, one) for one in (*some, *wrong)), return_exceptions=True)
            assert answers[:3] == expected
            errors = [error for error in answers[3:] if isinstance(error, RequestError)]
            assert len(errors) == 3 and {error.code for error in errors} == {ErrorCode.INVALID_VALUE}
            assert ["expected at most 3000" in error.message for error in errors] == [True, True, False]
            assert [await collect(supervisor, one) for one in some] == expected
            assert supervisor.pid == pid and supervisor.restarts == 0

    run(scenario)


def test_a_kill_before_any_token_and_while_idle() -> None:
    async def scenario() -> None:
        some = submits(3, max_tokens=5)
        expected = await undisturbed(some)
        async with worker() as supervisor:
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1)
            streams = asyncio.gather(*(collect(supervisor, submit) for submit in some))
            await asyncio.sleep(0)
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await streams == expected

    run(scenario)


def test_a_worker_that_serves_from_damaged_files_is_replaced_and_no_request_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker finds its model files damaged, another worker replaces it, as often as necessary, and verifies the files. No request is
    lost or blamed. A later worker need not verify them before it serves."""
    verifying: list[bool] = []

    def load_in(started: WorkerProcess, load: Load, *args, **kwargs):
        verifying.append(load.verify)
        return loading.load_in(started, load, *args, **kwargs)

    monkeypatch.setattr("server.workers.supervisor.load_in", load_in)

    async def scenario() -> None:
        some = submits(8)
        expected = await undisturbed(some)
        damaged = tmp_path / "damaged"
        async with worker(msgspec.structs.replace(CONFIG, damaged_when=str(damaged))) as supervisor:
            heard: list[int] = []
            streams = asyncio.gather(*(collect(supervisor, submit, heard) for submit in some))
            for number in range(3):
                at = len(heard) + 40
                await until(lambda at=at: len(heard) >= at)
                damaged.touch()
                await until(lambda number=number: supervisor.restarts > number)
            assert await streams == expected
            assert supervisor.restarts == 3
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 4)
        assert "the null model is configured to report damage; worker" in caplog.text

    run(scenario)
    assert verifying[-5:] == [False, True, True, True, False]


def test_what_is_submitted_during_a_restart_waits_for_it() -> None:
    async def scenario() -> None:
        some = submits(3)
        expected = await undisturbed(some)
        async with worker() as supervisor:
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.state is WorkerState.RESTARTING)
            assert await asyncio.gather(*(collect(supervisor, submit) for submit in some)) == expected

    run(scenario)


def test_a_request_that_kills_its_worker_is_failed_alone() -> None:
    async def scenario() -> None:
        some = submits(6, max_tokens=120)
        expected = await undisturbed(some)
        config = msgspec.structs.replace(CONFIG, deadly_token=POISON)
        async with worker(config) as supervisor:
            streams = asyncio.gather(*(collect(supervisor, submit) for submit in some))
            await asyncio.sleep(0.05)
            poison = Submit("poison", (1, POISON), SamplingParams(max_tokens=4))
            with pytest.raises(RequestError, match="exit status 70") as caught:
                await collect(supervisor, poison)
            assert caught.value.code == "generation_failed"
            assert await streams == expected
            assert 2 <= supervisor.restarts <= 4

    run(scenario)


def test_closing_a_stream_aborts_in_the_worker() -> None:
    async def scenario() -> None:
        async with worker() as supervisor:
            async with aclosing(supervisor.generate(submits(1, max_tokens=300)[0])) as events:
                async for _ in events:
                    break
            await until(lambda: supervisor.stats is not None and supervisor.stats.num_running == 0)
            assert supervisor.stats.num_pages_used == 0
            assert supervisor.stats.num_steps < 300

    run(scenario)


def test_the_statistics_of_a_dead_worker_are_forgotten() -> None:
    """If clients leave while no worker serves, the next worker has nothing to do and reports nothing. What ran in the dead worker must not
    be shown for ever."""

    async def scenario() -> None:
        async with worker() as supervisor:
            async with aclosing(supervisor.generate(submits(1, max_tokens=300)[0])) as events:
                await anext(events)
                await until(lambda: supervisor.stats is not None and supervisor.stats.num_running > 0)
                os.kill(supervisor.pid, signal.SIGKILL)
                await until(lambda: supervisor.state is WorkerState.RESTARTING)
            await until(lambda: supervisor.state is WorkerState.READY)
            assert supervisor.stats is None or supervisor.stats.num_running == 0

    run(scenario)


@pytest.mark.parametrize("meanwhile", ["silence", "kill", "drain"])
def test_who_reads_slowly_is_not_waiting_for_the_worker(meanwhile) -> None:
    """If an answer is complete and only its client is slow to read it, the worker has no work left. The worker is not replaced although it
    sends nothing, and if it dies, the next worker does not repeat the request."""

    async def scenario() -> None:
        submit = submits(1)[0]
        expected = (await undisturbed([submit]))[0]
        care = Care(stall_s=1.0, first_delay_s=0.05)
        async with worker(care=care) as supervisor, aclosing(supervisor.generate(submit)) as events:
            heard = [*(await anext(events)).token_ids]
            await until(lambda: supervisor.stats is not None and supervisor.stats.num_steps > 0 and supervisor.stats.num_running == 0)
            match meanwhile:
                case "silence":
                    await asyncio.sleep(1.5 * care.stall_s)
                case "kill":
                    os.kill(supervisor.pid, signal.SIGKILL)
                    await until(lambda: supervisor.restarts == 1)
                case _:
                    pass
            async with asyncio.timeout(30):
                await supervisor.drain(60)  # returns when the worker has no work left
            assert supervisor.restarts == (meanwhile == "kill") and supervisor.resubmitted == 0
            async for event in events:
                heard += event.token_ids
            assert [(heard, event.finish_reason)] == expected

    run(scenario)


def test_aborting_one_choice_leaves_the_others() -> None:
    async def scenario() -> None:
        params = SamplingParams(max_tokens=30, seed=1)
        submit = Submit("a", (1, 2, 3), params, num_choices=2)
        whole = (await undisturbed([submit]))[0]
        async with worker() as supervisor:
            tokens: list[int] = []
            is_aborted = False
            async for event in supervisor.generate(submit):
                if event.choice == 0:
                    assert not is_aborted, "an aborted choice sent more tokens"
                    await asyncio.sleep(0.05)  # meanwhile the worker sends more tokens of this choice
                    supervisor.abort("a", 0)
                    is_aborted = True
                else:
                    tokens += event.token_ids
            assert tokens == whole[1][0]
            supervisor.abort("a", 1)  # changes nothing, because the choice has ended

    run(scenario)


def test_a_failing_request_raises_its_code() -> None:
    async def scenario() -> None:
        async with worker() as supervisor:
            with pytest.raises(RequestError, match="token 300") as caught:
                await collect(supervisor, Submit("a", (300,), SamplingParams(max_tokens=1)))
            assert caught.value.code == "invalid_value"
            with pytest.raises(RequestError) as caught:
                await supervisor.embed(Embed("b", (1,)))
            assert caught.value.code == "not_an_embedding_model"

    run(scenario)


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async def scenario() -> None:
        some = submits(3, max_tokens=150)
        expected = await undisturbed(some)
        async with worker() as supervisor:
            heard: list[int] = []
            streams = asyncio.gather(*(collect(supervisor, submit, heard) for submit in some))
            await until(lambda: bool(heard))
            draining = asyncio.create_task(supervisor.drain(30))
            await asyncio.sleep(0)
            assert supervisor.state is WorkerState.DRAINING
            with pytest.raises(RequestError, match="draining"):
                await collect(supervisor, Submit("late", (1,), SamplingParams(max_tokens=1)))
            os.kill(supervisor.pid, signal.SIGKILL)  # a kill loses no request, even while the worker drains
            assert await streams == expected
            await draining
            assert supervisor.state is WorkerState.STOPPED and supervisor.restarts == 1

    run(scenario)


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_drain_finishes_a_request_that_is_leaving_the_worker(reads_on: bool) -> None:
    """The client does not read, so the request leaves the worker. At this moment, the model begins to drain. The worker gets the request
    back before it is told to take no more, unless the client has gone."""

    async def scenario() -> None:
        slow, other = (Submit(name, (1, 2, 3), SamplingParams(max_tokens=num, seed=num)) for name, num in (("slow", 300), ("other", 390)))
        expected = await undisturbed([slow, other])
        async with worker() as supervisor, asyncio.timeout(60):
            draining: list[asyncio.Task[None]] = []
            shelve = supervisor._shelve

            def shelve_and_drain(request_id: str, job: Generation) -> None:
                shelve(request_id, job)
                draining.append(asyncio.create_task(supervisor.drain(600)))

            supervisor._shelve = shelve_and_drain
            reading = asyncio.create_task(collect(supervisor, other))
            async with aclosing(supervisor.generate(slow)) as events:
                heard = [await anext(events)]
                await until(lambda: bool(draining))
                heard += [event async for event in events] if reads_on else []
            tokens = [token_id for event in heard for token_id in event.token_ids]
            assert tokens == expected[0][0][0][: None if reads_on else len(tokens)]
            assert await reading == expected[1]
            await draining[0]
            assert len(draining) == 1 and supervisor.restarts == 0

    run(scenario)


def test_a_drain_that_takes_too_long_ends_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with worker() as supervisor:
            stream = asyncio.create_task(collect(supervisor, submits(1, max_tokens=300)[0]))
            await asyncio.sleep(0.05)
            await supervisor.drain(0.1)
            with pytest.raises(RequestError) as caught:
                await stream
            assert caught.value.code == "shutting_down"

    run(scenario)
    assert "still had running requests after 0.1 s" in caplog.text


def test_a_load_that_cannot_be_sent_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise it would wait forever for the progress of a worker that knows nothing of it."""

    async def scenario() -> None:
        supervisor = Supervisor(COMMAND, Load("null", "/m\udcff"))
        with pytest.raises(LoadError, match="the worker ended while loading"):
            await supervisor.start()
        assert supervisor.state is WorkerState.STOPPED and "MessagePack cannot write" in caplog.text

    run(scenario, timeout_s=60)


def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    async def scenario() -> None:
        async with worker() as supervisor:
            wrong = Submit("wrong", (1,), SamplingParams(max_tokens=1, seed=1 << 64))
            with pytest.raises(RequestError, match="MessagePack cannot write"):
                await collect(supervisor, wrong)
            assert await collect(supervisor, submits(1)[0]) and supervisor.restarts == 0

    run(scenario, timeout_s=60)


def test_a_load_that_does_not_fit_is_refused_with_figures() -> None:
    async def scenario() -> None:
        heard = []
        supervisor = Supervisor(COMMAND, Load("null", null_source(NullConfig(required_bytes=123))), progress=heard.append)
        with pytest.raises(LoadError) as caught:
            await supervisor.start()
        assert (caught.value.code, caught.value.required_bytes) == ("insufficient_memory", 123)
        assert [message.stage for message in heard] == ["compile", "compile"]
        assert supervisor.state is WorkerState.STOPPED

    run(scenario)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), "exit status 3"),
        (("/nonexistent/worker",), "could not be started"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"), "killed by SIGSEGV"),
    ],
)
def test_a_worker_that_cannot_start_is_told_clearly(command, complaint) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(command, Load("null", "{}"))
        with pytest.raises(LoadError, match=complaint):
            await supervisor.start()

    run(scenario)


def test_a_load_can_be_cancelled() -> None:
    async def scenario() -> None:
        heard = []
        supervisor = Supervisor(COMMAND, Load("null", null_source(NullConfig(load_s=60))), progress=heard.append, care=Care(stop_s=0.5))
        loading = asyncio.create_task(supervisor.start())
        await until(lambda: bool(heard))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert supervisor.state is WorkerState.STOPPED

    run(scenario, timeout_s=20)


@pytest.fixture
def processes(monkeypatch) -> list[subprocess.Popen[bytes]]:
    """Return a list. Every worker process that is started is appended to it."""
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def start(*command, **kwargs):
        started.append(original(*command, **kwargs))
        return started[-1]

    monkeypatch.setattr("server.workers.starting.subprocess.Popen", start)
    return started


def test_a_worker_has_a_process_group_of_its_own_in_the_session_of_the_front() -> None:
    """An interrupt at a terminal reaches a process group. Linux may schedule each session as a group, and the front waits for groups."""

    async def scenario() -> None:
        async with worker(CONFIG) as supervisor:
            assert os.getpgid(supervisor.pid) == supervisor.pid
            assert os.getsid(supervisor.pid) == os.getsid(0)

    run(scenario)


def test_a_worker_that_is_stopped_while_it_loads_is_replaced(processes) -> None:
    async def scenario() -> None:
        some = submits(3, max_tokens=20)
        expected = await undisturbed(some)
        async with worker(msgspec.structs.replace(CONFIG, load_s=0.3)) as supervisor:
            num = len(processes)  # `undisturbed` has started one, unless an earlier test asked for the same answers
            os.kill(supervisor.pid, signal.SIGKILL)
            streams = asyncio.gather(*(collect(supervisor, submit) for submit in some))
            await until(lambda: len(processes) == num + 1)
            os.kill(processes[-1].pid, signal.SIGSTOP)
            assert await streams == expected
            assert len(processes) == num + 2 and supervisor.restarts == 1

    run(scenario)


def test_a_first_load_that_is_stopped_fails(processes) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(COMMAND, Load("null", null_source(NullConfig(load_s=60))))
        loading = asyncio.create_task(supervisor.start())
        await until(lambda: bool(processes))
        os.kill(processes[0].pid, signal.SIGSTOP)
        with pytest.raises(LoadError, match="killed by SIGKILL"):
            await loading

    run(scenario, timeout_s=20)


def test_a_model_comes_back_once_the_cause_is_gone(tmp_path, caplog) -> None:
    """However many restarts have failed, the model recovers when the cause is gone. Running requests continue with the same tokens. The log
    contains the cause only once."""
    mark = tmp_path / "loaded"
    config = msgspec.structs.replace(CONFIG, refused_from=str(mark))

    async def scenario() -> None:
        some = submits(4, max_tokens=120)
        expected = await undisturbed(some)
        async with worker(config, Care(first_delay_s=0.001, longest_delay_s=0.01)) as supervisor:
            heard: list[int] = []
            streams = asyncio.gather(*(collect(supervisor, submit, heard) for submit in some[:3]))
            await until(lambda: bool(heard))
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.outage is not None and supervisor.outage.num_tries > 8)
            assert supervisor.state is WorkerState.RESTARTING
            assert "configured to load only once" in supervisor.outage.error
            late = asyncio.create_task(collect(supervisor, some[3]))
            mark.unlink()
            assert [*await streams, await late] == expected
            assert supervisor.state is WorkerState.READY and supervisor.outage is None and supervisor.restarts == 1

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch) -> None:
    """If a worker process cannot be started because file descriptors, memory, processes or threads are exhausted, the supervisor tries
    again."""
    faults = [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        MemoryError(),
    ]
    original = subprocess.Popen

    def start(*command, **kwargs):
        if faults:
            raise faults.pop()
        return original(*command, **kwargs)

    async def scenario() -> None:
        some = submits(2)
        expected = await undisturbed(some)
        async with worker(care=Care(first_delay_s=0.001, longest_delay_s=0.01)) as supervisor:
            streams = asyncio.gather(*(collect(supervisor, submit) for submit in some))
            monkeypatch.setattr("server.workers.starting.subprocess.Popen", start)
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await streams == expected
            assert faults == []

    num_open = len(os.listdir("/proc/self/fd"))
    run(scenario)
    assert len(os.listdir("/proc/self/fd")) <= num_open, "a failed start leaked a descriptor"


# A worker program. Its first start succeeds; its second start does what argv[1] says. The file argv[2] counts the starts.
ODD_WORKER = """
import pathlib, socket, sys, time
from tests.doubles.model import null_page_bytes
from tests.doubles.process import build_null
from server.engine.worker import serve_worker
what, starts, fd = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
starts.write_text(starts.read_text() + "x")
if starts.read_text() == "xx":
    if what == "nonsense":
        socket.socket(fileno=fd).sendall(bytes([255]) * 100)
    time.sleep(1000)
serve_worker(fd, build_null)
"""


@pytest.mark.parametrize("what", ["silence", "nonsense"])
def test_a_restart_that_hangs_is_given_up_for_another(what, tmp_path) -> None:
    """If a starting worker makes no progress or sends invalid messages, the supervisor kills it and starts another."""
    (starts := tmp_path / "starts").touch()
    command = (sys.executable, "-c", ODD_WORKER, what, str(starts))

    async def scenario() -> None:
        care = Care(first_delay_s=0.01, load_silence_s=3.0 if what == "silence" else 600.0)
        supervisor = Supervisor(command, Load("null", null_source(CONFIG)), care=care)
        await supervisor.start()
        try:
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1)
            assert starts.read_text().startswith("xxx")
            assert await collect(supervisor, submits(1)[0]) == (await undisturbed(submits(1)))[0]
        finally:
            await supervisor.stop()

    run(scenario)


def test_after_a_long_outage_new_requests_are_told_when_to_come_back(tmp_path) -> None:
    mark = tmp_path / "loaded"
    config = msgspec.structs.replace(CONFIG, refused_from=str(mark))

    async def scenario() -> None:
        async with worker(config, Care(first_delay_s=0.01, longest_delay_s=0.05, patience_s=0.2)) as supervisor:
            running = asyncio.create_task(collect(supervisor, submits(1, max_tokens=200)[0]))
            await until(lambda: supervisor.stats is not None and supervisor.stats.num_running > 0)
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.outage is not None and supervisor.outage.is_long)
            with pytest.raises(RequestError, match="is being restarted") as caught:
                await collect(supervisor, submits(2)[1])
            assert (caught.value.code, caught.value.retry_after_s) == ("model_not_ready", 0.05)
            with pytest.raises(RequestError, match="is being restarted"):
                await supervisor.embed(Embed("e", (1,)))
            mark.unlink()
            await running  # the request was accepted before the outage, so it is not refused
            await collect(supervisor, submits(2)[1])

    run(scenario)


def test_a_worker_needs_nothing_in_the_file_system(monkeypatch, tmp_path) -> None:
    """The connection to a worker uses no files. So a killed front leaves no files behind, and a program that deletes the files in /tmp
    cannot prevent a restart."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def scenario() -> None:
        async with worker() as supervisor:
            await collect(supervisor, submits(1, max_tokens=3)[0])
            assert list(tmp_path.iterdir()) == []

    run(scenario)


def test_a_model_that_does_not_restart_can_be_unloaded(tmp_path) -> None:
    config = msgspec.structs.replace(CONFIG, refused_from=str(tmp_path / "loaded"))

    async def scenario() -> None:
        async with worker(config, Care(first_delay_s=0.01)) as supervisor:
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.outage is not None and supervisor.outage.error is not None)
            await supervisor.drain(600)
            assert supervisor.state is WorkerState.STOPPED and supervisor.pid is None

    run(scenario)


def test_a_model_that_sleeps_has_no_process_and_goes_on_where_it_was() -> None:
    """A sleeping model has no process. Requests that were running when the model fell asleep continue, with the same tokens, when a new
    request wakes the model."""

    async def scenario() -> None:
        some = submits(8)
        expected = await undisturbed(some)
        async with worker() as supervisor:
            heard: list[int] = []
            streams = asyncio.gather(*(collect(supervisor, submit, heard) for submit in some[:6]))
            await until(lambda: len(heard) > 60)
            first = asyncio.create_task(supervisor.sleep(keep=True))
            await asyncio.sleep(0)
            assert supervisor.state is WorkerState.SLEEPING and supervisor.pid is not None
            await supervisor.sleep(keep=True)
            assert supervisor.pid is None, "the second call waited for the end of the worker, too"
            await supervisor.sleep(keep=True)
            await first
            assert supervisor.state is WorkerState.SLEEPING and supervisor.pid is None and not streams.done()
            later = await collect(supervisor, some[6])
            assert [*await streams, later] == expected[:7]
            assert supervisor.state is WorkerState.READY and supervisor.restarts == 0

    run(scenario)


def test_a_wake_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody put the model to sleep, so nothing is wrong. The line says how long the wake took."""

    async def scenario() -> None:
        async with worker() as supervisor:
            await supervisor.sleep(keep=True)
            with caplog.at_level(logging.INFO, "server.workers.supervisor"):
                await collect(supervisor, submits(1)[0])

    run(scenario)
    told = [record.levelname for record in caplog.records if "a new worker was ready" in record.message]
    assert told == ["INFO"]


def test_a_model_that_is_woken_while_it_falls_asleep_wakes() -> None:
    """A request arrives while the worker still ends. The model sleeps, and then wakes at once: no worker has died, and no request is
    blamed."""

    async def scenario() -> None:
        some = submits(2)
        expected = await undisturbed(some)
        async with worker() as supervisor:
            heard: list[int] = []
            running = asyncio.create_task(collect(supervisor, some[0], heard))
            await until(lambda: bool(heard))
            sleeping = asyncio.create_task(supervisor.sleep(keep=True))
            await asyncio.sleep(0)
            assert supervisor.state is WorkerState.SLEEPING and supervisor.pid is not None
            later = asyncio.create_task(collect(supervisor, some[1]))
            async with asyncio.timeout(30):
                await sleeping
            assert [await running, await later] == expected
            assert supervisor.state is WorkerState.READY and supervisor.restarts == 0

    run(scenario)


def test_sleep_may_fail_what_runs_and_no_room_is_no_waking() -> None:
    async def scenario() -> None:
        some = submits(3, max_tokens=300)
        async with worker() as supervisor:
            heard: list[int] = []
            stream = asyncio.create_task(collect(supervisor, some[0], heard))
            await until(lambda: bool(heard))
            await supervisor.sleep(keep=False)
            with pytest.raises(RequestError, match="was put to sleep"):
                await stream

            def refuse() -> None:
                raise RequestError("insufficient_memory", "no room")

            supervisor.before_wake = refuse
            with pytest.raises(RequestError, match="no room"):
                await collect(supervisor, some[1])
            assert supervisor.state is WorkerState.SLEEPING and supervisor.pid is None
            supervisor.before_wake = lambda: None
            supervisor.wake()
            await until(lambda: supervisor.state is WorkerState.READY)
            await collect(supervisor, some[1])
            await supervisor.sleep(keep=True)
        assert supervisor.state is WorkerState.STOPPED, "stopped while it slept"

    run(scenario)


def test_a_request_that_failed_when_its_model_fell_asleep_is_not_computed_again() -> None:
    """Its client has not read the error yet when the model wakes."""

    async def scenario() -> None:
        failed, other = submits(2, max_tokens=300)
        async with worker() as supervisor, aclosing(supervisor.generate(failed)) as events:
            await anext(events)
            await supervisor.sleep(keep=False)
            await collect(supervisor, other)
            await until(lambda: supervisor.stats is not None and supervisor.stats.num_running == 0)
            assert supervisor.stats.prefix_queries == len(other.prompt_ids), "of no other prompt"
            with pytest.raises(RequestError, match="was put to sleep"):
                async for _ in events:
                    pass

    run(scenario)


@pytest.mark.parametrize("kind", ["encoder", "embedder", "generator"])
def test_embeddings_survive_a_kill(kind) -> None:
    async def scenario() -> None:
        async with worker(NullConfig(kind=kind, embedding_size=16, step_s=0.05, max_context=64, max_tokens=64)) as supervisor:
            embeds = [Embed(str(i), tuple(range(1, 50 + i % 10))) for i in range(12)]
            vectors = asyncio.gather(*(supervisor.embed(embed) for embed in embeds))
            await asyncio.sleep(0.12)
            os.kill(supervisor.pid, signal.SIGKILL)
            for embed, embedding in zip(embeds, await vectors, strict=True):
                assert embedding.num_tokens == len(embed.prompt_ids)
                assert np.linalg.norm(np.frombuffer(embedding.vector, "<f4")) == pytest.approx(1.0, abs=1e-6)
            await until(lambda: supervisor.restarts == 1)
            if kind != "generator":
                with pytest.raises(RequestError) as caught:
                    await collect(supervisor, submits(1)[0])
                assert caught.value.code == "not_a_generative_model"

    run(scenario)


def test_answers_of_another_fingerprint_are_not_continued(tmp_path) -> None:
    """If the new worker would continue with other bytes, requests whose answers have begun fail, and say why. Requests that wait for it
    fail, too, because their tokens are those of the old files. An earlier version gave them to the new worker, which may not know these
    tokens."""
    mark = tmp_path / "renamed"

    async def scenario() -> None:
        async with worker(msgspec.structs.replace(CONFIG, renamed_when=str(mark))) as supervisor:
            heard: list[int] = []
            begun = asyncio.create_task(collect(supervisor, submits(1, max_tokens=120)[0], heard))
            await until(lambda: bool(heard))
            mark.touch()
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.state is WorkerState.RESTARTING)
            waiting = asyncio.create_task(collect(supervisor, submits(2, max_tokens=5)[1]))
            with pytest.raises(RequestError, match="fingerprint fp_other since its restart, so it cannot continue an answer of fp_null"):
                await begun
            with pytest.raises(RequestError, match="fingerprint fp_other since its restart, and this request came to fp_null") as caught:
                await waiting
            assert (caught.value.code, caught.value.retry_after_s) == (ErrorCode.MODEL_NOT_READY, 1.0)
            assert supervisor.ready.fingerprint == "fp_other"
            assert await collect(supervisor, msgspec.structs.replace(submits(1, max_tokens=5)[0], request_id="again"))

    run(scenario)


def test_a_worker_of_another_fingerprint_serves_once_the_front_is_ready_for_it(tmp_path) -> None:
    """The front must read the tokenizer of the new files first. If it cannot, the worker is given up, and another one is tried."""
    mark = tmp_path / "renamed"

    async def scenario() -> None:
        async with worker(msgspec.structs.replace(CONFIG, renamed_when=str(mark)), Care(first_delay_s=0.05)) as supervisor:
            heard: list[str] = []

            async def change(ready: Ready) -> None:
                heard.append(ready.fingerprint)
                assert supervisor.ready.fingerprint == "fp_null" and supervisor.state is WorkerState.RESTARTING
                if len(heard) < 3:
                    raise LoadError(ErrorCode.LOAD_FAILED, "the tokenizer cannot be read")

            supervisor.before_change = change
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await collect(supervisor, submits(1, max_tokens=5)[0]), "the fingerprint is the same"
            mark.touch()
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: len(heard) == 3 and supervisor.state is WorkerState.READY)
            assert await collect(supervisor, msgspec.structs.replace(submits(1, max_tokens=5)[0], request_id="again"))
            assert heard == ["fp_other"] * 3 and supervisor.ready.fingerprint == "fp_other"

    run(scenario)


@pytest.mark.parametrize("stages_work", [True, False])
def test_a_worker_that_waits_for_stages_is_replaced_only_if_they_do_nothing(stages_work: bool) -> None:
    """The worker itself uses no CPU time while another stage of its model computes."""

    async def scenario() -> None:
        config = msgspec.structs.replace(CONFIG, step_s=4.5, stages_work=stages_work)
        async with worker(config, Care(stall_s=2.0, first_delay_s=0.05)) as supervisor:
            submit = Submit("r", (1, 2, 3), SamplingParams(max_tokens=1, temperature=0.0))
            running = asyncio.create_task(collect(supervisor, submit))
            if stages_work:
                await running
                assert supervisor.restarts == 0
            else:
                while supervisor.restarts == 0:
                    await asyncio.sleep(0.02)
                running.cancel()

    run(scenario)


def test_the_event_loop_does_not_wait_for_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the CPU time of a worker with the processes of 100 constraints takes 10 ms."""
    threads: set[int] = set()
    monkeypatch.setattr("server.workers.supervisor.usage_of", lambda pid: threads.add(threading.get_ident()) or usage_of(pid))

    async def scenario() -> None:
        async with worker(care=Care(stall_s=0.8)) as supervisor:
            running = asyncio.create_task(collect(supervisor, submits(1, max_tokens=300)[0]))
            await until(lambda: bool(threads))
            await running

    run(scenario)
    assert threading.get_ident() not in threads


def test_a_stalled_worker_is_replaced_while_all_threads_of_the_loop_wait() -> None:
    """A disk that hangs may hold every thread on which the front reads files."""
    num_watching = sum(thread.name.startswith("watch") for thread in threading.enumerate())

    async def scenario() -> None:
        loop, disk = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        reading = loop.run_in_executor(None, disk.wait)
        try:
            submit = submits(1)[0]
            async with worker(care=Care(stall_s=0.8, first_delay_s=0.05)) as supervisor, aclosing(supervisor.generate(submit)) as events:
                await anext(events)
                os.kill(supervisor.pid, signal.SIGSTOP)
                async with asyncio.timeout(30):
                    await until(lambda: supervisor.restarts == 1)
                assert not reading.done()
        finally:
            disk.set()
            await reading
        await until(lambda: sum(thread.name.startswith("watch") for thread in threading.enumerate()) <= num_watching)

    run(scenario)


def test_pages_are_given_until_the_worker_dies() -> None:
    """Whoever asks for pages is told when no more follow: after the last page, or at once if the worker dies."""

    async def scenario() -> None:
        (submit,) = submits(1)
        submit = msgspec.structs.replace(submit, prompt_ids=tuple(range(1, 100)))
        chain = Chain(b"")
        chain.digest(98 // PAGE_SIZE - 1, submit.prompt_ids)
        asked = GivePages("pages", b"".join(chain.digests), 0, 8)
        async with worker(peers=Peering("a secret of tests", 1e18, 600.0)) as supervisor:
            await collect(supervisor, submit)
            given = [one async for one in supervisor.give(asked)]
            assert given[0].offer is not None and given[0].offer.num_tokens == 96
            assert [len(one.data) for one in given[1:]] == [6 * null_page_bytes(PAGE_SIZE), 0]
            await collect(supervisor, submits(2)[1])  # the worker still answers
            found: list[PagesGiven] = []
            async with aclosing(supervisor.give(msgspec.structs.replace(asked, num_frames=0))) as answers:
                async for one in answers:
                    found.append(one)
                    if len(found) == 1:
                        os.kill(supervisor.pid or 0, signal.SIGKILL)
                        await until(lambda: supervisor.state is WorkerState.RESTARTING)
            assert found == given[:1]
            await collect(supervisor, submit)
        assert [one async for one in supervisor.give(asked)] == []

    run(scenario)


def test_a_worker_that_exchanges_no_pages_says_so() -> None:
    async def scenario() -> None:
        async with worker() as supervisor:
            assert [one async for one in supervisor.give(GivePages("pages", b"", 0, 8))] == [PagesGiven("pages")]

    run(scenario)
