"""A worker that takes the place of another may have read other files of the model. Then the front reads its part of them again, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from server.defaults import Defaults
from server.interfaces import LoadError
from server.messages import ErrorCode, Ready
from server.models.model import Model
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker

SPEC = ModelSpec("m", "m", aliases=("cold",), presets={"cold": Defaults(temperature=0.0)})


def of_files() -> ByteTokenizer:
    return ByteTokenizer(specials=["<new>"])


def broken() -> ByteTokenizer:
    raise LoadError(ErrorCode.LOAD_REFUSED, "tokenizer.json is not understood")


def run(after: Callable[[], ByteTokenizer], check: Callable[[Registry, Model, Ready], Coroutine[Any, Any, None]]) -> None:
    """Load a model, whose files give another tokenizer (`after`) from the second time on, and check what a registry does then. The check
    gets the `Ready` message of a worker that has read the later files."""
    readers = iter((ByteTokenizer, after))

    async def scenario() -> None:
        registry = Registry(
            ServerSettings(), lambda _spec, progress: NullWorker(NullScript(), progress), lambda _source: next(readers)(), initial=[SPEC]
        )
        await registry.open()
        await asyncio.gather(*(operation.wait() for operation in registry.operations.all()))
        model = registry.find("m")
        assert model.loaded is not None
        await check(registry, model, msgspec.structs.replace(model.loaded.ready, fingerprint="fp_other"))
        await registry.close()

    asyncio.run(scenario())


def test_the_tokenizer_comes_from_the_files_that_the_worker_has_read() -> None:
    async def check(registry: Registry, model: Model, ready: Ready) -> None:
        before = model.loaded
        assert before is not None
        await before.worker.before_change(ready)
        for name, temperature in (("m", 1.0), ("cold", 0.0)):
            _, now = registry.serve(name)
            assert now.tokenizer.vocab_size == before.tokenizer.vocab_size + 1
            assert now.fingerprint == now.defaults.mark("fp_other") and now.sampling["temperature"] == temperature
            assert now.worker is before.worker and now.admission is before.admission, "its requests still count"

    run(of_files, check)


def test_without_a_tokenizer_the_worker_does_not_serve() -> None:
    async def check(registry: Registry, model: Model, ready: Ready) -> None:
        before = model.loaded
        assert before is not None
        with pytest.raises(LoadError, match="not understood"):
            await before.worker.before_change(ready)
        assert registry.serve("m")[1] is before

    run(broken, check)


def test_a_model_whose_files_changed_while_it_was_loaded_is_not_served() -> None:
    """Its first worker has died before the load was complete. An earlier version served the model: each request was told to ask again."""

    class Restarted(NullWorker):
        async def start(self) -> Ready:
            first = await super().start()
            self.ready = msgspec.structs.replace(first, fingerprint="fp_other")
            return first

    async def scenario() -> None:
        registry = Registry(ServerSettings(), lambda _spec, progress: Restarted(NullScript(), progress), lambda _source: ByteTokenizer())
        operation = await registry.load(SPEC)
        await operation.wait()
        assert operation.error is not None and "have changed while they were loaded" in operation.error.message
        assert not registry.models()

    asyncio.run(scenario())


def test_a_load_reads_the_files_again_once_a_worker_has_read_others() -> None:
    """Also if the files are those of the first load again, because the worker in between has read another version."""
    versions = ["first"]

    async def scenario() -> None:
        registry = Registry(
            ServerSettings(),
            lambda _spec, progress: NullWorker(NullScript(), progress),
            lambda _source: ByteTokenizer(),
            identify=lambda _source: versions[-1],
        )
        await (await registry.load(SPEC)).wait()
        loaded = registry.find("m").loaded
        assert loaded is not None
        versions.append("second")
        await loaded.worker.before_change(msgspec.structs.replace(loaded.ready, fingerprint="fp_other"))
        versions.append("first")
        again = await registry.load(SPEC)
        assert again.kind == "reload"
        await again.wait()
        await registry.close()

    asyncio.run(scenario())
