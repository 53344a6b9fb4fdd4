"""A cache of executables on disk. The key of an executable is a digest of what it was compiled from.

Entries with the same key (signature.py) differ only in the declared ranges of their variables. A look-up hits if the ranges of an entry
cover the requested ones: an executable that was planned for 4096 tokens serves 2048 as well. If several entries cover the requested ranges,
the look-up chooses the entry whose upper bounds have the smallest sum, and narrows the checks of its executable to the requested ranges.
This module imports no part of the compiler except `report`, so a process can manage the folder without loading the compiler.

Executables are machine code. So each has a seal, which covers its ranges too and which only the holder of the folder's key can make
(runtime/sealed.py). No part of an executable is used before its seal is verified.

A small JSON file next to each executable, its sidecar, states the ranges, so that a look-up need not open every executable. If the sidecar
states other ranges than those that the executable checks, the entry counts as damaged.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from compiler.report import say
from runtime.errors import DamagedFile, IncompatibleExecutable, RuntimeFault
from runtime.executable import Bound, Executable, Slot, VMFunction
from runtime.own_folder import OwnFolder
from runtime.sealed import key_of, make_private, require_private
from runtime.whole_files import ORDINARY, remove_abandoned, replacing

log = logging.getLogger(__name__)

SUFFIX = ".rsx"
MAX_SIDECAR_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}")


class CacheError(RuntimeFault):
    """Raised if an archive of cache entries cannot be read or written."""


class Range(msgspec.Struct, frozen=True):
    """The declared range of a variable. If `upper` is None, the range is unbounded; if `upper` is text, it is an expression of other
    variables."""

    lower: int
    upper: int | str | None
    multiple_of: Annotated[int, Meta(ge=1)]

    def covers(self, other: Range) -> bool:
        """Return whether an executable for this range also serves the other range: the bounds of `other` are within the bounds of this
        range, and its `multiple_of` is a multiple of this range's. An upper bound that is an expression covers only an equal expression,
        and only an equal expression covers it, because an executable checks only the expressions with which it was compiled."""
        above = self.upper == other.upper or (self.upper is None and isinstance(other.upper, int))
        if isinstance(self.upper, int) and isinstance(other.upper, int):
            above = other.upper <= self.upper
        return self.lower <= other.lower and above and other.multiple_of % self.multiple_of == 0


@dataclass(frozen=True, slots=True)
class Key:
    """The key of an executable (signature.py), and the ranges that a caller requests."""

    digest: str
    program: str  # digest of everything in the key except the target, so it is equal for all targets
    ranges: dict[str, dict[str, Range]]  # graph function -> canonical name of the variable ("n0", "n1", ...) -> range


# --- the folder --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """An executable in the folder, and what its sidecar states."""

    path: Path
    key: str
    ranges: dict[str, dict[str, Range]]
    num_bytes: int
    used_s: float  # time of the last use, in seconds since 1970: when the file was written, or when a look-up last found it

    def covers(self, key: Key) -> bool:
        """Return whether the entry has the functions and the variables of the key, and all its ranges cover those of the key."""
        return self.ranges.keys() == key.ranges.keys() and all(
            mine.keys() == key.ranges[name].keys() and all(r.covers(key.ranges[name][v]) for v, r in mine.items())
            for name, mine in self.ranges.items()
        )

    @property
    def breadth(self) -> float:
        """The sum of the upper bounds of all ranges; infinite if a range is unbounded, or if its upper bound is an expression. `find`
        prefers the entry with the smallest sum."""
        uppers = [r.upper for ranges in self.ranges.values() for r in ranges.values()]
        return sum(u if isinstance(u, int) else float("inf") for u in uppers)


class Cache:
    """The executables in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: Key) -> Executable | None:
        """Return an executable that covers the key, with its checks narrowed to the ranges of the key. Return None if there is none, or if
        the key of the seals cannot be read. An executable that is damaged, is sealed with another key or has another format counts as
        absent, and is removed so that it is built again. An entry is skipped but not removed if its executable cannot be read, or if its
        sidecar is malformed or cannot be read. Raise UnsafeCache if another user can write to the folder, or can read or change the key of
        the seals."""
        require_private(self.folder)
        found = sorted((e for e in self.entries(key.digest) if e.covers(key)), key=lambda e: e.breadth)
        try:
            seals = key_of(self.folder) if found else b""
        except OSError as error:  # the key belongs to another user, or is missing from a read-only folder
            log.warning("the cache %s is not used: its key cannot be read: %s", self.folder, error)
            return None
        for entry in found:
            try:
                executable = load(entry, seals)
            except RuntimeFault as fault:
                log.warning("%s; it is removed, and the program compiled again", fault)
                with suppress(OSError):  # the folder may be read-only
                    self.remove(entry)
                continue
            except OSError as error:  # another process removed the file, or this process may not read it
                say(1, f"cache: {error}")
                continue
            with suppress(OSError):  # the folder may be read-only
                os.utime(entry.path)
            say(1, f"cache: hit {entry.path.name}, {entry.num_bytes:,} bytes")
            return narrowed(executable, key.ranges)
        say(1, f"cache: no entry of {self.folder} covers {key.digest}")
        return None

    def store(self, key: Key, executable: Executable) -> Path:
        """Write an executable and its sidecar, and return the path of the executable. An entry with the same key and ranges is replaced.
        Raise UnsafeCache if another user can write to the folder."""
        require_private(self.folder)
        make_private(self.folder)
        ranges = msgspec.json.encode(key.ranges)
        path = self.folder / f"{key.digest}-{hashlib.sha256(ranges).hexdigest()[:8]}{SUFFIX}"
        executable.save(path, ranges.decode())
        try:
            with replacing(path.with_suffix(".json"), synced=False) as file:
                file.write(ranges)
        except OSError:  # for example, the disk is full; an executable without a sidecar would take room and never be found
            if not path.with_suffix(".json").exists():  # a sidecar that exists, perhaps from another process, states the same ranges
                path.unlink(missing_ok=True)
            raise
        return path

    def entries(self, digest: str = "") -> Iterator[Entry]:
        """Yield the entries whose key begins with `digest` and whose sidecar can be read. Half-written files and files of other kinds are
        skipped."""
        for path in self.paths(digest):
            try:
                entry = _entry(path)
            except (OSError, DamagedFile) as error:
                say(1, f"cache: {error}")
                continue
            yield entry

    def paths(self, digest: str = "") -> list[Path]:
        """Return the paths of all executables whose key begins with `digest`, even of those without a sidecar."""
        return [path for path in sorted(self.folder.glob(f"{digest}*{SUFFIX}")) if path.is_file()]

    def verify(self, path: Path) -> None:
        """Read one executable and its sidecar completely. Raise a RuntimeFault or an OSError if one of them is damaged or cannot be read,
        or if the executable is sealed with another key."""
        load(_entry(path), key_of(self.folder))

    def export(self, archive: Path, entries: Iterable[Entry]) -> None:
        """Write the entries to one file, which another machine of the same kind can import if it has the same key of seals. A file that
        exists under this name is replaced when the new one is complete. It is overwritten in place if it is something else than a regular
        file, such as a device, or if no file can be created in its folder. Raise CacheError if the file cannot be written."""
        place = Path(os.path.realpath(archive))  # keeps a link, and writes its target; Path.resolve raises RuntimeError for a circular link
        is_written_over = place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK | os.X_OK))
        try:
            remove_abandoned(place)
            with (
                place.open("wb") if is_written_over else replacing(place, ORDINARY, synced=False) as file,
                tarfile.open(fileobj=file, mode="w", dereference=True) as tar,  # stores files in place of links, which the import refuses
            ):
                for entry in entries:
                    for path in (entry.path, entry.path.with_suffix(".json")):
                        tar.add(path, path.name)
        except OSError as error:
            raise CacheError(f"{archive} cannot be written: {error.strerror}; name a file in a writable folder with free space") from None

    def load_archive(self, archive: Path) -> list[Entry]:
        """Import the entries that `export` wrote, and return them. All entries are verified before any is imported. An entry of the folder
        with the same name is replaced. Entries must be sealed with the key of this folder, because they are machine code. Raise CacheError
        if an entry is damaged, has no sidecar, is sealed with another key or has another format, or if the archive cannot be read or has
        other files."""
        try:
            return self._taken(archive)
        except OSError as error:
            raise CacheError(
                f"{archive} cannot be imported into {self.folder}: {error.strerror or error}; remove the cause or name another file"
            ) from error

    def _taken(self, archive: Path) -> list[Entry]:
        """Import the entries of an archive as `load_archive` says. Raise OSError if a file cannot be read or written."""
        require_private(self.folder)
        make_private(self.folder)
        with OwnFolder(self.folder, ".import-") as scratch:
            arrived = Cache(scratch.path)
            try:
                with tarfile.open(archive, "r:") as tar:
                    for member in tar:
                        path = Path(member.name)
                        is_entry = path.suffix in (SUFFIX, ".json") and _NAME.fullmatch(member.name.removesuffix(path.suffix))
                        content = tar.extractfile(member) if member.isreg() and is_entry else None  # a link may lack its target
                        if content is None:
                            raise CacheError(f"{archive} holds {member.name!r}; expected only files that `cache export` writes")
                        (arrived.folder / path).touch(mode=0o600)
                        (arrived.folder / path).write_bytes(content.read())
            except (tarfile.TarError, OverflowError, MemoryError) as error:  # OverflowError, MemoryError: a size in the archive is damaged
                cause = str(error) or "a size in it is damaged"
                raise CacheError(f"{archive} is not an archive of cache entries ({cause}); write one with `cache export`") from None
            paths, seals = arrived.paths(), key_of(self.folder)
            for path in paths:
                try:
                    load(_entry(path), seals)
                except DamagedFile as fault:
                    raise CacheError(
                        f"{archive} holds {fault.path.name}, which is damaged or sealed with another key ({fault.problem}); set "
                        "RELAXSERVE_CACHE_KEY_FILE to the same key for the export and the import"
                    ) from fault
                except IncompatibleExecutable as fault:
                    raise CacheError(
                        f"{archive} holds {path.name}, which another version of relaxserve wrote; export and import with the same version"
                    ) from fault
            for path in paths:
                os.replace(path.with_suffix(".json"), self.folder / path.with_suffix(".json").name)
                os.replace(path, self.folder / path.name)
            names = {path.name for path in paths}
        return [e for e in self.entries() if e.path.name in names]

    def remove(self, entry: Entry) -> None:
        entry.path.unlink(missing_ok=True)
        entry.path.with_suffix(".json").unlink(missing_ok=True)


# --- ranges of sidecars and executables ----------------------------------------------------------------------------------


def load(entry: Entry, key: bytes) -> Executable:
    """Load the executable of an entry. Raise DamagedFile unless the file is whole, is sealed with `key`, and checks the ranges that the
    sidecar states. An upper bound that is an expression is not compared, but the seal covers its text in the sidecar. Raise
    IncompatibleExecutable if the file has another format."""
    executable = Executable.load(entry.path, msgspec.json.encode(entry.ranges).decode(), key)
    for name, ranges in entry.ranges.items():
        function = executable.meta.functions.get(name)
        if function is None or len(function.variables) != len(ranges):
            raise DamagedFile(entry.path, "sidecar", f"it states {len(ranges)} ranges of {name!r}; the executable has other variables")
        for (variable, stated), slot in zip(ranges.items(), function.variables, strict=True):
            if slot is not None and not _states(stated, _bound(function, slot)):
                raise DamagedFile(
                    entry.path,
                    "sidecar",
                    f"it states {stated} for {variable} of {name!r}, but the executable checks {_bound(function, slot)}",
                )
    return executable


def narrowed(executable: Executable, ranges: dict[str, dict[str, Range]]) -> Executable:
    """Return the executable with its checks narrowed to these ranges. The ranges of the executable must cover them."""
    functions = dict(executable.meta.functions)
    for name, asked in ranges.items():
        functions[name] = _narrowed(functions[name], list(asked.values()))
    return replace(executable, meta=msgspec.structs.replace(executable.meta, functions=functions))


def _narrowed(function: VMFunction, asked: list[Range]) -> VMFunction:
    bounds = {bound.slot: bound for bound in function.bounds}
    for slot, wanted in zip(function.variables, asked, strict=True):
        if slot is not None and not _states(wanted, bound := _bound(function, slot)):
            upper = bound.upper if isinstance(wanted.upper, str) else wanted.upper
            bounds[slot] = Bound(bound.name, slot, wanted.lower, upper, wanted.multiple_of)
    return msgspec.structs.replace(function, bounds=tuple(bounds.values()))


def _bound(function: VMFunction, slot: int) -> Bound:
    """Return the bound that the executable checks for a variable. A variable without a declared bound may be 0 or any positive integer."""
    return next((bound for bound in function.bounds if bound.slot == slot), Bound(function.slots[slot], slot))


def _states(range_: Range, bound: Bound) -> bool:
    """Return whether the sidecar's range equals the bound that the executable checks. An upper bound that is an expression is not compared,
    because the executable stores only the slot (in the shape heap) of the expression's value."""
    same_upper = isinstance(bound.upper, Slot) if isinstance(range_.upper, str) else bound.upper == range_.upper
    return same_upper and (bound.lower, bound.multiple_of) == (range_.lower, range_.multiple_of)


def _entry(path: Path) -> Entry:
    """Return the entry of an executable. Raise DamagedFile or OSError as `_sidecar` does."""
    ranges, status = _sidecar(path), path.stat()
    return Entry(path, path.stem.split("-")[0], ranges, status.st_size, status.st_mtime)


def _sidecar(path: Path) -> dict[str, dict[str, Range]]:
    """Read the ranges that the sidecar of an executable states. Raise DamagedFile if the sidecar is missing, too large or malformed, and
    OSError if it cannot be read."""
    file = path.with_suffix(".json")
    if not file.is_file():
        raise DamagedFile(file, "sidecar", "it is missing or not a regular file")
    if (size := file.stat().st_size) > MAX_SIDECAR_BYTES:
        raise DamagedFile(file, "sidecar", f"it has {size} bytes; at most {MAX_SIDECAR_BYTES} are read")
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Range]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(file, "sidecar", str(error)) from error
