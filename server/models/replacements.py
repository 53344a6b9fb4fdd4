"""Keep the new versions of models, which load while the old versions are served, and the old versions, which finish their running
requests."""

from __future__ import annotations

import asyncio
import weakref

from runtime.units import in_units
from server.interfaces import LoadError, WorkerHandle
from server.models.model import Model, ModelState


class Replacements:
    """The models that load to replace others, and those that were replaced and still run requests."""

    def __init__(self) -> None:
        self._coming: dict[str, Model] = {}  # loading models, by the name of the model that is served meanwhile
        self._leaving: dict[Model, asyncio.Task[None]] = {}

    def models(self) -> list[Model]:
        """Return the models that take memory in addition to those that are served."""
        return [*self._coming.values(), *self._leaving]

    def coming(self, name: str) -> Model | None:
        """Return the model that loads to replace the model `name`, or None if there is none."""
        return self._coming.get(name)

    def add(self, model: Model) -> None:
        """Add a loading model, which replaces the served model of the same name."""
        self._coming[model.spec.name] = model

    def remove(self, model: Model) -> bool:
        """Forget a loading model. Return False if it replaces no model."""
        if self._coming.get(model.spec.name) is not model:
            return False
        del self._coming[model.spec.name]
        return True

    def retire(self, model: Model) -> None:
        """Let a model that was replaced finish its requests, and stop its worker once the last of them has ended. New requests already go
        to its replacement."""
        loaded = model.loaded
        assert loaded is not None
        model.state, model.planned_bytes = ModelState.DRAINING, model.total_bytes
        model.loaded = None
        loop, unused = asyncio.get_running_loop(), asyncio.Event()
        # A request refers to `loaded`, or to a variant, from its look-up to its end, even before the worker has its Submit. So the worker
        # stops once all of them are freed. The last request may end on another thread.
        weakref.finalize(loaded.use, loop.call_soon_threadsafe, unused.set).atexit = False
        self._leaving[model] = asyncio.create_task(self._stop(model, loaded.worker, unused))

    async def close(self) -> None:
        """Stop the workers of replaced models, even if they still run requests."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop(self, model: Model, worker: WorkerHandle, unused: asyncio.Event) -> None:
        """Stop a worker once `unused` is set, or at once if this task is cancelled."""
        try:
            await unused.wait()
        finally:
            await worker.stop()
            del self._leaving[model]


def beside(error: LoadError, replaces: Model | None) -> LoadError:
    """Return the error of a load. If the load failed for lack of memory, and its model was to replace another one (`replaces`), add to the
    message how much memory the latter still holds."""
    if replaces is None or not error.required_bytes:
        return error
    name, held = replaces.spec.name, replaces.total_bytes
    message = (
        f"{error.message}. The files of model {name!r} have changed. Its old version is served until the new one is loaded, "
        f"and holds {in_units(held)}: unload {name!r}, then load it again"
    )
    return LoadError(error.code, message, error.required_bytes, error.free_bytes)
