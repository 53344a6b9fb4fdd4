"""The models of the state file while the server runs. Workers import state.py, but not this module, because it needs asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from server.models.state import ModelSpec, SavedState, read_state, write_state

log = logging.getLogger(__name__)


class SavedModels:
    """The models of the state file. A model that failed to load stays in the file until it is unloaded, or until its name becomes an
    alias of another model. A task writes the file on a thread, because a busy disk may take seconds."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._specs: dict[str, ModelSpec] = {}
        self._is_outdated = False  # the file lacks the latest change
        self._writing: asyncio.Task[None] | None = None

    def read(self, initial: Sequence[ModelSpec], owners: Mapping[str, str]) -> list[ModelSpec]:
        """Read the file. Return the models of a start: those of the command line (`initial`), then those that only the file has. The
        command line decides the settings of its models. These models also keep their aliases of the file, those of earlier command lines
        included, until the aliases are removed at `/admin/aliases`; this holds even if the source of a model has changed. No saved model
        keeps an alias that the command line gives to another model. `owners` maps each name and alias of the command line to the name of
        its model. Raise StateError if the file cannot be read."""
        self._specs = {spec.name: spec for spec in (read_state(self._file).models if self._file else ())}
        given, saved = {spec.name: spec for spec in initial}, dict(self._specs)
        for spec, name in [(one, name) for one in initial for name in (one.name, *one.aliases)]:
            if name in saved and (name == spec.name or saved[name].source == spec.source):
                foreign = {alias for alias, owner in owners.items() if owner != spec.name}
                given[spec.name] = given[spec.name].with_later_names(saved.pop(name).without({*foreign, spec.name}))
                if name != spec.name:  # saved under a name that is now an alias, such as the name of a GGUF file
                    self.drop(name)
        return [*given.values(), *(spec.without(owners) for name, spec in saved.items() if name not in given)]

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def drop(self, name: str) -> None:
        """Leave a model out of the file from the next `write` on."""
        self._specs.pop(name, None)

    def write(self, loaded: Iterable[ModelSpec]) -> None:
        """Begin to write the file. `loaded` are the models that are loaded. No other saved model may have a name or an alias of a loaded
        model: if its alias is one, it loses this alias; if its own name is one, it is removed from the file. Otherwise one of two models
        with the same name would not load at the next start."""
        found = {spec.name: spec for spec in loaded}
        taken = {name for spec in found.values() for name in (spec.name, *spec.aliases)}
        self._specs = {name: spec.without(taken) for name, spec in self._specs.items() if name in found or name not in taken} | found
        self._is_outdated = self._file is not None
        if self._is_outdated and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write())

    async def written(self) -> None:
        """Return when the file has all changes, or could not be written."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        """Write the file until it has the latest change. If that fails, log why."""
        assert self._file is not None
        while self._is_outdated:
            self._is_outdated = False
            try:
                await asyncio.to_thread(write_state, self._file, SavedState(tuple(self._specs.values())))
            except OSError as error:  # models must load and unload even if the disk is full
                log.error("state file %s: %s; a restart will not know of this change", self._file, error.strerror)
