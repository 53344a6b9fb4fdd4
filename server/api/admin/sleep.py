"""Put models to sleep and wake them, through vLLM's endpoints: /sleep, /wake_up, /is_sleeping. Without the parameter `model`, an endpoint
applies to all models that are ready."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context
from server.api.routes import ADMINISTRATION, gives, new_router
from server.models.model import Model, ModelState
from server.models.sleep import SleepMode, is_asleep, put_to_sleep, wake_up

ModelName = Annotated[str | None, Query(max_length=1024)]


class Sleeping(TypedDict):
    """Whether the models of the request sleep."""

    is_sleeping: bool  # whether there are such models, and all of them sleep
    models: Sequence[str]  # names of the models that sleep


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION)
    registry, settings = context.registry, context.settings

    def meant(name: str | None) -> list[Model]:
        """Return the model of a name, or all ready models if there is no name. Raise ApiError if no model has the name."""
        return [model for model in registry.models() if model.state is ModelState.READY] if name is None else [registry.find(name)]

    def told(models: list[Model]) -> Response:
        """Return the answer that says which of the models sleep."""
        sleeping: Sleeping = {"is_sleeping": is_asleep(models), "models": [m.spec.name for m in models if m.is_sleeping]}
        return json_answer(sleeping)

    @routes.post("/sleep", responses=gives(Sleeping))
    async def sleep(model: ModelName = None, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: SleepMode = "abort") -> Response:
        """Put models to sleep, which frees all of their memory at any `level`. A request to a sleeping model wakes it. `mode` decides what
        happens to running requests: `abort` fails them, `wait` gives them time to finish (the setting `drain_s`), and `keep` continues them
        after the sleep."""
        models = meant(model)
        await asyncio.gather(*(put_to_sleep(one, mode, patience_s=settings.drain_s) for one in models))
        return told(models)

    @routes.post("/wake_up", responses=gives(Sleeping))
    async def wake(
        model: ModelName = None, tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query(max_length=8)] = None
    ) -> Response:
        """Wake sleeping models, and wait until they are loaded. `tags` has no effect: a model always wakes as a whole."""
        models = meant(model)
        for one in models:
            await wake_up(one)
        return told(models)

    @routes.get("/is_sleeping", responses=gives(Sleeping))
    async def is_sleeping(model: ModelName = None) -> Response:
        """Return whether all models sleep, and the names of those that sleep."""
        return told(meant(model))

    return routes
