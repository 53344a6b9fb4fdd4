"""Divide the memory that all models share: count the used and the free bytes, and decide how many bytes each load may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec
from typing_extensions import TypedDict

from runtime.device.registry import CPU
from runtime.units import in_units
from server.errors import BY_CODE, INSUFFICIENT_MEMORY, PREFLIGHT_UNAVAILABLE, ApiError
from server.interfaces import LoadError, RequestError
from server.messages import ErrorCode
from server.models.model import Footprint, Model, ModelState, Preflight, Weigh
from server.models.state import ModelSpec
from server.settings import ServerSettings


class Evictable(TypedDict):
    """The memory that unloading a model would free."""

    model: str
    bytes: int


class Budget:
    """Decides how much memory each load may take. Loads run at the same time if it is known how much memory each takes.

    The memory of a load that runs alone is not estimated. When a second load begins, the planner estimates the memory of the first. Without
    a limit or a planner, the second load waits until the first has ended, because only then is it known how much memory is left.

    Cached models load within seconds, so they load first: other loads wait for them. Cached models wait for running loads of unknown size
    only if the memory has a limit.
    """

    def __init__(
        self, settings: ServerSettings, preflight: Preflight | None, weigh: Weigh, models: Callable[[], Collection[Model]]
    ) -> None:
        """`preflight` plans the memory of a load, `weigh` estimates the bytes of its weights. `models` returns all models, replacements
        included."""
        self._settings = settings
        self._preflight = preflight
        self._weigh = weigh
        self._models = models
        self._turn = asyncio.Lock()  # held while a load claims memory

    @property
    def used_bytes(self) -> int:
        """The bytes of host memory that models take, or will take once they are loaded."""
        return sum(model.total_bytes for model in self._models() if model.spec.device == CPU)

    @property
    def free_bytes(self) -> int | None:
        """The bytes of host memory that are left of memory_limit_bytes; None: there is no limit."""
        limit = self._settings.memory_limit_bytes
        return None if limit is None else max(0, limit - self.used_bytes)

    def _free_for(self, spec: ModelSpec) -> int | None:
        """Return the free bytes for a model, or None if unlimited. The limit covers only memory of the host; a worker on a GPU finds out
        itself how much memory of the GPU is free."""
        return self.free_bytes if spec.device == CPU else None

    def evictable(self) -> list[Evictable]:
        """Return the models that may be unloaded, largest first. Pinned models are left out."""
        models = [m for m in self._models() if m.state is ModelState.READY and not m.spec.pin]
        models.sort(key=lambda model: -model.total_bytes)
        return [{"model": model.spec.name, "bytes": model.total_bytes} for model in models]

    async def claim(self, model: Model) -> ModelSpec:
        """Return the specification to load, with the memory that it may take, and note it in `model.claim`. Before that, a model that is
        not cached waits until cached models have loaded, and until it is known how much memory each running load takes. A cached model does
        not wait for cached models, and waits for the sizes of running loads only if the memory has a limit."""
        others = [other for other in self._models() if other is not model]
        if not model.is_cached:
            await asyncio.gather(*(other.operation.wait() for other in others if other.is_cached and _has_no_memory_yet(other)))
        elif self._settings.memory_limit_bytes is None or not any(other.claim is not None for other in others):
            model.claim = self._limited(model.spec, model)
            return model.claim
        async with self._turn:
            for other in self._models():
                if other is not model and other.claim is not None:
                    await self._settle(other)
            model.claim = self._limited(model.spec, model)
            return model.claim

    async def dry_run(self, spec: ModelSpec) -> tuple[Footprint, int | None]:
        """Return the memory that a load would take, and the memory that is free (None: no limit). Raise ApiError if the load would be
        refused, or if there is no planner."""
        if self._preflight is None:
            raise ApiError(
                PREFLIGHT_UNAVAILABLE, "dry_run needs a memory planner, and this server was started without one", param="dry_run"
            )
        free_bytes = self._free_for(spec)
        try:
            footprint = await self._preflight(self._limited(spec))
        except LoadError as error:
            raise self.as_api_error(error) from error
        if free_bytes is not None and footprint.total_bytes > free_bytes:
            message = f"model {spec.name!r} needs {in_units(footprint.total_bytes)} and {in_units(free_bytes)} are free"
            raise self.as_api_error(LoadError(ErrorCode.INSUFFICIENT_MEMORY, message, footprint.total_bytes, free_bytes))
        return footprint, free_bytes

    def require_room(self, spec: ModelSpec, num_bytes: int) -> None:
        """Raise RequestError if fewer than `num_bytes` are free: a sleeping model takes these bytes when it wakes. Do nothing if there is
        no limit, or if the model runs on a GPU."""
        free_bytes = self._free_for(spec)
        if free_bytes is not None and num_bytes > free_bytes:
            amounts = f"{in_units(num_bytes)}, of which {in_units(free_bytes)} are free"
            message = f"model {spec.name!r} sleeps, and waking it takes {amounts}; unload another model"
            raise RequestError(ErrorCode.INSUFFICIENT_MEMORY, message)

    def as_api_error(self, error: LoadError) -> ApiError:
        """Return the error that tells a client why a load failed. If memory was short, the error names models that may be unloaded."""
        if not error.required_bytes:
            return ApiError(BY_CODE[error.code], error.message)
        return ApiError(
            INSUFFICIENT_MEMORY,
            error.message,
            required_bytes=error.required_bytes,
            free_bytes=error.free_bytes,
            evictable=self.evictable(),
        )

    async def _settle(self, other: Model) -> None:
        """Return once it is known how much memory a running load takes, or once the load has ended. If the planner finds this number, store
        it in `planned_bytes`."""
        if other.planned_bytes or other.claim is None:
            return
        ended = asyncio.create_task(other.operation.wait())
        planning = asyncio.create_task(self._plan(other.claim))
        try:
            await asyncio.wait((ended, planning), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                other.planned_bytes = planning.result()
            if not other.planned_bytes:
                await ended
        finally:
            for task in (ended, planning):
                task.cancel()
            await asyncio.gather(ended, planning, return_exceptions=True)

    async def _plan(self, spec: ModelSpec) -> int:
        """Return the bytes that a load will take. Return 0 if there is no planner or no limit, or if the planner expects that the load
        fails."""
        if self._preflight is None or self._settings.memory_limit_bytes is None:
            return 0
        try:
            return (await self._preflight(spec)).total_bytes
        except LoadError:
            return 0

    def _limited(self, spec: ModelSpec, model: Model | None = None) -> ModelSpec:
        """Return `spec` with the memory that it may take. Bytes for other models that wait to load stay free: those of their weights, and
        of KV caches of a given size. `spec` and the waiting models without a given size share the remaining bytes equally. If
        memory_limit_bytes is set, one more share stays free for models loaded later. If the settings have a default size of KV caches, a
        model without a given size gets this default. `model` is the model that loads; None: this is a dry run."""
        others = [other for other in self._models() if other is not model]
        waiting = [other.spec for other in others if _has_no_memory_yet(other) or (model is not None and _is_overtaken(other, model))]
        coming = [other for other in waiting if other.device == spec.device]
        default_bytes = self._settings.default_kv_cache_bytes or 0
        wanted = (default_bytes if other.kv_cache_bytes is None else other.kv_cache_bytes for other in coming)
        # A size below 1 is a share of the memory. Its bytes are known only when the model loads, and so are not counted here.
        reserved_bytes = sum(map(self._weigh, coming)) + sum(size for size in wanted if isinstance(size, int))
        num_shares = 1 + sum(other.kv_cache_bytes is None for other in coming) + (self._settings.memory_limit_bytes is not None)
        spec = msgspec.structs.replace(
            spec, memory_limit_bytes=self._free_for(spec), reserved_bytes=reserved_bytes, kv_share=1 / num_shares
        )
        if spec.kv_cache_bytes is None and self._settings.default_kv_cache_bytes is not None:
            spec = msgspec.structs.replace(spec, kv_cache_bytes=self._settings.default_kv_cache_bytes)
        return spec


def _has_no_memory_yet(model: Model) -> bool:
    """Return whether a model waits to load: it has not claimed memory."""
    return model.state is ModelState.LOADING and model.claim is None and not model.planned_bytes


def _is_overtaken(other: Model, model: Model) -> bool:
    """Return whether the load of `model`, which is cached, passes that of `other`, which began earlier and has not taken its memory yet."""
    return model.is_cached and not other.is_cached and other.claim is not None and not other.planned_bytes
