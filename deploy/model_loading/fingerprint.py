"""The fingerprint of a loaded model: a digest of its program, of the contents of its files, of their names in a folder, of its numeric
class, and of the settings with which the load quantised it to a number of bits. Models with equal fingerprints compute the same bytes, on
any machine.

The digest of the files is stored in the cache, because computing it reads all of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from deploy.cache import keep
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.files import ModelFiles
from deploy.model_loading.locate import CT2
from runtime.files import entries_of
from runtime.sealed import recall
from runtime.split_files import parts_of

PIECE_BYTES = 64 << 20  # bytes that a thread digests at a time
SMALL_PIECE_BYTES = 2 << 20  # the same for files other than weights; small, so that threads share a large tokenizer.json
CHUNK_BYTES = 1 << 20
WEIGHTS = ".safetensors"
SUFFIXES = (WEIGHTS, ".json", ".jinja", ".model", ".txt")  # suffixes of the files in a folder that affect what a model answers


def fingerprint_of(known: Compiled) -> str:
    """Return the fingerprint of a loaded model: "fp_" and 16 hexadecimal digits."""
    parts = known.identity, known.numeric_class, _digest_of(known), known.quantised_by
    return f"fp_{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]}"


def _digest_of(known: Compiled) -> str:
    """Return the digest of the model's files: from the cache if the files are unchanged, otherwise computed now and stored there."""
    if known.cache is None:
        return content_digest(known.files.path)
    place = known.cache.digest_of(_state_of(known.files))
    if (known_before := recall(place)) is not None:
        return known_before.decode()
    found = content_digest(known.files.path)
    keep(place, found.encode(), "the digest of the model's files")
    return found


def _state_of(files: ModelFiles) -> str:
    """Return a text that changes when one of the model's files changes. Of the weights, only samples, sizes and times are read. The files
    beside them are read whole, because in images of containers all files may have one time, and a change may keep their sizes."""
    found = _files(files.path)
    weights = [file for file in found if files.path.is_file() or file.suffix == WEIGHTS or file.name == CT2]
    states = [(file.name, status.st_size, status.st_mtime_ns) for file in weights for status in (file.stat(),)]
    beside = _digest_of_files(files.path, [file for file in found if file not in weights], SMALL_PIECE_BYTES)
    return f"{files.weights.digest()} {states} {beside}"


def content_digest(path: Path) -> str:
    """Return a digest of a GGUF file with its parts, or of the files in a folder that affect what the model answers, and of their names."""
    return _digest_of_files(path, _files(path), PIECE_BYTES)


def _digest_of_files(path: Path, files: Sequence[Path], piece_bytes: int) -> str:
    """Return a digest of some files of the model at `path`. Threads digest pieces of the files; the result is the digest of the pieces'
    digests."""
    names = [] if path.is_file() else [str(file.relative_to(path)) for file in files]
    pieces = [piece for file in files for piece in _pieces(file, piece_bytes)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return hashlib.sha256("\0".join(names).encode(errors="surrogateescape") + b"".join(pool.map(_digest_of_piece, pieces))).hexdigest()


def _files(path: Path) -> list[Path]:
    """Return the files that a digest covers: the parts of a GGUF file, or the files of a folder and its direct subfolders that affect what
    the model answers. Leave out a subfolder that this user may not read. Raise OSError if another folder cannot be read."""
    if path.is_file():
        return [path.with_name(name) for name in parts_of(path.name)]
    found = entries_of(path)
    for folder in [entry for entry in found if entry.is_dir()]:
        with suppress(PermissionError):
            found += entries_of(folder)
    return sorted(file for file in found if (file.suffix in SUFFIXES or file.name == CT2) and file.is_file())


def _pieces(file: Path, piece_bytes: int) -> Iterator[tuple[Path, int, int]]:
    yield from ((file, start, piece_bytes) for start in range(0, max(1, file.stat().st_size), piece_bytes))


def _digest_of_piece(piece: tuple[Path, int, int]) -> bytes:
    """Return the digest of a piece of a file, given the path, the first byte, and the number of bytes. The file may end before."""
    path, start, left = piece
    digest, chunk = hashlib.sha256(), bytearray(CHUNK_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        while left and (count := file.readinto(chunk)):
            digest.update(memoryview(chunk)[:count])
            left -= count
    return digest.digest()
