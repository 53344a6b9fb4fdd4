"""Executables on disk, found by what they were made from.

Entries of one key (signature.py) differ in their ranges alone. A look-up hits when the ranges of an entry cover those that are asked for:
an executable that was planned for 4096 tokens serves 2048 as well. The smallest plan that covers is taken. Nothing here knows programs, so
a server can look after the folder without a compiler.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from compiler.report import say
from runtime.errors import RuntimeFault
from runtime.executable import Executable

SUFFIX = ".rsx"
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}")


class CacheError(RuntimeFault):
    """An archive that cannot be taken in."""


class Range(msgspec.Struct, frozen=True):
    """A declared range; `upper` None is unbounded, text is an expression of other variables."""

    lower: int
    upper: int | str | None
    multiple_of: int

    def covers(self, other: Range) -> bool:
        above = self.upper is None or self.upper == other.upper
        if isinstance(self.upper, int) and isinstance(other.upper, int):
            above = other.upper <= self.upper
        return self.lower <= other.lower and above and other.multiple_of % self.multiple_of == 0


@dataclass(frozen=True, slots=True)
class Key:
    digest: str
    ranges: dict[str, dict[str, Range]]  # entry point -> variable, by its number in the signature -> range


# --- the folder --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    path: Path
    key: str
    ranges: dict[str, dict[str, Range]]
    num_bytes: int
    used_s: float  # time of the last use

    def covers(self, key: Key) -> bool:
        return self.ranges.keys() == key.ranges.keys() and all(
            mine.keys() == key.ranges[name].keys() and all(r.covers(key.ranges[name][v]) for v, r in mine.items())
            for name, mine in self.ranges.items()
        )

    @property
    def breadth(self) -> float:
        """How much the plan allows for: the sum of the upper bounds."""
        uppers = [r.upper for ranges in self.ranges.values() for r in ranges.values()]
        return sum(u if isinstance(u, int) else float("inf") for u in uppers)


class Cache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: Key) -> Executable | None:
        """The executable, or None. A damaged file counts as absent, and is removed so that it is built again."""
        found = sorted((e for e in self.entries(key.digest) if e.covers(key)), key=lambda e: e.breadth)
        for entry in found:
            try:
                executable = Executable.load(entry.path, verify_constants=False)
            except RuntimeFault as fault:
                say(1, f"cache: {fault}")
                self.remove(entry)
                continue
            except OSError as error:  # another process removed it, or keeps it for itself
                say(1, f"cache: {error}")
                continue
            with suppress(OSError):  # of a folder that may only be read
                os.utime(entry.path)
            say(1, f"cache: hit {entry.path.name}, {entry.num_bytes:,} bytes")
            return executable
        say(1, f"cache: no entry of {self.folder} covers {key.digest}")
        return None

    def store(self, key: Key, executable: Executable) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        ranges = msgspec.json.encode(key.ranges)
        path = self.folder / f"{key.digest}-{hashlib.sha256(ranges).hexdigest()[:8]}{SUFFIX}"
        executable.save(path)
        path.with_suffix(".json").write_bytes(ranges)
        return path

    def entries(self, digest: str = "") -> Iterator[Entry]:
        for path in sorted(self.folder.glob(f"{digest}*{SUFFIX}")):
            try:
                ranges = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=dict[str, dict[str, Range]])
                status = path.stat()
            except (OSError, msgspec.MsgspecError):
                continue  # half-written or foreign: never a hit
            yield Entry(path, path.stem.split("-")[0], ranges, status.st_size, status.st_mtime)

    def export(self, archive: Path, entries: Iterable[Entry]) -> None:
        """Write the entries to one file, which another machine of the same kind can import."""
        try:
            with tarfile.open(archive, "w") as tar:
                for entry in entries:
                    for path in (entry.path, entry.path.with_suffix(".json")):
                        tar.add(path, path.name)
        except OSError as error:
            raise CacheError(f"{archive} cannot be written: {error.strerror}; name a file in a folder with room") from None

    def load_archive(self, archive: Path) -> list[Entry]:
        """Take in what `export` wrote. Everything is verified before anything is taken."""
        try:
            return self._taken(archive)
        except OSError as error:
            raise CacheError(
                f"{archive} cannot be taken into {self.folder}: {error.strerror or error}; mend that, or name another"
            ) from error

    def _taken(self, archive: Path) -> list[Entry]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".import-") as scratch:
            arrived = Cache(Path(scratch))
            try:
                with tarfile.open(archive, "r:") as tar:
                    for member in tar:
                        path, content = Path(member.name), tar.extractfile(member)
                        if (
                            content is None
                            or path.suffix not in (SUFFIX, ".json")
                            or not _NAME.fullmatch(member.name.removesuffix(path.suffix))
                        ):
                            raise CacheError(f"{archive} holds {member.name!r}; expected only what `cache export` writes")
                        (arrived.folder / path).write_bytes(content.read())
            except tarfile.TarError as error:
                raise CacheError(f"{archive} is no archive of a cache ({error}); write one with `cache export`") from None
            entries = list(arrived.entries())
            for entry in entries:
                Executable.load(entry.path)
            for entry in entries:
                os.replace(entry.path.with_suffix(".json"), self.folder / entry.path.with_suffix(".json").name)
                os.replace(entry.path, self.folder / entry.path.name)
            names = {e.path.name for e in entries}
        return [e for e in self.entries() if e.path.name in names]

    def remove(self, entry: Entry) -> None:
        entry.path.unlink(missing_ok=True)
        entry.path.with_suffix(".json").unlink(missing_ok=True)
