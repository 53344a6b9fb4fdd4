"""Watchers of an operation see its end, and a cancelled operation comes to its end."""

from __future__ import annotations

import asyncio
import time

import pytest

from server.errors import ApiError
from server.interfaces import Outage, ProgressCallback
from server.messages import Progress, Ready
from server.models.model import ModelState
from server.models.operations import Operation, OperationState
from server.models.registry import Registry
from server.models.sleep import wake_up
from server.models.state import ModelSpec
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullState, NullWorker


def test_a_watcher_sees_the_end_even_if_it_comes_while_a_report_is_sent() -> None:
    async def watch() -> list[str]:
        operation = Operation("load", "m")
        seen: list[str] = []
        async for report in operation.watch():
            seen.append(report["state"])
            if len(seen) == 1:
                operation.report(Progress("compile", 0.5))
                operation.end(OperationState.SUCCEEDED)
        return seen

    assert asyncio.run(watch()) == ["running", "succeeded"]


class SlowToStop(NullWorker):
    """Loads until it is stopped, and stops only when the test lets it."""

    def __init__(self) -> None:
        super().__init__(NullScript())
        self.is_stopped = False
        self.is_loading, self.is_stopping, self.may_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def start(self) -> Ready:
        self.is_loading.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        self.is_stopping.set()
        await self.may_stop.wait()
        self.is_stopped = True


@pytest.mark.parametrize("ends", [False, True], ids=["cancelled again", "the server stops"])
def test_a_second_cancellation_does_not_interrupt_the_end_of_a_load(ends: bool) -> None:
    """Otherwise the worker would go on with its load, and nobody would stop it."""

    async def check() -> None:
        worker = SlowToStop()
        registry = Registry(ServerSettings(), lambda _spec, _progress: worker, lambda _source: ByteTokenizer())
        operation = await registry.load(ModelSpec("m", "m"))
        await worker.is_loading.wait()
        first = asyncio.create_task(registry.cancel(operation))
        await worker.is_stopping.wait()
        second = asyncio.create_task(registry.close() if ends else registry.cancel(operation))
        for _ in range(5):
            await asyncio.sleep(0)
        worker.may_stop.set()
        await asyncio.gather(first, second)
        assert worker.is_stopped and operation.state is OperationState.CANCELLED

    asyncio.run(check())


def test_a_model_is_unloaded_although_its_new_version_is_about_to_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        workers, may_load, identities = list[NullWorker](), asyncio.Event(), iter("1122")

        class Later(NullWorker):
            """Loads when the test lets it."""

            async def start(self) -> Ready:
                await may_load.wait()
                return await super().start()

        def make(_spec: ModelSpec, _progress: ProgressCallback) -> NullWorker:
            workers.append(Later(NullScript()) if workers else NullWorker(NullScript()))
            return workers[-1]

        registry = Registry(ServerSettings(), make, lambda _source: ByteTokenizer(), identify=lambda _source: next(identities))
        await (await registry.load(ModelSpec("m", "m"))).wait()
        await registry.load(ModelSpec("m", "m"))
        reload = await registry.load(ModelSpec("m", "m"))

        async def measure() -> int:
            may_load.set()
            for _ in range(50):
                await asyncio.sleep(0.001)
            return 0

        monkeypatch.setattr(registry.measuring, "resident_bytes", measure)
        await registry.unload("m", drain_s=0.0)
        await reload.wait()
        assert not registry.models() and reload.state is OperationState.CANCELLED

    asyncio.run(check())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nobody_waits_for_a_model_that_is_gone_before_it_wakes(is_stopped: bool) -> None:
    async def check() -> None:
        worker = NullWorker(NullScript())
        registry = Registry(ServerSettings(), lambda _spec, _progress: worker, lambda _source: ByteTokenizer())
        await (await registry.load(ModelSpec("m", "m"))).wait()
        model = registry.find("m")
        worker.state, worker.outage = NullState.RESTARTING, Outage(time.monotonic(), patience_s=3600.0)
        waking = asyncio.create_task(wake_up(model))
        await asyncio.sleep(0)
        if is_stopped:
            worker.state = NullState.STOPPED
        else:
            model.state = ModelState.DRAINING
        with pytest.raises(ApiError, match=r"'m' is (stopped|draining)"):
            await asyncio.wait_for(waking, 60)

    asyncio.run(check())
