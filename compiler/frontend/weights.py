"""The tensors of a model, memory-mapped from its files and never copied as a whole.

A safetensors file has eight bytes with the length of a header, the header (JSON: name -> dtype, shape, range of bytes), and the data. The
file's origin is not trusted, so the header is checked before it is used: tensors must fill the data without gaps or overlap, and each must
have the number of bytes that its shape needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.errors import DamagedFile, ModelError, UnsafeFile, listed
from runtime.files import AGAIN, STAND_IN_BYTES, regular, stand_in
from runtime.split_files import parts_of

MAX_HEADER_BYTES = 16 << 20  # a header with names and shapes of about 100 000 tensors has this size
MAX_RANK = 8
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
DIGEST_SAMPLES = 64  # number of samples of a file's bytes that enter the file's digest
SAMPLE_BYTES = 4096

Tensor = NDArray[Any]

DOUBLE = np.dtype(np.float64)  # no program computes in this type: its values are read as f32
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": DOUBLE,
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The description of a tensor, without its bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # type of the array that `read` returns
    num_bytes: int  # size in the file


class WeightSource(Protocol):
    """Named tensors, independent of where they are stored."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """Return the tensor. It is a read-only view of the file if the file stores exactly its values, at aligned bytes."""
        ...

    def release(self, name: str) -> None:
        """Release the memory into which the tensor's bytes were read. The next access reads them from the file again."""
        ...

    def digest(self) -> str:
        """Return an identity of the files, for caches: files with equal digests are taken to be equal. A source that renames, joins or
        decodes tensors of another source has the digest of that source. To compute a digest, only the header and a few hundred kilobytes
        of each file are read."""
        ...


class Derived:
    """A source that reads its tensors from another source. Subclasses change what `read` returns."""

    def __init__(self, source: WeightSource, tensors: Mapping[str, TensorInfo]) -> None:
        self.source, self.tensors = source, tensors

    def read(self, name: str) -> Tensor:
        return self.source.read(name)

    def release(self, name: str) -> None:
        self.source.release(name)

    def digest(self) -> str:
        return self.source.digest()


# --- one mapped file ------------------------------------------------------------------------------------------------------


class MappedFile:
    """A file mapped as read-only memory. Raise DamagedFile if it cannot be opened, is empty, or contains something else in place of
    tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with regular(path).open("rb") as file:
                status = os.fstat(file.fileno())
                self.num_bytes = status.st_size
                self._modified_ns = status.st_mtime_ns
                if self.num_bytes == 0:
                    raise DamagedFile(f"{path.name} is empty; {AGAIN}")
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DamagedFile(f"{path.name} cannot be read: {error.strerror}") from error
        if found := _no_data(self.memory[:STAND_IN_BYTES], self.num_bytes):
            raise DamagedFile(f"{path.name} {found}")

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> Tensor:
        """Return a view of the file if the bytes are aligned, else a copy. The caller has checked that the bytes are within the file."""
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, dtype)
        view = np.frombuffer(self.memory, dtype, count, start).reshape(shape)
        return view if view.flags.aligned else view.copy()  # a header of odd length misaligns the data

    def release(self, start: int, num_bytes: int) -> None:
        """Release the memory pages of a range of bytes. The next access reads the bytes from the file again. Keep pages that are only
        partly within the range, since neighbouring tensors may be in use."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def add_to(self, digest: hashlib.blake2b, header_bytes: int) -> None:
        """Update the digest with the file's name, size, modification time and header, and with samples of its data. The samples distinguish
        files that have all else in common. Then release the memory of the whole file."""
        digest.update(f"{self.path.name}\0{self.num_bytes}\0{self._modified_ns}\0".encode())
        digest.update(self.memory[:header_bytes])
        span = self.num_bytes - header_bytes
        for sample in range(DIGEST_SAMPLES):
            start = header_bytes + span * sample // DIGEST_SAMPLES
            digest.update(self.memory[start : start + SAMPLE_BYTES])
        self.release(0, self.num_bytes)  # a header with a vocabulary may have 12 MB; if weights are cached, most loads read nothing else


def _no_data(head: bytes, num_bytes: int) -> str:
    """Say what a file contains in place of tensors, or return ""."""
    if found := stand_in(head):
        return found
    if not any(head):
        return f"begins with zeros: its download was interrupted; {AGAIN}"
    if num_bytes > STAND_IN_BYTES or not head.isascii() or not all(char.isprintable() or char.isspace() for char in head.decode()):
        return ""
    return f"is a text of {num_bytes} bytes that begins with {head.decode()[:60]!r}; {AGAIN}"


# --- safetensors ------------------------------------------------------------------------------------------------------------


class Safetensors:
    """The tensors of one file, or of all shards of a model. Raise DamagedFile if a file violates the format, or if two files have a tensor
    of the same name."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: list[tuple[MappedFile, int]] = []  # each file with the start of its data
        self._places: dict[str, tuple[MappedFile, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path in paths:
            file = MappedFile(path)
            header, data_start = _read_header(file)
            self._files.append((file, data_start))
            for name, (info, start) in _check_header(header, path.name, file.num_bytes - data_start).items():
                if name in self.tensors:
                    first = self._places[name][0].path.name
                    raise DamagedFile(f"tensor {name!r} is in both {first} and {path.name}")
                self.tensors[name] = info
                self._places[name] = (file, data_start + start)

    def read(self, name: str) -> Tensor:
        file, start = self._places[name]
        info = self.tensors[name]
        if info.num_bytes == info.dtype.itemsize * math.prod(info.shape):
            return file.array(info.dtype, info.shape, start)
        # The file has more bytes than the type needs: it stores f64, which is read as f32.
        with np.errstate(over="ignore"):
            return file.array(DOUBLE, info.shape, start).astype(info.dtype)

    def release(self, name: str) -> None:
        file, start = self._places[name]
        file.release(start, self.tensors[name].num_bytes)

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for file, data_start in self._files:
            file.add_to(digest, data_start)
        return digest.hexdigest()


class BesideFolders:
    """A model's weights together with weights in subfolders. The names of a subfolder's tensors begin with the folder's name:
    `2_Dense.linear.weight`."""

    def __init__(self, whole: WeightSource, parts: Mapping[str, WeightSource]) -> None:
        self._whole, self._parts = whole, parts
        self._owners = {f"{folder}.{name}": (source, name) for folder, source in parts.items() for name in source.tensors}
        own = {name: source.tensors[inner] for name, (source, inner) in self._owners.items()}
        self.tensors: Mapping[str, TensorInfo] = {**whole.tensors, **own}

    def read(self, name: str) -> Tensor:
        source, inner = self._owners.get(name, (self._whole, name))
        return source.read(inner)

    def release(self, name: str) -> None:
        source, inner = self._owners.get(name, (self._whole, name))
        source.release(inner)

    def digest(self) -> str:
        return "-".join(source.digest() for source in (self._whole, *self._parts.values()))


class Renamed(Derived):
    """A source that renames the tensors of another one. `parts` maps parts of names to their replacements. The parts are replaced in this
    order, each at most once in a name. Raise DamagedFile if two tensors get the same name."""

    def __init__(self, source: WeightSource, parts: Mapping[str, str]) -> None:
        self._names: dict[str, str] = {}
        for own in source.tensors:
            name = own
            for part, replacement in parts.items():
                name = name.replace(part, replacement, 1)
            if name in self._names:
                raise DamagedFile(f"tensors {self._names[name]!r} and {own!r} are the same parameter")
            self._names[name] = own
        super().__init__(source, {name: source.tensors[own] for name, own in self._names.items()})

    def read(self, name: str) -> Tensor:
        return self.source.read(self._names[name])

    def release(self, name: str) -> None:
        self.source.release(self._names[name])


def open_safetensors(path: str | Path) -> Safetensors:
    """Open the weights of a file or of a model directory. Raise UnsafeFile if the weights are pickles, DamagedFile if a file violates the
    format, and ModelError if there are no weights, if some are missing, or if it is not clear which files belong together."""
    path = Path(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise _unsafe([path.name])
    if path.is_file():
        return Safetensors([path])
    if not path.is_dir():
        raise ModelError(f"{path} is neither a file nor a directory")
    if (index := path / INDEX_FILE).is_file():
        return _open_sharded(path, index)
    found = sorted(path.glob("*.safetensors"))
    whole = path / WHOLE_FILE
    if whole in found:
        return Safetensors([whole])
    if (parts := _parts(found)) is not None:
        return Safetensors(parts)
    if found:
        names = ", ".join(file.name for file in found)
        raise ModelError(f"{path} has several weight files and no {INDEX_FILE} to say which belong together: {names}")
    if pickles := sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES):
        raise _unsafe(pickles)
    raise ModelError(f"{path} has no weights; expected {WHOLE_FILE}, {INDEX_FILE} with its shards, or a .gguf file")


def _parts(found: list[Path]) -> list[Path] | None:
    """Return the parts of a model in order, or its only file. Return None if there are no files, or if the names do not say that all files
    are parts of one model. Raise ModelError if parts are missing."""
    names = {tuple(parts_of(file.name)) for file in found}
    if len(names) != 1:
        return None
    parts = [found[0].with_name(name) for name in next(iter(names))]
    if absent := [part.name for part in parts if not part.exists()]:
        raise ModelError(f"parts of the model are missing in {found[0].parent}: {listed(absent)}. Is the download complete?")
    return parts


def _unsafe(names: list[str]) -> UnsafeFile:
    return UnsafeFile(
        f"{', '.join(names[:5])}: a pickle can run code when it is opened, so it is refused. Convert it once, if you trust where it "
        "comes from, with transformers and torch: AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors"
    )


def _open_sharded(directory: Path, index: Path) -> Safetensors:
    """Open the shards that an index names, as vLLM does. If all shards are missing, open the whole file beside the index: when transformers
    overwrites shards with a whole file, it removes the shards and leaves their index. Raise ModelError if only some shards are missing, or
    if all are missing and there is no whole file. Also raise ModelError if the whole file and complete shards have different values, since
    it is not clear which are newer. Raise DamagedFile if the index is malformed, or names files elsewhere or tensors that no shard has."""
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise DamagedFile(f"{index.name} has {index.stat().st_size} bytes; at most {MAX_HEADER_BYTES} are read")
    content = _parse_object(index.read_bytes(), index.name)
    shards = content.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise DamagedFile(f"{index.name}: weight_map is not an object of file names")
    files: list[str] = sorted(set(shards.values()))
    if strange := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise DamagedFile(f"{index.name} names {strange[0]!r}, expected a .safetensors file of the same directory")
    whole = directory / WHOLE_FILE
    has_whole = WHOLE_FILE not in files and whole.is_file()
    if absent := [file for file in files if not (directory / file).is_file()]:
        if has_whole and len(absent) == len(files):
            return Safetensors([whole])
        remedy = f" If {whole.name} has the newer weights, remove {index.name} and its shards" if has_whole else ""
        raise ModelError(f"shards named by {index.name} are missing: {', '.join(absent)}. Is the download complete?{remedy}")
    source = Safetensors(directory / file for file in files)
    if absent := sorted(shards.keys() - source.tensors.keys()):
        raise DamagedFile(f"{index.name} names tensors that no shard holds: {listed(absent)}")
    if has_whole and (found := _differing(source, whole)):
        both = f"{directory} has {whole.name} and the shards that {index.name} names, with different values or types of {listed(found)}"
        raise ModelError(
            f"{both}. Load a copy of the folder without those that are out of date: {whole.name}, or {index.name} and its shards"
        )
    return source


def _differing(source: Safetensors, whole: Path) -> list[str]:
    """Return the names of the tensors that have other values or another type in the file `whole` than in `source`, judged by samples.
    Return none if `whole` is no readable safetensors file, or if one of its tensors has another shape than in `source`: with DeepSpeed, the
    Trainer of transformers left such a file without values beside the shards."""
    try:
        other = Safetensors([whole])
    except DamagedFile:
        return []
    shared = [name for name in other.tensors if name in source.tensors]
    if any(other.tensors[name].shape != source.tensors[name].shape for name in shared):
        return []
    return [name for name in shared if _samples(other, name) != _samples(source, name)]


def _samples(source: Safetensors, name: str) -> bytes:
    """Return the first and the middle bytes of a tensor, at most SAMPLE_BYTES each."""
    values = source.read(name).reshape(-1).view(np.uint8)
    found = b"".join(values[start : start + SAMPLE_BYTES].tobytes() for start in (0, values.size // 2))
    source.release(name)
    return found


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the offset at which the data begin. Raise DamagedFile if the header is longer than the file or than
    MAX_HEADER_BYTES, or is malformed."""
    name = file.path.name
    if file.num_bytes < 8:
        raise DamagedFile(f"{name} has {file.num_bytes} bytes; a safetensors file has at least 8")
    header_bytes = int.from_bytes(file.memory[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, file.num_bytes - 8):
        raise DamagedFile(
            f"{name} announces a header of {header_bytes} bytes; the file has {file.num_bytes}, and at most "
            f"{MAX_HEADER_BYTES} are read. Is the download complete?"
        )
    return _parse_object(file.memory[8 : 8 + header_bytes], name), 8 + header_bytes


def _parse_object(text: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object: the header of a file, or an index. Raise DamagedFile if the text is no JSON object, or if it repeats a key,
    since programs that read such files differ in which of the values they use."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise DamagedFile(f"{file} has more than one entry {name!r}")
            found[name] = value
        return found

    if found := stand_in(text[:STAND_IN_BYTES]):
        raise DamagedFile(f"{file} {found}")
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except DamagedFile:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{file}: the header is a {type(value).__name__}, expected an object")
    return value


def _check_header(header: dict[str, Any], file: str, data_bytes: int) -> dict[str, tuple[TensorInfo, int]]:
    """Return the tensors, each with the offset of its bytes in the data. Raise DamagedFile if an entry is malformed, or if the tensors do
    not fill the data exactly."""
    found = {name: _check_tensor(entry, f"{file}, tensor {name!r}") for name, entry in header.items() if name != "__metadata__"}
    expected = 0
    for name, (info, start) in sorted(found.items(), key=lambda item: (item[1][1], item[1][0].num_bytes)):
        if start != expected:
            what = "overlaps the previous tensor" if start < expected else "leaves a gap after the previous tensor"
            raise DamagedFile(f"{file}, tensor {name!r}: starts at byte {start} and {what}, which ends at {expected}")
        expected = start + info.num_bytes
    if expected != data_bytes:
        raise DamagedFile(f"{file} holds {data_bytes} bytes of data; its header describes {expected}. Is the download complete?")
    return found


def _check_tensor(entry: object, where: str) -> tuple[TensorInfo, int]:
    """Return the description of a tensor and the offset of its bytes in the data. Raise DamagedFile if the entry is malformed."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedFile(f"{where}: expected an object of dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise DamagedFile(f"{where}: dtype {entry['dtype']!r} is none of {', '.join(DTYPES)}")
    shape = _naturals(entry["shape"], f"{where}: shape")
    offsets = _naturals(entry["data_offsets"], f"{where}: data_offsets")
    if len(shape) > MAX_RANK:
        raise DamagedFile(f"{where} has {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    needed = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise DamagedFile(f"{where}: data_offsets {list(offsets)} do not span the {needed} bytes that its shape needs")
    return TensorInfo(shape, np.dtype(np.float32) if dtype == DOUBLE else dtype, needed), offsets[0]


def _naturals(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        raise DamagedFile(f"{where} is {str(value)[:80]}, expected a list of non-negative integers")
    return tuple(value)
