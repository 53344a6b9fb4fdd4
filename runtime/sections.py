"""A file of named sections, each with a checksum: the format of executables and packed weights on disk.

    magic | header length | digest of the header | header (MessagePack: name, offset, size, CRC-32 of each section) | sections

The digest is a SHA-256. With a key it is a seal (runtime/sealed.py) instead, so that only a holder of the key can write the file.
A CRC detects every single flipped bit and is several times as fast as a cryptographic digest, which matters because gigabytes of weights
are verified. Sections begin at multiples of 64 bytes, so arrays in them are aligned when the file is mapped. Files with equal content are
equal byte for byte.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from runtime.errors import DamagedFile, UnsafeCache
from runtime.sealed import make_private, opened, seal_of
from runtime.whole_files import remove_abandoned, replacing

log = logging.getLogger(__name__)

T = TypeVar("T")

MAGIC = b"RLXSECT2"
ALIGNMENT = 64
BLOCK_BYTES = 8 << 20  # bytes of a section that are verified between two pauses
MAX_VERIFIERS = 8  # maximum number of verifying threads; more would only wait for the disk
_PREFIX = struct.Struct("<8sQ32s")  # magic, header length, header digest


class Section(msgspec.Struct, frozen=True):
    """The place of a section in a file, in bytes, and its checksum."""

    name: str
    offset: int
    size: int
    crc32: int


Put = Callable[[str, memoryview], None]  # writes the section with this name


def packed(contents: Mapping[str, bytes | memoryview]) -> bytes:
    """Return the bytes of a file with these sections."""
    views = {name: memoryview(content).cast("B") for name, content in contents.items()}
    file = BytesIO()
    with _filling(file, {name: view.nbytes for name, view in views.items()}, _plain_digest) as put:
        for name, view in views.items():
            put(name, view)
    return file.getvalue()


@contextmanager
def writing(path: Path, sizes: Mapping[str, int], key: bytes | None = None, *, synced: bool = True) -> Generator[Put]:
    """Write a file whose sections arrive one by one, in any order. Readers see either the old file or the complete new file. Without
    `synced`, parts of its sections may be missing after a power failure, which only the checksums show. A program that may read the file
    later without verifying them must mark it as in use now: the marker (deploy/use.py) says after a power failure to verify the file."""
    make_private(path.parent)
    remove_abandoned(path)
    with replacing(path, synced=synced) as file, _filling(file, sizes, _digest_of(path, key)) as put:
        yield put


@contextmanager
def _filling(file: IO[bytes], sizes: Mapping[str, int], digest: Callable[[bytes], bytes]) -> Generator[Put]:
    """Yield the function that writes a section. At the end of the `with`, write the header with its digest. `sizes` has the number of bytes
    of each section."""
    table = _layout(sizes)
    missing = set(sizes)

    def put(name: str, content: memoryview) -> None:
        section = table[name]
        assert content.nbytes == section.size, f"section {name!r} has {content.nbytes} bytes, {section.size} were announced"
        file.seek(section.offset)
        file.write(content)
        table[name] = msgspec.structs.replace(section, crc32=zlib.crc32(content))
        missing.discard(name)

    # Give the file its full size, also if the last section is empty: its offset must not lie beyond the file.
    if num_bytes := max((s.offset + s.size for s in table.values()), default=0):
        file.seek(num_bytes - 1)
        file.write(b"\0")
    yield put
    assert not missing, f"sections without content: {', '.join(missing)}"
    header = msgspec.msgpack.encode(list(table.values()))
    file.seek(0)
    file.write(_PREFIX.pack(MAGIC, len(header), digest(header)) + header)


def _plain_digest(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()


def _digest_of(path: Path, key: bytes | None) -> Callable[[bytes], bytes]:
    """Return the function that computes the digest of a file's header: with a key, a seal of the header and the file's name."""
    return _plain_digest if key is None else lambda header: seal_of(header, path.name, key)


def _layout(sizes: Mapping[str, int]) -> dict[str, Section]:
    """Assign an offset to each section. Offsets depend on the header's length, and the header holds the offsets, so space is reserved for a
    header with the longest integers."""
    unknown = 2**32 - 1
    widest = [Section(name, 2**63 - 1, size, unknown) for name, size in sizes.items()]
    offset = _PREFIX.size + len(msgspec.msgpack.encode(widest))
    table: dict[str, Section] = {}
    for name, size in sizes.items():
        offset = align(offset)
        table[name] = Section(name, offset, size, unknown)
        offset += size
    return table


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the least multiple of `alignment` that is at least `offset`."""
    return -(-offset // alignment) * alignment


class SectionFile:
    """A mapped file of sections. Views stay valid as long as anything refers to them, even if the file is replaced meanwhile."""

    def __init__(self, path: Path, key: bytes | None = None, *, content: memoryview | None = None) -> None:
        """Read the header of `content`, the bytes of the file, or map the file if `content` is None. With `key`, the header must have the
        seal of this key, otherwise a plain digest. Raise DamagedFile if the header is damaged, and the errors of `opened`."""
        self.path = path
        self._map: memoryview = _mapped(path) if content is None else content
        self._sections = self._read_header(_digest_of(path, key))

    def _read_header(self, digest_of: Callable[[bytes], bytes]) -> dict[str, Section]:
        """Return the sections by name. Raise DamagedFile if the header is not what was written, or if a section lies outside the file or is
        not aligned."""
        if len(self._map) < _PREFIX.size:
            raise DamagedFile(self.path, "header", f"the file has {len(self._map)} bytes, expected at least {_PREFIX.size}")
        magic, length, digest = _PREFIX.unpack_from(self._map)
        if magic != MAGIC:
            raise DamagedFile(self.path, "header", f"it starts with {magic!r}, not {MAGIC!r}")
        header = bytes(self._map[_PREFIX.size : _PREFIX.size + length])
        if len(header) != length or not hmac.compare_digest(digest_of(header), digest):
            raise DamagedFile(self.path, "header", "its digest differs")
        try:
            table = msgspec.msgpack.decode(header, type=list[Section])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedFile(self.path, "header", str(error)) from error
        for section in table:
            if section.offset % ALIGNMENT or section.offset < 0 or not 0 <= section.size <= len(self._map) - section.offset:
                raise DamagedFile(self.path, section.name, "it lies outside the file")
        return {section.name: section for section in table}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sections)

    def read(self, name: str, *, verify: bool = True) -> memoryview:
        """Return a view of the section in the mapped file. Without `verify`, the section is read from disk only when the view is used.
        Raise DamagedFile if there is no such section, or if its checksum differs."""
        section = self._sections.get(name)
        if section is None:
            raise DamagedFile(self.path, name, "it is missing")
        view = self._map[section.offset : section.offset + section.size]
        if verify and zlib.crc32(view) != section.crc32:
            raise DamagedFile(self.path, name, "its checksum differs")
        return view

    def verify(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Verify all sections on several threads. Raise DamagedFile if a checksum differs. `progress` gets the fraction that is done."""
        with ThreadPoolExecutor(min(MAX_VERIFIERS, len(os.sched_getaffinity(0)))) as pool:
            for number, _ in enumerate(pool.map(self._verify, self._sections), 1):
                progress(number / len(self._sections))

    def verify_slowly(self, pause: Callable[[], None]) -> None:
        """Verify all sections on this thread, with a pause after each block. Raise DamagedFile if a checksum differs."""
        for name in self._sections:
            self._verify(name, pause)

    def _verify(self, name: str, pause: Callable[[], None] = lambda: None) -> None:
        view, checksum = self.read(name, verify=False), 0
        for begin in range(0, view.nbytes, BLOCK_BYTES):
            checksum = zlib.crc32(view[begin : begin + BLOCK_BYTES], checksum)
            pause()
        if checksum != self._sections[name].crc32:
            raise DamagedFile(self.path, name, "its checksum differs")


def _mapped(path: Path) -> memoryview:
    """Map the file, or return no bytes for an empty file, which cannot be mapped."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def read_kept(path: Path, read: Callable[[], T]) -> T | None:
    """Return what `read` returns for a file of the cache, and set the file's times to now. Return None if the file is missing, damaged or
    cannot be trusted. Remove a file that is damaged or cannot be trusted."""
    try:
        result = read()
    except OSError:  # the file is missing, or the folder cannot be read
        return None
    except (DamagedFile, UnsafeCache) as fault:
        log.warning("%s; it is removed and built again", fault)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # the folder may be read-only
        os.utime(path)  # the age of the file is the time since its last use
    return result
