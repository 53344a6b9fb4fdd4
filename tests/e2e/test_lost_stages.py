"""Requests continue, with the same tokens, when a stage of their model is killed, stops, or is a host that goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from deploy import demo
from deploy.cache import kept
from deploy.model_loading.known import silent
from deploy.model_loading.load import load_model
from deploy.serve import WORKER
from deploy.use import left_behind, markers_of
from runtime.launch import command
from server.interfaces import LoadError
from server.messages import Load, SamplingParams, Submit
from server.workers.supervisor import Care, Supervisor
from tests.e2e.stage_host import SECRET, stage_host
from tests.network import Machine, can_cut, other_machine
from tests.process_states import is_running

LOAD = Load("demo", str(demo.MODEL), "bf16", max_batch=16, kv_cache_bytes=32 << 20)
STALL_S = 2.0
SUBMITS = [Submit(f"r{i}", tuple(range(5 + i, 40 + 3 * i)), SamplingParams(max_tokens=300, ignore_eos=True, seed=i)) for i in range(6)]

Answers = list[list[int]]

pytestmark = pytest.mark.xdist_group("bits of stages")


@asynccontextmanager
async def serving(load: Load) -> AsyncGenerator[Supervisor]:
    supervisor = Supervisor(WORKER, load, care=Care(stall_s=STALL_S, first_delay_s=0.05))
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def answers_of(supervisor: Supervisor, reached: asyncio.Event | None = None) -> Answers:
    """Run all requests. Set `reached` when each has a few tokens."""
    tokens: Answers = [[] for _ in SUBMITS]

    async def run(i: int) -> None:
        async for event in supervisor.generate(SUBMITS[i]):
            tokens[i] += event.token_ids
            if reached is not None and min(map(len, tokens)) >= 5:
                reached.set()

    await asyncio.gather(*map(run, range(len(SUBMITS))))
    return tokens


def children_of(pid: int) -> list[int]:
    found = [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]
    return [child for child in found if b"deploy.stages.process" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def disturbed(load: Load, strike: Callable[[Supervisor], None]) -> tuple[Answers, Answers, Supervisor]:
    """Return the answers of undisturbed requests, and those of the same requests if `strike` hits while they run."""
    async with asyncio.timeout(120), serving(load) as supervisor:
        calm = await answers_of(supervisor)
        reached = asyncio.Event()
        running = asyncio.create_task(answers_of(supervisor, reached))
        await reached.wait()
        strike(supervisor)
        return calm, await running, supervisor


def kill_stage(supervisor: Supervisor) -> None:
    assert supervisor.pid is not None
    (stage,) = children_of(supervisor.pid)
    os.kill(stage, signal.SIGKILL)


def kill_worker(supervisor: Supervisor) -> None:
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)


def stop_stage(supervisor: Supervisor) -> None:
    assert supervisor.pid is not None
    (stage,) = children_of(supervisor.pid)
    os.kill(stage, signal.SIGSTOP)


@pytest.mark.parametrize("strike", [kill_stage, kill_worker, stop_stage])
def test_requests_outlive_a_process_of_their_model(strike: Callable[[Supervisor], None]) -> None:
    pids: list[int] = []

    def struck(supervisor: Supervisor) -> None:
        assert supervisor.pid is not None
        pids.extend(children_of(supervisor.pid))
        strike(supervisor)

    calm, found, supervisor = asyncio.run(disturbed(msgspec.structs.replace(LOAD, stages=("local", "local")), struck))
    assert found == calm
    assert supervisor.restarts >= 1 and supervisor.resubmitted >= len(SUBMITS) - 1
    assert all(_has_ended(pid) for pid in pids), "no process of the lost model is left"


def test_stages_of_a_server_that_stops_end_normally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that end normally remove their markers of used files (deploy/use.py). Otherwise the next start would verify the weights before
    it uses them."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))  # other tests use the weights of the common cache

    async def scenario() -> set[Path]:
        async with asyncio.timeout(60), serving(msgspec.structs.replace(LOAD, stages=("local", "local"))) as supervisor:
            await answers_of(supervisor)
            return markers(markers_of)

    cache = kept()
    assert cache is not None

    def markers(of_file: Callable[[Path], list[Path]]) -> set[Path]:
        return {marker for file in (cache.folder / "weights").glob("*") for marker in of_file(file)}

    used = asyncio.run(scenario())
    assert len(used) >= 2 and not markers(left_behind)


def test_a_stage_that_is_lost_between_requests_is_replaced_at_once() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), serving(msgspec.structs.replace(LOAD, stages=("local", "local"))) as supervisor:
            kill_stage(supervisor)
            while supervisor.restarts == 0:
                await asyncio.sleep(0.02)
            assert len(await answers_of(supervisor)) == len(SUBMITS)

    asyncio.run(scenario())


def _has_ended(pid: int) -> bool:
    end_s = time.monotonic() + 10.0
    while time.monotonic() < end_s:
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


# --- hosts -------------------------------------------------------------------------------------------------------------


def remote(port: int, secret: str = SECRET, host: str = "127.0.0.1") -> Load:
    return msgspec.structs.replace(LOAD, stages=(f"{host}:{port}", "local"), stage_secret=secret)


def test_a_stage_on_a_host_that_is_killed(tmp_path: Path) -> None:
    with stage_host(tmp_path) as (port, process):

        def strike(_supervisor: Supervisor) -> None:
            (stage,) = children_of(process.pid)
            os.kill(stage, signal.SIGKILL)

        calm, found, supervisor = asyncio.run(disturbed(remote(port), strike))
        assert found == calm and supervisor.restarts >= 1
        assert _settles(lambda: children_of(process.pid) == []), "the stage ends with the worker"


def test_a_stage_on_a_host_that_stops(tmp_path: Path) -> None:
    """The front replaces the worker that hears nothing. The host ends the stage that has stopped, because its worker is gone."""
    with stage_host(tmp_path) as (port, process):
        stopped: list[int] = []

        def strike(_supervisor: Supervisor) -> None:
            stopped.extend(children_of(process.pid))
            os.kill(stopped[0], signal.SIGSTOP)

        calm, found, supervisor = asyncio.run(disturbed(remote(port), strike))
        assert found == calm and supervisor.restarts >= 1
        assert _has_ended(stopped[0])


def test_a_host_that_comes_back(tmp_path: Path) -> None:
    """While the host is gone, requests wait. When it is back, they continue."""

    async def scenario() -> None:
        with stage_host(tmp_path) as (port, process):
            async with asyncio.timeout(120), serving(remote(port)) as supervisor:
                calm = await answers_of(supervisor)
                reached = asyncio.Event()
                running = asyncio.create_task(answers_of(supervisor, reached))
                await reached.wait()
                process.kill()
                process.wait()
                while supervisor.outage is None or supervisor.outage.error is None:
                    await asyncio.sleep(0.02)
                assert "cannot be reached" in supervisor.outage.error
                with stage_host(tmp_path, port=port):
                    assert await running == calm

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.skipif(not can_cut(), reason="may not make a network of its own, which tests cut")
@pytest.mark.parametrize(
    "lost", [{}, {"to_near": False}, {"to_far": False}], ids=["both directions", "what is sent", "what would be received"]
)
def test_a_host_whose_network_is_lost(lost: dict[str, bool], tmp_path: Path) -> None:
    """No packet says that the host is gone. Both ends notice: requests wait, and the stage on the host ends and frees its memory. When the
    network is back, requests continue."""

    async def scenario(machine: Machine, port: int, host: subprocess.Popen[str]) -> None:
        async with asyncio.timeout(180), serving(remote(port, host=machine.far)) as supervisor:
            calm = await answers_of(supervisor)
            reached = asyncio.Event()
            running = asyncio.create_task(answers_of(supervisor, reached))
            await reached.wait()
            stages = children_of(host.pid)
            machine.cut(**lost)
            while supervisor.outage is None or supervisor.outage.error is None:
                await asyncio.sleep(0.02)
            assert "cannot be reached: timed out" in supervisor.outage.error
            assert not running.done()
            while children_of(host.pid) == stages:
                await asyncio.sleep(0.02)
            machine.mend()
            assert await running == calm

    with other_machine() as machine, stage_host(tmp_path, machine=machine) as (port, host):
        asyncio.run(scenario(machine, port, host))


def _settles(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 10.0
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stages": ("127.0.0.1:1", "local"), "stage_secret": SECRET}, r"stage 1 \(127.0.0.1:1\) cannot be reached: Connection refused"),
        ({"stages": ("127.0.0.1:1", "local")}, "no stage secret is set"),
        ({"stages": ("local",)}, "at least two stages"),
        ({"stages": ("local",) * 9}, "9 stages; the model has 5 layers"),
        ({"stages": ("local", "local"), "device": "cuda"}, "device is 'cuda'"),
        ({"stages": ("local", "local"), "label": True}, "label is set, and stages is set"),
        ({"stages": ("local", "local"), "quantize": "4bit"}, "quantize is '4bit', which measures the whole model"),
        ({"stages": ("local", "local"), "kv_cache_bytes": 100}, "kv_cache_bytes"),
        ({"stages": ("local", "local"), "memory_limit_bytes": 1 << 20}, "the model takes"),
    ],
)
def test_what_does_not_work_is_refused_by_name(changes: dict[str, object], why: str) -> None:
    with pytest.raises(LoadError, match=why):
        load_model(msgspec.structs.replace(LOAD, **changes), silent)


def test_another_secret_is_refused(tmp_path: Path) -> None:
    async def scenario(port: int) -> None:
        with pytest.raises(LoadError, match="was reached, but it refuses this server's stage secret"):
            await Supervisor(WORKER, remote(port, "another secret, also long")).start()

    with stage_host(tmp_path) as (port, process):
        asyncio.run(scenario(port))
        assert children_of(process.pid) == [] and process.poll() is None


@pytest.mark.parametrize(("text", "why"), [("short", "has 5 characters; expected at least 16"), (None, "cannot be read: No such file")])
def test_a_host_needs_a_secret(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "secret").write_text(text)
    words = [*command("deploy.cli"), "stage", "--secret-file", str(tmp_path / "secret")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and why in ended.stderr
    assert "Traceback" not in ended.stderr
