"""What is kept between starts, in one folder: compiled programs, and the weights as these read them.

    executables/KEY-RANGES.rsx, .json   a compiled program, and the ranges that its plan covers (compiler/cache.py)
    executables/KEY-THREADS.costs       what its steps take with so many threads (deploy/model_loading/costs.py)
    executables/KEY-CODE.cubin          what the driver of a GPU assembled of it (runtime/device/cuda/assembled.py)
    executables/KEY.models              the sources that were loaded with it, a line each, for people
    weights/KEY-CHECKPOINT.rsw          packed weights: what any program of the key made of one checkpoint (compiler/bind.py)

    weights/KEY-CHECKPOINT.rsw.used-*   markers of processes that use them (deploy/use.py)

    exports/KEY/                        exports for browsers (deploy/export/kept.py)
    web/*                               what running servers publish; the next server removes those of one that was killed

A file is written beside its place under another name, and moved there when it is whole; what a killed load left of that is a leftover.
A file may be removed while servers have it mapped: they keep what they read, and the next start makes it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from compiler.cache import SUFFIX as PROGRAM_SUFFIX
from compiler.cache import Cache
from deploy.use import markers_of
from runtime import flags
from runtime.device.cuda.assembled import SUFFIX as ASSEMBLED_SUFFIX
from runtime.device.cuda.assembled import read as read_assembled
from runtime.errors import RuntimeFault
from runtime.sections import SectionFile
from server.interfaces import CachedModel, LoadError
from server.messages import ErrorCode

WEIGHTS_SUFFIX = ".rsw"
COSTS_SUFFIX = ".costs"
MODELS_SUFFIX = ".models"
MOST_MODELS = 8  # that are remembered of a program
ABANDONED_S = 3600.0  # a load that still runs writes more often
_KEY = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"\.import-.+|\.[0-9a-f]{32}\.\w+|\.?[0-9a-f]{32}(-[0-9a-f]+)?\.(rsx|json|rsw|costs|models|cubin)(\..+)?")


class CannotRemove(RuntimeFault):
    """A file of the folder that is not ours to remove."""


class Part(StrEnum):
    PROGRAM = "compiled programs"
    WEIGHTS = "packed weights"
    ASSEMBLED = "code assembled for GPUs"
    EXPORT = "exports for browsers"
    LEFTOVER = "leftovers of loads that were cut off"


@dataclass(frozen=True, slots=True)
class Item:
    """What goes or stays as a whole."""

    part: Part
    paths: tuple[Path, ...]
    key: str
    num_bytes: int
    used_s: float  # time of the last use


class Kept:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executables = Cache(folder / "executables")
        self._weights = folder / "weights"
        self._exports = folder / "exports"

    def weights_of(self, key: str, digest: str) -> Path:
        """Where the prepared weights of one program and one checkpoint are."""
        return self._weights / f"{key}-{digest[:32]}{WEIGHTS_SUFFIX}"

    def costs_of(self, key: str, num_threads: int) -> Path:
        """Where it stands what steps of a program take."""
        return self.executables.folder / f"{key}-{num_threads:x}{COSTS_SUFFIX}"

    def assembled_of(self, key: str) -> Path:
        """How the files begin in which a device keeps what it makes of a program's code."""
        return self.executables.folder / key

    def export_of(self, key: str) -> Path:
        """The folder with the files of an export."""
        return self._exports / key

    def models_of(self, key: str) -> list[str]:
        """The sources that were loaded with a program, the last one first."""
        try:
            return self._models_file(key).read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []

    def remember_model(self, key: str, source: str) -> None:
        """Two loads at once may forget one of the two, which `cache ls` then does not show."""
        known = self.models_of(key)
        if known[:1] != [source]:
            file = self._models_file(key)
            with suppress(OSError):  # a folder that may only be read can still be used
                written = file.with_name(f".{file.name}.{os.getpid()}")
                written.write_text("\n".join([source, *(other for other in known if other != source)][:MOST_MODELS]) + "\n")
                written.replace(file)

    def _models_file(self, key: str) -> Path:
        return self.executables.folder / f"{key}{MODELS_SUFFIX}"

    def items(self) -> list[Item]:
        """Programs count as used when their weights are: a start reads both."""
        weights = list(self._packed())
        programs = list(self._programs())
        for number, program in enumerate(programs):
            used = (w.used_s for w in weights if w.key == program.key)
            programs[number] = replace(program, used_s=max((program.used_s, *used)))
        assembled = list(self._assembled())
        found = [*programs, *weights, *assembled, *self._exported()]
        return [*found, *self._leftovers({path for item in found for path in item.paths})]

    def prune(self, *, keep_bytes: int | None = None, keep_s: float = 0.0, dry_run: bool = False) -> list[Item]:
        """Remove what nothing can use: weights and assembled code without a program, and leftovers. With `keep_bytes`, the longest unused
        as well, until the rest fits; those used in the last `keep_s` seconds stay."""
        items = self.items()
        keys = {item.key for item in items if item.part is Part.PROGRAM}
        going = [item for item in items if item.part is not Part.EXPORT and (item.part is Part.LEFTOVER or item.key not in keys)]
        if keep_bytes is not None:
            staying = sorted((item for item in items if item not in going), key=lambda item: (item.used_s, item.part is Part.PROGRAM))
            total, now = sum(item.num_bytes for item in staying), time.time()
            for item in staying:
                if total <= keep_bytes or now - item.used_s < keep_s:
                    break
                going.append(item)
                total -= item.num_bytes
        if not dry_run:
            _remove(going)
        return going

    def verify(self) -> Iterator[tuple[Path, str]]:
        """Read every file completely: its path, and what is wrong with it; nothing is, if the text is empty."""
        for path in self.executables.paths():
            yield path, _fault(lambda path=path: self.executables.verify(path))
        for item in self._packed():
            path = item.paths[0]
            yield path, _fault(lambda path=path: SectionFile(path).verify())
        for item in self._assembled():
            path = item.paths[0]
            yield path, _fault(lambda path=path: read_assembled(path))
        for item in self._exported():
            path = item.paths[0]
            yield path, _fault(lambda path=path: _verify_export(path))

    def remove(self, path: Path) -> None:
        """One file with what belongs to it."""
        beside = (path.with_suffix(".json"),) if path.suffix == PROGRAM_SUFFIX else ()
        _remove([Item(Part.LEFTOVER, (path, *beside), "", 0, 0.0)])

    # --- as the administration sees it, by signature -----------------------------------------------------------------------

    def entries(self) -> list[CachedModel]:
        return [CachedModel(entry.key, entry.num_bytes, entry.used_s) for entry in self.executables.entries()]

    def clear(self, *, keep: frozenset[str]) -> int:
        unused = [item for item in self.items() if item.key not in keep]
        _remove(unused)
        return sum(item.num_bytes for item in unused)

    # --- what lies where ---------------------------------------------------------------------------------------------------

    def _programs(self) -> Iterator[Item]:
        for entry in self.executables.entries():
            costs = self.executables.folder.glob(f"{entry.key}-*{COSTS_SUFFIX}")
            beside = (entry.path.with_suffix(".json"), self._models_file(entry.key), *costs)
            yield Item(Part.PROGRAM, (entry.path, *beside), entry.key, entry.num_bytes, entry.used_s)

    def _packed(self) -> Iterator[Item]:
        for path in sorted(self._weights.glob(f"*{WEIGHTS_SUFFIX}")):
            if _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process removed it
                    status = path.stat()
                    yield Item(Part.WEIGHTS, (path, *markers_of(path)), path.name.split("-")[0], status.st_size, status.st_mtime)

    def _assembled(self) -> Iterator[Item]:
        for path in sorted(self.executables.folder.glob(f"*{ASSEMBLED_SUFFIX}")):
            if _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield Item(Part.ASSEMBLED, (path,), path.name.split("-")[0], status.st_size, status.st_mtime)

    def _exported(self) -> Iterator[Item]:
        for path in sorted(self._exports.glob("*")):
            if _KEY.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    yield Item(Part.EXPORT, (path,), path.name, _num_bytes(path), path.stat().st_mtime)

    def _leftovers(self, of_items: set[Path]) -> Iterator[Item]:
        now = time.time()
        for path in (*self.executables.folder.glob("*"), *self._weights.glob("*"), *self._exports.glob(".*")):
            if path not in of_items and _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if now - status.st_mtime > ABANDONED_S:
                        yield Item(Part.LEFTOVER, (path,), "", _num_bytes(path), status.st_mtime)


def kept() -> Kept | None:
    """Where this process keeps things, if it does."""
    switches = flags.current()
    return None if switches.no_cache else Kept(switches.cache)


def _verify_export(folder: Path) -> None:
    try:
        levels = json.loads((folder / "program.json").read_bytes())["levels"]
    except (ValueError, KeyError) as error:
        raise RuntimeFault(f"program.json is damaged: {error}") from error
    for level in levels:
        for shard in level["shards"]:
            with (folder / shard["file"]).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                    raise RuntimeFault(f"{shard['file']} is damaged: its SHA-256 is not that of program.json")


def _fault(verify: Callable[[], object]) -> str:
    try:
        verify()
    except (RuntimeFault, OSError) as fault:
        return str(fault)
    return ""


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _remove(items: Sequence[Item]) -> None:
    for path in (path for item in items for path in item.paths):
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotRemove(f"{path} cannot be removed: {error.strerror}; do it as the user that owns the folder") from error


@contextmanager
def kept_in(folder: Path) -> Generator[None]:
    """A disk that is full, or that may only be read, is for its owner to mend."""
    try:
        yield
    except OSError as error:
        remedy = "make room there, name another folder by RELAXSERVE_CACHE, or keep nothing by RELAXSERVE_NO_CACHE=1"
        raise LoadError(ErrorCode.LOAD_FAILED, f"the cache {folder} cannot be used: {error.strerror or error}; {remedy}") from error
