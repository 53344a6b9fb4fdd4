"""Publish models that browsers download and run. Each model that the settings name is exported by a separate process once it is loaded."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime.files import files_below
from runtime.own_folder import OwnFolder
from server.errors import LOAD_FAILED, MODEL_NOT_READY, NOT_FOUND_PATH, ApiError
from server.interfaces import LoadError
from server.models.state import ModelSpec

log = logging.getLogger(__name__)

Export = Callable[[ModelSpec, Path], Awaitable[None]]  # writes the files of an export into an empty folder; raises LoadError
RETRY_S = 5  # seconds after which a browser is told to retry if it asks for a file before the export is complete


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of an export."""

    path: Path
    etag: str


@dataclass(slots=True, eq=False)
class Publication:
    """The export of one loaded model."""

    spec: ModelSpec
    files: Mapping[str, PublishedFile] = field(default_factory=dict[str, PublishedFile])  # empty until the export is complete
    error: str = ""  # why the export has failed; empty: it has not


class Publications:
    """The exports of loaded models, by the names of the models."""

    def __init__(self, names: Sequence[str] = (), export: Export | None = None, folder: Path = Path()) -> None:
        """`names`: the names of the models to publish. `begin` starts the publication of one. Each export gets its own folder below
        `folder`. If `export` is None, nothing is published."""
        self._names = sorted(names, key=len, reverse=True)  # the longest first, so that `find` prefers it
        self._export = export
        self._folder = folder
        self._current: dict[str, Publication] = {}
        self._tasks: dict[Publication, asyncio.Task[None]] = {}  # tasks of ended publications remain until their folders are removed

    def begin(self, spec: ModelSpec) -> None:
        """Export a model that has just been loaded, if it is one of the models to publish. Nothing is served under its name until the
        export is complete."""
        if self._export is None or spec.name not in self._names:
            return
        self.end(spec.name)
        self._current[spec.name] = made = Publication(spec)
        self._tasks[made] = task = asyncio.create_task(self._publish(made, self._export))
        task.add_done_callback(lambda _: self._tasks.pop(made))

    def end(self, name: str) -> None:
        """Stop publishing a model that is unloaded or replaced. Downloads that have begun can still read their files."""
        if (old := self._current.pop(name, None)) is not None and old in self._tasks:
            self._tasks[old].cancel()

    async def close(self) -> None:
        """Stop publishing all models, and remove their files."""
        for name in list(self._current):
            self.end(name)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        with suppress(OSError):
            self._folder.rmdir()  # fails if other servers use the folder

    def address(self, name: str) -> str | None:
        """Return the path of a model's page, or None while it cannot be opened."""
        found = self._current.get(name)
        return f"/web/{name}/" if found is not None and found.files else None

    def find(self, path: str) -> tuple[str, str]:
        """Split a path below /web/ into the name of a published model and a file of its export. Raise ApiError if no published model has
        such a name."""
        for name in self._names:
            if path.startswith(f"{name}/"):
                return name, path[len(name) + 1 :]
        raise ApiError(NOT_FOUND_PATH, f"there is nothing at /web/{path:.200}; `relaxserve serve --publish MODEL` serves /web/MODEL/")

    def file(self, name: str, file: str) -> PublishedFile:
        """Return a file of an export. Raise ApiError if the model is not loaded or not exported yet, if its export failed, or if the export
        has no such file."""
        found = self._current.get(name)
        if found is not None and found.error:
            raise ApiError(LOAD_FAILED, f"model {name!r} cannot be published: {found.error}")
        if found is None or not found.files:
            state = "loaded" if found is None else "exported"
            text = f"model {name!r} is not {state} yet; its page can be opened when it is"
            raise ApiError(MODEL_NOT_READY, text, headers={"retry-after": str(RETRY_S)})
        if file not in found.files:
            raise ApiError(NOT_FOUND_PATH, f"the export of {name!r} has no file {file!r:.80}")
        return found.files[file]

    async def _publish(self, made: Publication, export: Export) -> None:
        """Export a model, and serve its files until the task is cancelled. If the export fails, log why, and store the reason, which `file`
        raises."""
        name = made.spec.name
        log.info("exporting %s for browsers", name)
        try:
            async with _own_folder(self._folder) as folder:
                await export(made.spec, folder)
                made.files = await asyncio.to_thread(_files_of, folder)
                log.info("%s is published at /web/%s/", name, name)
                await asyncio.Event().wait()
        except LoadError as error:
            made.error = error.message
            log.error("%s is not published: %s", name, error.message)
        except OSError as error:
            made.error = f"its files cannot be written: {error.strerror}"
            log.error("%s is not published: %s: %s; set RELAXSERVE_CACHE to another folder", name, self._folder, error.strerror)
        except Exception as error:
            made.error = f"{type(error).__name__}: {error}"
            log.exception("%s is not published", name)


@asynccontextmanager
async def _own_folder(parent: Path) -> AsyncGenerator[Path]:
    """Create a folder for an export, and remove it at the end. Threads do both, because creating the folder also removes folders that ended
    servers have left behind, and large files take long to remove."""
    making = asyncio.create_task(asyncio.to_thread(OwnFolder, parent))
    try:
        yield (await asyncio.shield(making)).path
    finally:
        made = await making  # the thread goes on if this task is cancelled
        await asyncio.to_thread(made.remove)


def _files_of(folder: Path) -> dict[str, PublishedFile]:
    """Return the files below a folder, by their paths in it."""
    found: dict[str, PublishedFile] = {}
    for path in files_below(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.relative_to(folder).as_posix()] = PublishedFile(path, f'"{digest[:32]}"')
    return found
