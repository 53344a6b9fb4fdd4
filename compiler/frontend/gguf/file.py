"""The GGUF container: typed metadata, then descriptions of tensors, then the data of the tensors. Versions 2 and 3 are read, in
little-endian order. A model may be split into several files, of which the first has the metadata of the model.

Lengths and counts in the file are checked against the remaining bytes before memory is allocated for them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from compiler.frontend.errors import DamagedFile, ModelError
from compiler.frontend.gguf.dequantize import FORMATS, Format, dequantize
from compiler.frontend.weights import MappedFile, Tensor
from runtime.split_files import parts_of

MAGIC = b"GGUF"
MAX_METADATA_BYTES = 256 << 20  # a vocabulary takes a few megabytes, or 12 MB if it is large
MAX_ENTRIES = 1 << 16  # maximum number of metadata entries
MAX_STRINGS = 1 << 22  # maximum number of texts in all arrays together; a vocabulary and its merges have fewer than a million
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# Formats that are not read, by their type code.
OTHER_FORMATS = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
    41: "Q1_0",
}
# NumPy types of numbers by the type code of the file; 8 is a string, 9 an array.
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9


SIZE = struct.Struct("<Q")  # the length of a text, which precedes its bytes
STRIDE = 1024  # number of texts from one whose offset is stored to the next such text


class Texts:
    """An array of texts in the metadata. Texts are decoded only when they are read: most loads search a vocabulary for a few texts, and a
    list of 260,000 decoded texts takes 20 MB."""

    def __init__(self, memory: mmap, marks: Sequence[int], end: int, length: int) -> None:
        """`marks` has the offsets of the first text and then of every STRIDE-th text. The length of a text precedes its bytes, and the
        offset of a text is that of its length. `end` is the offset behind the last text. The caller has checked that all texts lie within
        the file."""
        self._memory, self._marks, self._end, self._length = memory, marks, end, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        memory, at, size_at = self._memory, self._marks[0] if self._marks else self._end, SIZE.unpack_from
        for _ in range(self._length):
            start = at + 8
            at = start + size_at(memory, at)[0]
            # Tokens of byte-level vocabularies may be invalid UTF-8, so invalid bytes are replaced.
            yield memory[start:at].decode(errors="replace")

    def place(self, text: str) -> int | None:
        """Return the number of texts before the first one that has the same bytes as `text`, or None if no text has them. No text is
        decoded."""
        memory, size_at, content = self._memory, SIZE.unpack_from, text.encode()
        found = SIZE.pack(len(content)) + content
        place, at = 0, self._marks[0] if self._marks else self._end
        while (hit := memory.find(found, at, self._end)) >= 0:
            nearest = bisect_right(self._marks, hit) - 1
            if nearest * STRIDE > place:
                place, at = nearest * STRIDE, self._marks[nearest]
            while at < hit:
                place, at = place + 1, at + 8 + size_at(memory, at)[0]
            if at == hit:
                return place  # otherwise, the bytes lie within a text, and the search goes on with the next text
        return None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """How a tensor is stored, and where."""

    shape: tuple[int, ...]  # outermost dimension first; the file lists the innermost first
    format: Format
    start: int  # byte offset in the file
    num_bytes: int
    file: MappedFile


class GgufFile:
    """The metadata and the tensors of a GGUF file, by their names in the file. The path may be that of any part of a split file. Raise
    DamagedFile if a part violates the format, and ModelError if parts are missing or the file has an unsupported version or format."""

    def __init__(self, path: str | Path) -> None:
        paths = [Path(path).with_name(name) for name in parts_of(Path(path).name)]
        if absent := [path.name for path in paths if not path.exists()]:
            raise ModelError(f"parts of {Path(path).name} are missing: {', '.join(absent[:5])}. Is the download complete?")
        self.path = paths[0]
        self._parts = [_Part(path) for path in paths]
        self.metadata: Mapping[str, Any] = self._parts[0].metadata
        self.tensors: Mapping[str, GgufTensor] = {}
        for number, part in enumerate(self._parts):
            self._require_part(part, number)
            if repeated := part.tensors.keys() & self.tensors.keys():
                raise DamagedFile(f"{part.file.path.name} has {min(repeated)!r}, as another part has")
            self.tensors = {**self.tensors, **part.tensors}

    def _require_part(self, part: _Part, number: int) -> None:
        """Raise ModelError if the file is a part of a split file but is not named like one, and DamagedFile if it is another part than its
        name says."""
        found = part.metadata.get("split.no", 0), part.metadata.get("split.count", 0) or 1
        if found != (number, len(self._parts)):
            name = part.file.path.name
            if len(self._parts) == 1:
                raise ModelError(f"{name} is one of {found[1]} parts; expected a name that ends as in NAME-00001-of-00003.gguf")
            raise DamagedFile(f"{name} has split.no {found[0]!r} and split.count {found[1]!r}, expected {number} and {len(self._parts)}")

    def read(self, name: str) -> Tensor:
        """Return the tensor: if it holds plain numbers, a view of the file, or a copy if they are not aligned; if it is quantised, an f32
        array."""
        tensor = self.tensors[name]
        if tensor.format.blocks is None:
            assert tensor.format.dtype is not None, name
            return tensor.file.array(tensor.format.dtype, tensor.shape, tensor.start)
        return dequantize(self._blocks(tensor), tensor.format.blocks).reshape(tensor.shape)

    def first_rows(self, name: str, count: int) -> Tensor:
        """Return the first `count` rows of a matrix, or all if there are fewer, without decoding other rows."""
        tensor = self.tensors[name]
        if tensor.format.blocks is None:
            return self.read(name)[:count]
        blocks = self._blocks(tensor)[: count * tensor.shape[-1] // tensor.format.block_values]
        return dequantize(blocks, tensor.format.blocks).reshape(-1, tensor.shape[-1])

    def blocks(self, name: str) -> Tensor:
        """Return the bytes of a quantised tensor, with an axis for the bytes of a row: a view of the file."""
        tensor = self.tensors[name]
        return self._blocks(tensor).reshape(*tensor.shape[:-1], tensor.shape[-1] // tensor.format.block_values * tensor.format.block_bytes)

    def _blocks(self, tensor: GgufTensor) -> Tensor:
        num_blocks = tensor.num_bytes // tensor.format.block_bytes
        return tensor.file.array(np.dtype(np.uint8), (num_blocks, tensor.format.block_bytes), tensor.start)

    def release(self, name: str) -> None:
        tensor = self.tensors[name]
        tensor.file.release(tensor.start, tensor.num_bytes)

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts:
            part.file.add_to(digest, part.header_bytes)
        return digest.hexdigest()


class _Part:
    """One file of the model, with its own metadata and tensors."""

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        cursor = _Cursor(self.file)
        num_tensors, num_entries = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_entries)
        self.tensors = _read_tensors(cursor, num_tensors, self._alignment(), self.file)
        self.header_bytes = cursor.position

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise DamagedFile(f"{self.file.path.name}: general.alignment is {alignment!r}, expected a power of two")
        return alignment


# --- reading the header -----------------------------------------------------------------------------------------------------


class _Cursor:
    """A read position that passes neither the end of the file nor MAX_METADATA_BYTES."""

    def __init__(self, file: MappedFile) -> None:
        self.name = file.path.name
        self.end = file.num_bytes
        self.position = 0
        self.num_strings = 0
        self._memory = file.memory

    def take(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes` bytes. Raise DamagedFile if fewer bytes are left before the end of the file or MAX_METADATA_BYTES."""
        start = self.position
        if num_bytes > min(self.end, MAX_METADATA_BYTES) - start:
            raise DamagedFile(
                f"{self.name} announces {num_bytes} bytes at byte {start}, but it has {self.end} bytes, of which at most "
                f"{MAX_METADATA_BYTES} may be metadata. Is the download complete?"
            )
        self.position = start + num_bytes
        return self._memory[start : self.position]

    def number(self, code: int) -> Any:
        dtype = np.dtype(NUMBERS[code])
        data = self.take(dtype.itemsize)
        if code == BOOL and data not in (b"\0", b"\1"):
            raise DamagedFile(f"{self.name}: a boolean is {data[0]}, expected 0 or 1")
        return np.frombuffer(data, dtype)[0].item()

    def count(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def text(self) -> str:
        return self.take(self.count()).decode(errors="replace")

    def texts(self, length: int) -> Texts:
        """Move past the next `length` texts, and return them undecoded: `Texts` decodes them when they are read. Raise DamagedFile if a
        text does not fit. A vocabulary has 100,000 texts or more, so the loop reads their lengths itself instead of calling `text` for
        each."""
        memory, at, end = self._memory, self.position, min(self.end, MAX_METADATA_BYTES)
        size_at, marks = SIZE.unpack_from, list[int]()
        for first in range(0, length, STRIDE):
            marks.append(at)
            for _ in range(min(STRIDE, length - first)):
                size = size_at(memory, at)[0] if at + 8 <= end else end
                if at + 8 + size > end:
                    self.position = at
                    self.text()  # raises DamagedFile for the text that does not fit
                at += 8 + size
        self.position = at
        return Texts(memory, marks, at, length)

    def value(self, code: int) -> Any:
        """Return the next value, which has the type with this code: a number, a text, an array of numbers (NumPy) or of texts (`Texts`).
        Raise DamagedFile for other types, and for more than MAX_STRINGS texts in arrays."""
        if code in NUMBERS:
            return self.number(code)
        if code == STRING:
            return self.text()
        if code != ARRAY:
            raise DamagedFile(f"{self.name}: a value has type {code}, expected 0 to 12")
        item_code, length = self.number(4), self.count()
        if item_code == STRING:
            self.num_strings += length
            if self.num_strings > MAX_STRINGS:
                raise DamagedFile(f"{self.name} has arrays of {self.num_strings} texts; at most {MAX_STRINGS} are read")
            return self.texts(length)
        if item_code not in NUMBERS:
            raise DamagedFile(f"{self.name}: an array has items of type {item_code}, expected numbers or texts")
        dtype = np.dtype(NUMBERS[item_code])
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Return the number of tensors and the number of metadata entries. Raise ModelError for another version or byte order, and DamagedFile
    for another kind of file or too large numbers."""
    if (magic := cursor.take(4)) != MAGIC:
        raise DamagedFile(f"{cursor.name} is no GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
    version = cursor.number(4)
    if version not in (2, 3):
        what = "is big-endian" if version in (2 << 24, 3 << 24) else f"has version {version}"
        raise ModelError(f"{cursor.name} {what}; versions 2 and 3 in little-endian order are read. Convert the model again")
    num_tensors, num_entries = cursor.count(), cursor.count()
    if num_tensors > MAX_TENSORS or num_entries > MAX_ENTRIES:
        raise DamagedFile(
            f"{cursor.name} announces {num_tensors} tensors and {num_entries} entries; at most {MAX_TENSORS} and {MAX_ENTRIES} are read"
        )
    return num_tensors, num_entries


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        if key in metadata:
            raise DamagedFile(f"{cursor.name} has more than one entry {key[:80]!r}")
        metadata[key] = cursor.value(cursor.number(4))
    return metadata


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int, file: MappedFile) -> dict[str, GgufTensor]:
    """Return the tensors by name. Raise DamagedFile if a name is repeated, or if data of tensors overlap or lie outside the file."""
    described: dict[str, tuple[tuple[int, ...], Format, int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        if name in described:
            raise DamagedFile(f"{cursor.name} has more than one tensor {name[:80]!r}")
        described[name] = _read_tensor(cursor, name, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = 0
    for name, (shape, format, offset, num_bytes) in sorted(described.items(), key=lambda item: (item[1][2], item[1][3])):
        if offset < end:
            raise DamagedFile(f"{cursor.name}, tensor {name!r}: starts at {offset}, inside the previous tensor, which ends at {end}")
        end = offset + num_bytes
        if data_start + end > cursor.end:
            where = f"{cursor.name}, tensor {name!r}"
            raise DamagedFile(f"{where}: ends at byte {data_start + end}, the file at {cursor.end}. Is the download complete?")
        tensors[name] = GgufTensor(shape, format, data_start + offset, num_bytes, file)
    return tensors


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], Format, int, int]:
    """Return the shape and the format of the next tensor, the offset of its bytes in the data, and the number of its bytes. Raise
    ModelError for a format that is not read, and DamagedFile for too many dimensions, a row that ends within a block, or an unaligned
    offset."""
    where = f"{cursor.name}, tensor {name[:80]!r}"
    num_dimensions = cursor.number(4)
    if num_dimensions > MAX_DIMENSIONS:
        raise DamagedFile(f"{where} has {num_dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
    shape = tuple(cursor.count() for _ in range(num_dimensions))[::-1]
    code, offset = cursor.number(4), cursor.count()
    if (format := FORMATS.get(code)) is None:
        raise ModelError(
            f"{where}: format {OTHER_FORMATS.get(code, code)} is not read; known are {', '.join(f.name for f in FORMATS.values())}. "
            "Take a file in one of these formats, such as Q4_K_M, or a newer version of this server"
        )
    if shape and shape[-1] % format.block_values:
        raise DamagedFile(f"{where}: rows have {shape[-1]} values, expected a multiple of {format.block_values} (a {format.name} block)")
    if offset % alignment:
        raise DamagedFile(f"{where}: starts at {offset}, which is not a multiple of {alignment}")
    return shape, format, offset, math.prod(shape) // format.block_values * format.block_bytes
