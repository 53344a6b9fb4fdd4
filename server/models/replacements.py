"""Models that load beside the one they will replace, and those that were replaced and finish what they have begun."""

from __future__ import annotations

import asyncio
import weakref

from runtime.units import in_mib
from server.interfaces import LoadError, WorkerHandle
from server.models.model import Model, ModelState


class Replacements:
    def __init__(self) -> None:
        self._coming: dict[str, Model] = {}  # by the name of the model that serves meanwhile
        self._leaving: dict[Model, asyncio.Task[None]] = {}

    def models(self) -> list[Model]:
        """All that take memory beside those that serve."""
        return [*self._coming.values(), *self._leaving]

    def coming(self, name: str) -> Model | None:
        return self._coming.get(name)

    def add(self, model: Model) -> None:
        self._coming[model.spec.name] = model

    def remove(self, model: Model) -> bool:
        """False if it replaces nothing."""
        if self._coming.get(model.spec.name) is not model:
            return False
        del self._coming[model.spec.name]
        return True

    def retire(self, model: Model) -> None:
        """Stop the worker once the last request of the model has ended. Whoever looks the model up gets another from now on."""
        loaded = model.loaded
        assert loaded is not None
        model.state, model.planned_bytes = ModelState.DRAINING, model.total_bytes
        model.loaded = None
        loop, unused = asyncio.get_running_loop(), asyncio.Event()
        # A request holds `loaded` from its look-up to its end, also before the worker hears of it. The last may end on another thread.
        weakref.finalize(loaded, loop.call_soon_threadsafe, unused.set).atexit = False
        self._leaving[model] = asyncio.create_task(self._stop(model, loaded.worker, unused))

    async def close(self) -> None:
        """Stop the workers of models that were replaced, whatever they still run."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop(self, model: Model, worker: WorkerHandle, unused: asyncio.Event) -> None:
        try:
            await unused.wait()
        finally:
            await worker.stop()
            del self._leaving[model]


def beside(error: LoadError, replaces: Model | None) -> LoadError:
    """What else stands in the way of a model that loads beside the one it will replace."""
    if replaces is None or not error.required_bytes:
        return error
    name, held = replaces.spec.name, replaces.total_bytes
    message = (
        f"{error.message}. The files of model {name!r} have changed, and until the new ones are loaded the old ones are served, "
        f"which hold {in_mib(held)}: unload {name!r}, then load it again"
    )
    return LoadError(error.code, message, error.required_bytes, error.free_bytes)
