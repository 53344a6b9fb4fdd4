"""Tests how much memory a load may use, given the models that are loaded and the models that will be loaded later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from server.interfaces import ProgressCallback
from server.models.budget import Budget
from server.models.model import Model
from server.models.operations import Operation, OperationState
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker

GIB = 1 << 30


def model(name: str, *, kv_cache_bytes: int | None = None) -> Model:
    return Model(ModelSpec(name, name, kv_cache_bytes=kv_cache_bytes), Operation("load", name))


def claim(models: Sequence[Model], one: Model, **settings: int) -> ModelSpec:
    """Return the model spec, with memory limits from the budget, for a load of the model `one`. The weights of every model are estimated at
    1 GiB."""
    budget = Budget(ServerSettings(**settings), None, lambda _spec: GIB, lambda: models)
    return asyncio.run(budget.claim(one))


def test_the_first_of_several_models_leaves_room_for_the_others() -> None:
    """The load of the first model leaves room for the weights of the other models. The remaining memory is divided equally among all models
    and one model that may be loaded later."""
    models = [model("a"), model("b"), model("c")]
    spec = claim(models, models[0], memory_limit_bytes=8 * GIB)
    assert spec.memory_limit_bytes == 8 * GIB, "models that load later must not make it fail"
    assert spec.reserved_bytes == 2 * GIB and spec.kv_share == pytest.approx(1 / 4)


def test_what_others_ask_for_is_reserved_and_no_share_of_theirs() -> None:
    models = [model("a"), model("b", kv_cache_bytes=2 * GIB)]
    spec = claim(models, models[0], memory_limit_bytes=8 * GIB)
    assert spec.reserved_bytes == 3 * GIB and spec.kv_share == pytest.approx(1 / 2)


def test_a_single_model_without_a_limit_takes_what_is_of_use() -> None:
    one = model("a")
    spec = claim([one], one)
    assert spec.reserved_bytes == 0 and spec.kv_share == 1.0


def test_models_that_have_their_memory_are_not_reserved_for() -> None:
    models = [model("a"), model("b")]
    models[0].planned_bytes = 3 * GIB
    spec = claim(models, models[1], memory_limit_bytes=8 * GIB)
    assert spec.memory_limit_bytes == 5 * GIB and spec.reserved_bytes == 0 and spec.kv_share == pytest.approx(1 / 2)


def test_models_on_a_gpu_take_nothing_of_the_host() -> None:
    models = [model("a"), Model(ModelSpec("b", "b", device="cuda"), Operation("load", "b"))]
    models[1].planned_bytes = 3 * GIB
    assert claim(models, models[0], memory_limit_bytes=8 * GIB).memory_limit_bytes == 8 * GIB
    models = [model("a"), models[1]]
    on_gpu = claim(models, models[1], memory_limit_bytes=8 * GIB)
    assert on_gpu.memory_limit_bytes is None, "the worker itself asks the card for its free memory"
    assert on_gpu.reserved_bytes == 0, "a later model on the CPU needs none of the card's memory"


async def _claimed(budget: Budget, one: Model) -> bool:
    """Return whether a load gets its memory without waiting for another load."""
    claiming = asyncio.create_task(budget.claim(one))
    for _ in range(20):
        await asyncio.sleep(0)
    is_done = claiming.done()
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    return is_done


def test_a_cached_model_waits_for_no_compilation() -> None:
    """Without a limit it is not known how much memory a running load takes, so another load waits for its end. A cached model does not
    wait, and leaves room for the weights of the model that is still compiled."""

    async def scenario() -> None:
        compiled, cached, third = model("a"), model("b"), model("c")
        cached.is_cached = True
        budget = Budget(ServerSettings(), None, lambda _spec: GIB, lambda: (compiled, cached, third))
        cached.planned_bytes = GIB  # it has its memory, so the first load does not wait for it
        await budget.claim(compiled)
        cached.planned_bytes = 0
        assert not await _claimed(budget, third)
        assert await _claimed(budget, cached) and cached.claim is not None and cached.claim.reserved_bytes == 2 * GIB

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [None, 8 * GIB])
def test_other_loads_wait_for_cached_models(limit: int | None) -> None:
    async def scenario() -> None:
        cached, other = model("a"), model("b")
        cached.is_cached = True
        budget = Budget(ServerSettings(memory_limit_bytes=limit), None, lambda _spec: GIB, lambda: (cached, other))
        waiting = asyncio.create_task(budget.claim(other))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done() and await _claimed(budget, cached)
        cached.claim, cached.planned_bytes = None, GIB
        cached.operation.end(OperationState.SUCCEEDED)
        assert (await waiting).memory_limit_bytes == (None if limit is None else limit - GIB)

    asyncio.run(scenario())


def test_with_a_limit_a_cached_model_waits_until_it_is_known_what_is_left() -> None:
    async def scenario() -> None:
        compiled, cached = model("a"), model("b")
        budget = Budget(ServerSettings(memory_limit_bytes=8 * GIB), None, lambda _spec: GIB, lambda: (compiled, cached))
        await budget.claim(compiled)
        cached.is_cached = True
        assert not await _claimed(budget, cached)

    asyncio.run(scenario())


def test_cached_models_are_started_first() -> None:
    begun: list[str] = []

    def make(spec: ModelSpec, progress: ProgressCallback) -> NullWorker:
        begun.append(spec.name)
        return NullWorker(NullScript(), progress)

    async def scenario() -> None:
        specs = [ModelSpec(name, name) for name in ("compiled", "cached", "other")]
        registry = Registry(
            ServerSettings(), make, lambda _source: ByteTokenizer(), is_cached=lambda spec: spec.name == "cached", initial=specs
        )
        await registry.open()
        await registry.open()  # the application opens it again
        await asyncio.gather(*(operation.wait() for operation in registry.operations.all()))
        await registry.close()

    asyncio.run(scenario())
    assert begun[0] == "cached" and sorted(begun) == ["cached", "compiled", "other"]
