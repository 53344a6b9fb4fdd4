"""The models that the server loads again after a restart: the contents of the state file, if there is one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from server.models.state import ModelSpec, SavedState, read_state, write_state

log = logging.getLogger(__name__)


class SavedModels:
    """The models of the state file. A model that failed to load stays in the file until it is unloaded."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._specs: dict[str, ModelSpec] = {}

    def read(self) -> dict[str, ModelSpec]:
        saved = read_state(self._file).models if self._file else ()
        self._specs = {spec.name: spec for spec in saved}
        return dict(self._specs)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def drop(self, name: str) -> None:
        self._specs.pop(name, None)

    def write(self, loaded: Iterable[ModelSpec]) -> None:
        self._specs.update((spec.name, spec) for spec in loaded)
        if self._file is None:
            return
        try:
            write_state(self._file, SavedState(tuple(self._specs.values())))
        except OSError as error:  # models must load and unload even if the disk is full
            log.error("state file %s: %s; a restart will not know of this change", self._file, error.strerror)
