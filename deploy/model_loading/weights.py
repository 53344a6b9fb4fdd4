"""Bind the weights of a compiled program: prepare them, or map the file in which an earlier load stored the prepared weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compiler.bind import bind_weights
from compiler.frontend.errors import ModelError
from compiler.frontend.hearing import ENTRY as HEAR
from compiler.frontend.seeing import ENTRY as SEE
from deploy.cache import NOT_CACHED
from deploy.model_loading.known import carried
from deploy.model_loading.plan import Planned
from deploy.use import begin_use, remove_damaged
from deploy.verification import damage_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound(Planned):
    packed: Path | None  # the file in which the prepared weights are stored, or None if they are not stored


def bind(known: Planned) -> Bound:
    known.progress("pack", 0.0)
    packed = _packed_file(known)
    pack = partial(known.progress, "pack")
    try:
        bind_weights(known.session, known.program.executable, known.mode.entry, known.mode.weights, packed, pack)
    except ModelError as error:
        raise ModelError(f"{known.files.path}: {error}") from error
    if known.files.config.hearing is not None:  # small, so it is prepared at every start
        bind_weights(known.session, known.program.executable, HEAR, known.mode.weights)
    if SEE in known.program.executable.meta.functions:
        bind_weights(known.session, known.program.executable, SEE, known.mode.weights)
    return Bound(**carried(known, Planned), packed=packed)


def _packed_file(known: Planned) -> Path | None:
    if known.cache is None:
        return None
    place, load = known.cache.weights_of(known.program.key, known.mode.weights.digest()), known.load
    try:
        return begin_use(place, verify=load.verify, restart=load.restart, progress=partial(known.progress, "verify"))
    except OSError as error:
        log.warning(NOT_CACHED, "packed weights", place.parent, error.strerror or error)
        return None


def damage(packed: Path | None) -> str:
    """Verify the packed weights while the model keeps running. Return a description of the damage, and remove a damaged file."""
    fault = "" if packed is None else damage_of([packed])
    if packed is not None and fault:
        remove_damaged(packed, fault)
    return fault
