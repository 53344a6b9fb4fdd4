"""Put models to sleep, and wake them. The worker of a sleeping model has ended and freed all of its memory. The model keeps its names, and
the next request loads it again."""

from __future__ import annotations

import asyncio
from typing import Literal

from server.errors import MODEL_NOT_READY, ApiError, of_request
from server.interfaces import RequestError
from server.models.model import SERVING, SLEEPING, Loaded, Model

LOOK_S = 0.01  # seconds between polls while a worker starts or finishes its requests

SleepMode = Literal["abort", "wait", "keep"]


async def put_to_sleep(model: Model, mode: SleepMode, *, patience_s: float) -> None:
    """Put a model to sleep. `abort` fails its running requests. `wait` gives them `patience_s` seconds to finish; requests that still run
    after that time continue when the model wakes. `keep` interrupts all running requests at once; they continue when the model wakes. Raise
    ApiError if the model is not ready. A sleeping model goes on sleeping."""
    loaded = _loaded(model)
    if mode == "wait":
        end_s = asyncio.get_running_loop().time() + patience_s
        while loaded.admission.num_sequences and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(LOOK_S)
    try:
        await loaded.worker.sleep(keep=mode != "abort")
    except RequestError as error:
        raise of_request(error) from error


async def wake_up(model: Model) -> None:
    """Wake a model if it sleeps, and return when it is ready. Raise ApiError if it is not loaded or is unloaded meanwhile, if there is no
    memory for it, or if it does not wake up in time."""
    worker = _loaded(model).worker
    try:
        worker.wake()
    except RequestError as error:
        raise of_request(error) from error
    while (outage := worker.outage) is not None:
        _loaded(model)
        if outage.is_long:
            raise ApiError(MODEL_NOT_READY, f"model {model.spec.name!r} does not wake up: {outage.error or 'it is still loading'}")
        await asyncio.sleep(LOOK_S)


def is_asleep(models: list[Model]) -> bool:
    """Return whether there are models, and all of them sleep."""
    return bool(models) and all(model.condition == SLEEPING for model in models)


def _loaded(model: Model) -> Loaded:
    """Return the loaded parts of a model. Raise ApiError if it is not ready, or if the server stops."""
    if model.loaded is None or model.condition not in SERVING:
        raise ApiError(MODEL_NOT_READY, f"model {model.spec.name!r} is {model.condition}; see /admin/models", param="model")
    return model.loaded
