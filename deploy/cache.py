"""The folder of files that are stored between starts: compiled programs, packed weights, and other files that take long to make or to
download.

    executables/KEY-RANGES.rsx, .json   a compiled program, and the ranges that its plan covers (compiler/cache.py)
    executables/KEY-THREADS.costs       times of the program's steps with this number of threads (deploy/model_loading/costs.py)
    executables/KEY-CODE.cubin          GPU code of the program, assembled by the driver (runtime/device/cuda/assembled.py)
    executables/KEY.models              sources that were loaded with the program, one per line
    weights/KEY-CHECKPOINT.rsw          weights of one checkpoint, packed for all programs with this key (compiler/bind.py)

    weights/KEY-CHECKPOINT.rsw.used-*   markers of processes that use the weights (deploy/use.py)

    weights/CHECKPOINT.digest           digest of a model's files, for its fingerprint (deploy/model_loading/fingerprint.py)

    quantised/KEY.rsq                   matrices of one checkpoint, quantised to an average number of bits, with one text that shows
                                        which weights matter (deploy/quantizing/kept.py)

    labels/KEY.label                    quality label of a form (deploy/quality/label.py)
    labels/KEY.exact                    predictions of a model's exact weights, with which those of its forms are compared
                                        (deploy/quality/measure.py)

    tokenizers/KEY.tokenizer            tokenizer files made from a GGUF file (deploy/model_loading/made_tokenizer.py)

    kernels/KEY.code                    machine code of one kernel, for programs that have the same kernel (compiler/codegen/kept.py),
                                        or a result of LLVM that is the same at every start (runtime/remembered.py)

    exports/KEY/                        exports for browsers (deploy/export/kept.py)
    web/*                               files that running servers publish; a start removes those of a killed server
    models/*                            models from a package index (deploy/model_loading/packages.py), which `relaxserve rm` removes
    cards/KEY/                          files from which Dynamo's frontends make prompts (deploy/dynamo/card.py)
    batches/PORT/                       uploaded files and batches (server/batches/store.py)

The commands of the cache do not remove files of `web`, `models`, `cards` and `batches`.

A file is written under a temporary name and renamed when it is complete. If a load is killed, the temporary file remains as a leftover; the
next load that writes the same large file removes it. A file may be removed while servers have it mapped: the mapping stays valid, and the
next start builds the file again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from compiler.cache import SUFFIX as PROGRAM_SUFFIX
from compiler.cache import Cache
from deploy.use import markers_of
from runtime import flags, sealed
from runtime.device.cuda.assembled import SUFFIX as ASSEMBLED_SUFFIX
from runtime.errors import DamagedFile, RuntimeFault, UnsafeCache
from runtime.sealed import KEY_FILE, is_shared, key_of, make_private, require_private
from runtime.sections import SectionFile, writing
from runtime.whole_files import ABANDONED_S, replacing
from server.interfaces import CachedModel

log = logging.getLogger(__name__)

WEIGHTS_SUFFIX = ".rsw"
COSTS_SUFFIX = ".costs"
QUANTISED_SUFFIX = ".rsq"
DIGEST_SUFFIX = ".digest"
MODELS_SUFFIX = ".models"
LABEL_SUFFIX, REFERENCE_SUFFIX = ".label", ".exact"
TOKENIZER_SUFFIX = ".tokenizer"
MOST_MODELS = 8  # maximum number of sources listed per program
NOT_CACHED = "%s cannot be stored in the cache %s: %s; free space there or set RELAXSERVE_CACHE, or the next start takes as long"
_KEY = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(
    r"\.import-.+|\.[0-9a-f]{32}\.\w+|\.?[0-9a-f]{32}(-[0-9a-f]+)?\.(rsx|json|rsw|rsq|digest|costs|models|cubin|code|label|exact|tokenizer)(\..+)?"
)


class CannotRemove(RuntimeFault):
    """Raised if a file of the folder cannot be removed, for example because it belongs to another user."""


class NoKey(RuntimeFault):
    """Raised if the key with which files are sealed (runtime/sealed.py) is missing or cannot be used, so that it is unknown which files are
    damaged."""


class Part(StrEnum):
    """The kinds of files that the commands of the cache list and remove."""

    PROGRAM = "compiled programs"
    WEIGHTS = "packed weights"
    ASSEMBLED = "code assembled for GPUs"
    EXPORT = "exports for browsers"
    KERNEL = "machine code of kernels"
    QUANTISED = "quantised weights"
    DIGEST = "digests of models' files"
    LABEL = "quality labels"
    REFERENCE = "predictions of exact weights"
    TOKENIZER = "tokenizers of GGUF files"
    LEFTOVER = "leftovers of interrupted loads"


# parts that later loads can use even if no compiled program is stored
INDEPENDENT = (Part.EXPORT, Part.KERNEL, Part.QUANTISED, Part.DIGEST, Part.LABEL, Part.REFERENCE, Part.TOKENIZER)


@dataclass(frozen=True, slots=True)
class Item:
    """A file, an export's folder, or a group of files that are only removed together."""

    part: Part
    paths: tuple[Path, ...]  # the file that `verify` reads comes first
    key: str  # key of the program to which a program, weights or assembled code belong; for other parts the KEY of the name, or ""
    num_bytes: int  # bytes of the first path
    used_s: float  # time of the last use in seconds since the epoch


class Kept:
    """The cache folder: the paths of its files, and methods that list, verify and remove them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executables = Cache(folder / "executables")
        self._weights = folder / "weights"
        self._kernels = folder / "kernels"
        self._exports = folder / "exports"
        self._quantised = folder / "quantised"
        self._labels = folder / "labels"
        self._tokenizers = folder / "tokenizers"
        self._cards = folder / "cards"

    def require_private(self) -> None:
        """Raise UnsafeCache if another user owns the cache folder, or a folder within it whose files this class names, or can write to it
        (runtime/sealed.py). Folders that do not exist yet are not checked."""
        within = self._weights, self._kernels, self._exports, self._quantised, self._labels, self._tokenizers, self._cards
        for folder in (self.folder, self.executables.folder, *within):
            require_private(folder)

    def require_keys(self) -> None:
        """Raise UnsafeCache if the key of the files that every load writes can be read or changed by others, or has a wrong length. Raise
        DamagedFile if the file with the key is not a regular file. No key is made."""
        for folder in (self.executables.folder, self._weights):
            with suppress(OSError):  # loads continue without the cache
                if is_shared() or (folder / KEY_FILE).exists():
                    key_of(folder)

    def weights_of(self, key: str, digest: str) -> Path:
        """Return the path of the packed weights of one program and one checkpoint."""
        return self._weights / f"{key}-{digest[:32]}{WEIGHTS_SUFFIX}"

    def quantised_of(self, digest: str) -> Path:
        """Return the path of one checkpoint's matrices, quantised with one budget of bits and one text that shows which weights matter."""
        return self._quantised / f"{digest}{QUANTISED_SUFFIX}"

    def label_of(self, key: str) -> Path:
        """Return the path of the quality label of one form, that is a model with a format of its weights, keys and values."""
        return self._labels / f"{key}{LABEL_SUFFIX}"

    def reference_of(self, key: str) -> Path:
        """Return the path of the predictions of one model's exact weights."""
        return self._labels / f"{key}{REFERENCE_SUFFIX}"

    def tokenizer_of(self, key: str) -> Path:
        """Return the path of the tokenizer files made from one GGUF file."""
        return self._tokenizers / f"{key}{TOKENIZER_SUFFIX}"

    def digest_of(self, identity: str) -> Path:
        """Return the path of the digest of one checkpoint's files. `identity` is a text that changes when the files change
        (deploy/model_loading/fingerprint.py)."""
        return self._weights / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}{DIGEST_SUFFIX}"

    def costs_of(self, key: str, num_threads: int) -> Path:
        """Return the path of the step times of a program that were measured with this number of threads."""
        return self.executables.folder / f"{key}-{num_threads:x}{COSTS_SUFFIX}"

    def assembled_of(self, key: str) -> Path:
        """Return the common path prefix of the files with a program's assembled code."""
        return self.executables.folder / key

    def export_of(self, key: str) -> Path:
        """Return the folder with the files of an export."""
        return self._exports / key

    def card_of(self, key: str) -> Path:
        """Return the folder with the files for the prompts of one model."""
        return self._cards / key

    def models_of(self, key: str) -> list[str]:
        """Return the sources that were last loaded with a program, at most MOST_MODELS, most recent first. Return [] if the list cannot be
        read."""
        try:
            return self._models_file(key).read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return []

    def remember_model(self, key: str, source: str) -> None:
        """Move a source to the front of the list of sources loaded with a program. The list keeps MOST_MODELS sources. If loads run
        concurrently, a source may be lost; `cache ls` then does not show it. If the list cannot be written, do nothing."""
        known = self.models_of(key)
        if known[:1] != [source]:
            sources = [source, *(other for other in known if other != source)][:MOST_MODELS]
            with suppress(OSError), replacing(self._models_file(key), synced=False) as file:  # in a read-only folder there is no list
                file.write(("\n".join(sources) + "\n").encode())

    def has_loaded(self, source: str) -> bool:
        """Return whether a source is listed for a program, and packed weights for this program are stored, maybe those of another
        source."""
        keys = [file.stem for file in self.executables.folder.glob(f"*{MODELS_SUFFIX}") if source in self.models_of(file.stem)]
        return any(next(self._weights.glob(f"{key}-*{WEIGHTS_SUFFIX}"), None) is not None for key in keys)

    def _models_file(self, key: str) -> Path:
        return self.executables.folder / f"{key}{MODELS_SUFFIX}"

    def items(self) -> list[Item]:
        """List all items that `prune` and `clear` may remove. The time of a program's last use is that of its weights if they were used
        later, because a start reads both."""
        weights = list(self._packed())
        programs = list(self._programs())
        for number, program in enumerate(programs):
            used = (w.used_s for w in weights if w.key == program.key)
            programs[number] = replace(program, used_s=max((program.used_s, *used)))
        assembled = list(self._assembled())
        found = [*programs, *weights, *assembled, *self._kept_kernels(), *self._exported(), *self._kept_matrices(), *self._digests()]
        found += [*self._kept_labels(), *self._references(), *self._kept_tokenizers()]
        return [*found, *self._leftovers({path for item in found for path in item.paths})]

    def prune(self, *, keep_bytes: int | None = None, keep_s: float = 0.0, dry_run: bool = False) -> list[Item]:
        """Remove files that cannot be used any more: weights and assembled code without a program, and leftovers. With `keep_bytes`, also
        remove the least recently used items until the remaining ones have at most so many bytes, except items used in the last `keep_s`
        seconds. Return the removed items. With `dry_run`, remove nothing, and return the items that would be removed. Raise CannotRemove if
        an item cannot be removed; the other items are removed nevertheless."""
        items = self.items()
        keys = {item.key for item in items if item.part is Part.PROGRAM}
        going = [item for item in items if item.part not in INDEPENDENT and (item.part is Part.LEFTOVER or item.key not in keys)]
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
        """Read completely every file that has checksums or a seal, and every export. Yield its path and a description of the damage, which
        is empty if the file is undamaged. Skip files that another process removes meanwhile. Raise NoKey, before any file is read, if the
        key of one of the folders is missing or cannot be used."""
        programs = self.executables.paths()
        in_sections = [item.paths[0] for item in (*self._packed(), *self._kept_matrices(), *self._references())]
        others = (*self._assembled(), *self._kept_kernels(), *self._digests(), *self._kept_labels(), *self._kept_tokenizers())
        in_one_piece = [item.paths[0] for item in others]
        for folder in dict.fromkeys(path.parent for path in (*programs, *in_sections, *in_one_piece)):
            _require_key(folder)
        checks: list[tuple[Path, Callable[[], object]]] = [(path, partial(self.executables.verify, path)) for path in programs]
        checks += [(path, partial(_verify_sections, path)) for path in in_sections]
        checks += [(path, partial(sealed.load, path)) for path in in_one_piece]
        checks += [(item.paths[0], partial(_verify_export, item.paths[0])) for item in self._exported()]
        for path, check in checks:
            fault = _fault(check)
            if not fault or os.path.lexists(path):  # otherwise another process has removed it meanwhile
                yield path, fault

    def remove(self, path: Path) -> None:
        """Remove one file or one export's folder. If it is a program, also remove the JSON file with its ranges. Raise CannotRemove if a
        file cannot be removed."""
        beside = (path.with_suffix(".json"),) if path.suffix == PROGRAM_SUFFIX else ()
        _remove([Item(Part.LEFTOVER, (path, *beside), "", 0, 0.0)])

    # --- programs by signature, for /admin/cache -------------------------------------------------------------------------------

    def entries(self) -> list[CachedModel]:
        """List the compiled programs."""
        return [CachedModel(entry.key, entry.num_bytes, entry.used_s) for entry in self.executables.entries()]

    def clear(self, *, keep: frozenset[str]) -> int:
        """Remove the programs whose key is not in `keep`, with their weights and assembled code, and the leftovers. Return the number of
        bytes freed. Raise CannotRemove if an item cannot be removed."""
        unused = [item for item in self.items() if item.part not in INDEPENDENT and item.key not in keep]
        _remove(unused)
        return sum(item.num_bytes for item in unused)

    # --- contents of the folder --------------------------------------------------------------------------------------------

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

    def _files(self, part: Part, folder: Path, suffix: str) -> Iterator[Item]:
        """Yield an item for each file of ours in a folder whose name ends in `suffix`. Such files are removed one by one."""
        for path in sorted(folder.glob(f"*{suffix}")):
            if _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield Item(part, (path,), path.stem.split("-")[0], status.st_size, status.st_mtime)

    def _assembled(self) -> Iterator[Item]:
        return self._files(Part.ASSEMBLED, self.executables.folder, ASSEMBLED_SUFFIX)

    def _kept_kernels(self) -> Iterator[Item]:
        return self._files(Part.KERNEL, self._kernels, ".code")

    def _kept_matrices(self) -> Iterator[Item]:
        return self._files(Part.QUANTISED, self._quantised, QUANTISED_SUFFIX)

    def _digests(self) -> Iterator[Item]:
        return self._files(Part.DIGEST, self._weights, DIGEST_SUFFIX)

    def _kept_labels(self) -> Iterator[Item]:
        return self._files(Part.LABEL, self._labels, LABEL_SUFFIX)

    def _references(self) -> Iterator[Item]:
        return self._files(Part.REFERENCE, self._labels, REFERENCE_SUFFIX)

    def _kept_tokenizers(self) -> Iterator[Item]:
        return self._files(Part.TOKENIZER, self._tokenizers, TOKENIZER_SUFFIX)

    def _exported(self) -> Iterator[Item]:
        for path in sorted(self._exports.glob("*")):
            if _KEY.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    yield Item(Part.EXPORT, (path,), path.name, _num_bytes(path), path.stat().st_mtime)

    def _leftovers(self, of_items: set[Path]) -> Iterator[Item]:
        """Yield the files with names of ours that belong to no item (`of_items` has the paths of all items), and have not changed for
        ABANDONED_S seconds. They are temporary files of interrupted loads, and files that belonged to a program and were not removed with
        it."""
        now = time.time()
        for path in (
            *self.executables.folder.glob("*"),
            *self._weights.glob("*"),
            *self._kernels.glob("*"),
            *self._quantised.glob("*"),
            *self._labels.glob("*"),
            *self._tokenizers.glob("*"),
            *self._exports.glob(".*"),
        ):
            if path not in of_items and _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if now - status.st_mtime > ABANDONED_S:
                        yield Item(Part.LEFTOVER, (path,), "", _num_bytes(path), status.st_mtime)


def keep(place: Path, content: bytes, what: str) -> None:
    """Write a sealed file into the cache, or log that `what` is not stored if the file cannot be written."""
    try:
        sealed.store(place, content)
    except OSError as error:
        log.warning(NOT_CACHED, what, place.parent, error.strerror or error)


def keep_sections(place: Path, sections: Mapping[str, memoryview], what: str) -> None:
    """Write a file of sections into the cache, or log that `what` is not stored if the file cannot be written."""
    try:
        make_private(place.parent)
        with writing(place, {name: content.nbytes for name, content in sections.items()}, key_of(place.parent)) as put:
            for name, content in sections.items():
                put(name, content)
    except OSError as error:
        log.warning(NOT_CACHED, what, place.parent, error.strerror or error)


def kept() -> Kept | None:
    """Return the cache of this process, or None if RELAXSERVE_NO_CACHE disables it. Raise UnsafeCache if another user can write to it."""
    switches = flags.current()
    if switches.no_cache:
        return None
    cache = Kept(switches.cache)
    cache.require_private()
    return cache


class _Shard(msgspec.Struct):
    file: str
    sha256: str


class _Level(msgspec.Struct):
    shards: list[_Shard]


class _Program(msgspec.Struct):
    """The parts of program.json that name files with weights, and state their digests (deploy/export/web.py)."""

    levels: list[_Level]


def _verify_sections(path: Path) -> None:
    SectionFile(path, key_of(path.parent)).verify()


def _verify_export(folder: Path) -> None:
    """Raise RuntimeFault if program.json is damaged, or if the digest of a file with weights is not the one that program.json states. Raise
    OSError if a file is missing."""
    try:
        levels = msgspec.json.decode((folder / "program.json").read_bytes(), type=_Program).levels
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RuntimeFault(f"program.json is damaged: {error}") from error
    for shard in (shard for level in levels for shard in level.shards):
        if "\0" in shard.file:
            raise RuntimeFault("program.json is damaged: the name of a file has a zero byte")
        with (folder / shard.file).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise RuntimeFault(f"{shard.file} is damaged: its SHA-256 is not that of program.json")


def _require_key(folder: Path) -> None:
    """Raise NoKey if the key of a folder's files is missing or cannot be used. Check first that the key exists: `key_of` would otherwise
    make a new key, which fits no seal."""
    try:
        if not is_shared():
            (folder / KEY_FILE).lstat()
        key_of(folder)
    except (OSError, UnsafeCache, DamagedFile) as error:
        raise NoKey(
            f"the key of {folder} cannot be used: {error}; set RELAXSERVE_CACHE_KEY_FILE to the key of the servers that share the cache, "
            f"or remove the files in {folder}, which are built again"
        ) from error


def _fault(verify: Callable[[], object]) -> str:
    """Return the fault with which a verification ends, in words, or "" if it ends without one."""
    try:
        verify()
    except (RuntimeFault, OSError) as fault:
        return str(fault)
    return ""


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _remove(items: Sequence[Item]) -> None:
    """Remove the files and folders of all items. Paths that do not exist are skipped. Raise CannotRemove if one of them cannot be removed;
    the others are removed nevertheless."""
    refused: CannotRemove | None = None
    for path in (path for item in items for path in item.paths):
        try:
            if path.is_dir():
                _remove_folder(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            found = CannotRemove(f"{path} cannot be removed: {error.strerror}; remove it as the user that owns the folder")
            found.__cause__ = error
            refused = refused or found
    if refused is not None:
        raise refused


def _remove_folder(path: Path) -> None:
    """Remove a folder. An export first gets the name of a leftover, because an interrupt would otherwise leave an export that lacks some of
    its files."""
    if _KEY.fullmatch(path.name):
        path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}"))  # a disk may be too full to make a new folder
    shutil.rmtree(path)
