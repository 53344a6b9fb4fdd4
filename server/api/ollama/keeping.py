"""Put a model to sleep for Ollama's `keep_alive: 0`. Sleep frees the model's memory, and the next request for the model wakes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from fastapi import Response

from server.api.answer.respond import json_answer
from server.api.context import Caller
from server.api.ollama.answer import now
from server.api.ollama.body import OllamaBody
from server.errors import ADMIN_KEY_REQUIRED, MODEL_PINNED, ApiError
from server.models.model import Model
from server.models.sleep import put_to_sleep, wake_up
from server.settings import ServerSettings

log = logging.getLogger(__name__)


class Keeping:
    """Does what requests ask for by `keep_alive`, and answers requests without a prompt."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, model: Model, body: OllamaBody, who: Caller, empty: Mapping[str, object]) -> Response:
        """Answer a request without a prompt, by which Ollama's clients load a model, or put it to sleep with `keep_alive: 0`. Without
        `keep_alive: 0`, a sleeping model wakes. `empty` has the fields of an empty answer. Raise ApiError if the model does not wake up, or
        if it is to sleep, and the caller may not put models to sleep or the model is pinned."""
        if body.lets_go:
            if not who.is_admin:
                raise ApiError(ADMIN_KEY_REQUIRED, "keep_alive is 0, and unloading a model needs an admin key", param="keep_alive")
            if model.spec.pin:
                raise ApiError(MODEL_PINNED, f"model {model.spec.name!r} is pinned; leave keep_alive out", param="keep_alive")
            await self._sleep(model)
        else:
            await wake_up(model)
        reason = "unload" if body.lets_go else "load"
        return json_answer({"model": body.model, "created_at": now(), **empty, "done": True, "done_reason": reason})

    def after(self, model: Model, body: OllamaBody, who: Caller) -> Callable[[], None] | None:
        """Return a function that begins to put the model to sleep once its requests have ended, or None if the request does not ask for
        that, if the caller may not put models to sleep, or if the model is pinned."""
        if not (body.lets_go and who.is_admin) or model.spec.pin:
            return None

        def begin() -> None:
            """Begin to put the model to sleep. The set keeps a reference to the task, so that the task is not garbage-collected before it
            ends."""
            task = asyncio.create_task(self._sleep(model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return begin

    async def _sleep(self, model: Model) -> None:
        """Put a model to sleep once its requests have ended, or after `drain_s`. If the model cannot sleep, log why."""
        try:
            await put_to_sleep(model, "wait", patience_s=self._settings.drain_s)
        except ApiError as error:  # the model was unloaded meanwhile, or its worker is being restarted
            log.warning("%s does not go to sleep: %s", model.spec.name, error.message)
