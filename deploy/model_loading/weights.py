"""Bind the weights of a compiled program: prepare them, or map the file in which an earlier load stored the prepared weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compiler.bind import bind_ranks
from compiler.frontend.errors import ModelError
from deploy.cache import NOT_CACHED
from deploy.model_loading.known import carried
from deploy.model_loading.plan import BESIDE, Planned
from deploy.use import begin_use, flush, markers_of, remove_damaged
from deploy.verification import damage_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound(Planned):
    """The state of a load once its weights are bound to its programs."""

    packed: tuple[Path, ...]  # the files in which the prepared weights are stored: one per program and rank, or none if nothing is stored


def bind(known: Planned) -> Bound:
    """Bind the weights of each program of the model. Use the prepared weights that an earlier load stored, or prepare them now and, with a
    cache, store them. Raise ModelError if weights do not fit their program."""
    executable, packed = known.program.executable, list[Path]()
    entries = [known.mode.entry, *(entry for entry in BESIDE if entry in executable.meta.functions)]
    known.progress("pack", 0.0)
    for num_done, entry in enumerate(entries):
        sources = known.mode.rank_weights(known.part)
        kept_in = [_packed_file(known, entry, source.digest()) for source in sources]

        def pack(fraction: float, num_done: int = num_done) -> None:
            known.progress("pack", (num_done + fraction) / len(entries))

        is_marked = all(markers_of(path) for path in kept_in if path is not None)
        try:
            bind_ranks(known.session, executable, entry, sources, kept_in, pack, synced=not is_marked)
        except ModelError as error:
            raise ModelError(f"{known.files.path}: {error}") from error
        packed += [path for path in kept_in if path is not None]
    flush(packed)
    return Bound(**carried(known, Planned), packed=tuple(packed))


def _packed_file(known: Planned, entry: str, digest: str) -> Path | None:
    """Return the path of the prepared weights of one program in the cache, marked as in use. Verify the file if the load says so, or if a
    process that used it was killed. Return None if nothing can be stored, or if the file is damaged and cannot be removed."""
    if known.cache is None:
        return None
    load = known.load
    if entry in BESIDE:
        digest = hashlib.blake2b(f"{digest} {entry}".encode(), digest_size=16).hexdigest()
    place = known.cache.weights_of(known.program.key, digest)
    try:
        return begin_use(place, verify=load.verify, restart=load.restart, progress=partial(known.progress, "verify"))
    except OSError as error:
        log.warning(NOT_CACHED, "packed weights", place.parent, error.strerror or error)
        return None


def damage(packed: Sequence[Path]) -> str:
    """Verify the packed weights while the model keeps running. Remove damaged files, and return a description of the damage, or "" if none
    was found."""
    faults = {path: damage_of(path) for path in packed}
    for path, fault in faults.items():
        if fault:
            remove_damaged(path, fault)
    return "\n".join(fault for fault in faults.values() if fault)
