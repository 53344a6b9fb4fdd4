"""Executables on disk, found by what they were made from.

The key is a digest over one struct: the program with the declared ranges of its variables left out, the target, the compiler's version
and the options. Entries of one key differ in their ranges alone. A look-up hits when the ranges of an entry cover those that are asked
for: an executable that was planned for 4096 tokens serves 2048 as well. The smallest plan that covers is taken.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from compiler.ir.dims import Dim, DimVar
from compiler.ir.equal import structural_hash
from compiler.ir.module import IRModule
from compiler.ir.types import substitute, vars_of
from runtime.errors import RuntimeFault
from runtime.executable import Executable

VERSION = "0.1.0"
SUFFIX = ".rsx"


class Range(msgspec.Struct, frozen=True):
    """A declared range; `upper` None is unbounded."""

    lower: int
    upper: int | None
    multiple_of: int

    def covers(self, other: Range) -> bool:
        above = self.upper is None or (other.upper is not None and other.upper <= self.upper)
        return self.lower <= other.lower and above and other.multiple_of % self.multiple_of == 0


class KeyParts(msgspec.Struct, frozen=True):
    """All that determines an executable, and nothing else."""

    program: str
    target: str
    version: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    digest: str
    ranges: dict[str, dict[str, Range]]  # entry point -> variable, by its number in the signature -> range


def key_of(module: IRModule, target: str, options: tuple[str, ...] = ()) -> Key:
    parts = KeyParts(structural_hash(module, ranges=False), target, VERSION, options)
    digest = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
    return Key(digest, {name: _ranges(signature_vars(module, name)) for name in sorted(module.graph_functions)})


def signature_vars(module: IRModule, name: str) -> tuple[DimVar, ...]:
    """The variables of an entry point in the order in which its annotations mention them: their canonical names are their numbers."""
    return tuple(dict.fromkeys(v for p in module.graph(name).params for v in vars_of(p.type)))


def signature(module: IRModule, name: str) -> str:
    """The symbolic shape signature: parameter annotations with variables renamed by number, and their ranges."""
    variables = signature_vars(module, name)
    renamed = {v: DimVar(f"n{i}", v.lower, None, v.multiple_of) for i, v in enumerate(variables)}
    params = ", ".join(str(substitute(p.type, {v: Dim.of(w) for v, w in renamed.items()})) for p in module.graph(name).params)
    ranges = ", ".join(f"{renamed[v].name} in {_text(r)}" for v, r in zip(variables, _ranges(variables).values(), strict=True))
    return f"({params}) where {ranges}" if ranges else f"({params})"


def _ranges(variables: tuple[DimVar, ...]) -> dict[str, Range]:
    uppers = [v.upper.const if isinstance(v.upper, Dim) and v.upper.is_const else v.upper for v in variables]
    return {
        f"n{i}": Range(v.lower, u if isinstance(u, int) else None, v.multiple_of)
        for i, (v, u) in enumerate(zip(variables, uppers, strict=True))
    }


def _text(r: Range) -> str:
    return f"{r.lower}..{'' if r.upper is None else r.upper}{f' by {r.multiple_of}' if r.multiple_of != 1 else ''}"


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
        return sum(float("inf") if u is None else u for u in uppers)


class Cache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: Key) -> Executable | None:
        """The executable, or None. A damaged file counts as absent, and is removed so that it is built again."""
        found = sorted((e for e in self.entries(key.digest) if e.covers(key)), key=lambda e: e.breadth)
        for entry in found:
            try:
                executable = Executable.load(entry.path, verify_constants=False)
            except RuntimeFault:
                entry.path.unlink(missing_ok=True)
                continue
            os.utime(entry.path)
            return executable
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

    def prune(self, *, keep_bytes: int = 0, keep_s: float = 0.0) -> list[Entry]:
        """Remove entries, longest unused first, until the rest fits; those used in the last `keep_s` seconds stay."""
        entries = sorted(self.entries(), key=lambda e: e.used_s)
        total, now = sum(e.num_bytes for e in entries), time.time()
        removed: list[Entry] = []
        for entry in entries:
            if total <= keep_bytes or now - entry.used_s < keep_s:
                break
            self.remove(entry)
            removed.append(entry)
            total -= entry.num_bytes
        return removed

    def remove(self, entry: Entry) -> None:
        entry.path.unlink(missing_ok=True)
        entry.path.with_suffix(".json").unlink(missing_ok=True)
