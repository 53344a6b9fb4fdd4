"""Bind the weights of a compiled program: prepare them, or map the file in which an earlier load stored the prepared weights."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from compiler.bind import bind_weights
from deploy.cache import NOT_CACHED, kept
from deploy.model_loading.program import Compiled
from deploy.model_loading.servable import Progress, Servable
from deploy.use import begin_use
from runtime.session import Session
from server.messages import Load

log = logging.getLogger(__name__)


def bind(session: Session, model: Servable, compiled: Compiled, load: Load, progress: Progress) -> Path | None:
    """Bind the weights. Return the file in which the prepared weights are stored, or None if they are not stored."""
    progress("pack", 0.0)
    folder = kept()
    packed = None
    if folder is not None:
        place = folder.weights_of(compiled.key, model.mode.weights.digest())
        try:
            packed = begin_use(place, verify=load.verify, restart=load.restart, progress=partial(progress, "verify"))
        except OSError as error:
            log.warning(NOT_CACHED, "packed weights", place.parent, error.strerror or error)
    bind_weights(session, compiled.executable, model.mode.entry, model.mode.weights, packed, partial(progress, "pack"))
    return packed
