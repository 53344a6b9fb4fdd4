"""Keep files and batches in a folder:

    files/ID.data, ID.json        the bytes of a file, and its FileRecord
    batches/ID.json               a BatchRecord
    lock                          held by the server that uses the folder

A record is written under a temporary name and renamed. Answers of a batch are appended to its output files line by line without a
buffer, so a killed server loses no answer that it has written; `recover` removes an incomplete last line.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.files import append_whole, entries_of
from runtime.whole_files import ORDINARY, remove_all_abandoned, replacing
from server.batches.records import DAY_S, REQUESTS, BatchRecord, FileRecord, Status, new_id, now
from server.errors import FILE_NOT_FOUND, STORE_FULL, ApiError

MAX_FILES = 10_000
ID = re.compile(r"[A-Za-z]+[-_][0-9a-f]{24}")
PIECE_BYTES = 1 << 20
R = TypeVar("R", FileRecord, BatchRecord)
T = TypeVar("T")


class Store:
    """The files and batches in a folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes` limits the data of all files. Remove what a killed server has left unfinished. Raise StoreError if the folder has a
        record that cannot be read, and OSError if the disk refuses an access."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards `num_bytes`; never held during disk accesses, because the event loop acquires it
        self._recording = threading.Lock()  # held while a record is written; the event loop also acquires it, when it creates a batch
        self._appending = threading.Lock()  # held while a line is written to a file, which may take long
        # Uploads have threads of their own: those of the loop's executor tokenize the texts of other requests.
        self._writers = ThreadPoolExecutor(2, thread_name_prefix="uploads")
        for name in ("files", "batches"):
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_all_abandoned(folder / name)
        self.files = {record.id: record for record in self._read("files", FileRecord)}
        self.batches = {record.id: record for record in self._read("batches", BatchRecord)}
        self._remove_unknown_data()
        self.num_bytes = sum(path.stat().st_size for path in self._paths("files", ".data"))

    # --- files -----------------------------------------------------------------------------------------------------------

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run `work`, which writes or removes an uploaded file, on a thread, so that no other request waits for the disk. Return its
        result."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, work)

    def file(self, file_id: str, owner: str) -> FileRecord:
        """Return the record of a file of this owner that has not expired. Raise ApiError if there is none."""
        record = self.files.get(file_id)
        if record is None or record.owner != owner or record.has_expired:
            raise ApiError(FILE_NOT_FOUND, f"no file of yours has the id {file_id!r:.80}", param="file_id")
        return record

    def all_files(self) -> list[FileRecord]:
        """Return the records of all files in a new list, because threads add and remove files meanwhile."""
        return list(self.files.values())

    def all_batches(self) -> list[BatchRecord]:
        """Return the records of all batches in a new list, for the same reason as `all_files`."""
        return list(self.batches.values())

    def data(self, file_id: str) -> Path:
        """Return the path of a file's data."""
        assert ID.fullmatch(file_id), file_id  # an id is a part of a path
        return self._folder / "files" / f"{file_id}.data"

    def new_upload(self) -> Upload:
        """Create a file to write, and return it. Raise ApiError if there are too many files."""
        if len(self.files) >= MAX_FILES:
            raise ApiError(
                STORE_FULL, f"{len(self.files)} files are stored; expected fewer than {MAX_FILES}; delete some (DELETE /v1/files)"
            )
        return Upload(self, new_id("file-"))

    def keep(self, record: FileRecord) -> None:
        """Write the record of a file, whose data was written before."""
        self._write("files", record)
        self.files[record.id] = record

    def delete_file(self, file_id: str, num_reserved: int | None = None) -> None:
        """Remove a file. Its record is removed first: the next start of the server removes data without a record. `num_reserved`: if the
        file is not finished, the bytes that were reserved for it, of which the disk may have fewer; None: count those on the disk."""
        path = self.data(file_id)
        (self._folder / "files" / f"{file_id}.json").unlink(missing_ok=True)
        self.files.pop(file_id, None)
        size = 0
        with suppress(FileNotFoundError):  # another thread may have removed the data meanwhile, and counted its bytes
            num_bytes = path.stat().st_size
            path.unlink()
            size = num_bytes
        self._count(-(size if num_reserved is None else num_reserved))

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are about to be written. Raise ApiError if there is no room for them."""
        with self._lock:
            if self.num_bytes + num_bytes > self._max_bytes:
                text = f"files take {self.num_bytes} bytes of {self._max_bytes} (batch_store_bytes); delete some (DELETE /v1/files/ID)"
                raise ApiError(STORE_FULL, text)
            self.num_bytes += num_bytes

    def append(self, file_id: str, line: bytes) -> None:
        """Append a line to a file that a batch writes. The line is kept even if the store then exceeds its limit, which only stops new
        uploads. If the disk has room for only a part of the line, remove the part and raise OSError."""
        with self._appending, self.data(file_id).open("ab", buffering=0) as file:
            append_whole(file, line)
        with self._lock:
            self.num_bytes += len(line)

    def lines(self, file_id: str, most: int | None = None) -> Iterator[bytes]:
        """Yield the lines of a file that are not blank; none if the file does not exist. Of a line longer than `most` bytes, yield only the
        first `most` + 1 bytes, so that the caller sees that it is too long."""
        path = self.data(file_id)
        if not path.exists():
            return
        with path.open("rb") as file:
            while line := file.readline(-1 if most is None else most + 1):
                part = line
                while not part.endswith(b"\n") and (part := file.readline(PIECE_BYTES)):
                    pass  # skip the rest of a line that is too long
                if line.strip():
                    yield line

    def recover(self, file_id: str) -> None:
        """Remove an incomplete last line, which a killed server has left. Do nothing if the file does not exist."""
        path = self.data(file_id)
        if not path.exists():
            return
        with path.open("r+b") as file:
            end = size = file.seek(0, os.SEEK_END)
            while end:
                begin = max(0, end - PIECE_BYTES)
                file.seek(begin)
                at = file.read(end - begin).rfind(b"\n")
                if at >= 0:
                    end = begin + at + 1
                    break
                end = begin
            file.truncate(end)
        self._count(end - size)

    # --- batches ---------------------------------------------------------------------------------------------------------

    def save(self, record: BatchRecord) -> None:
        """Write the record of a batch."""
        self._write("batches", record)
        self.batches[record.id] = record

    def end(self, record: BatchRecord, status: Status) -> None:
        """End a batch. Clients see that it has ended only after its record is written, so that no client deletes a batch whose record is
        written afterwards."""
        times = {**record.times, status: now()}
        self._write("batches", msgspec.structs.replace(record, status=status, times=times))
        record.times, record.status = times, status

    def delete_batch(self, record: BatchRecord) -> None:
        """Remove the record of a batch."""
        (self._folder / "batches" / f"{record.id}.json").unlink(missing_ok=True)
        self.batches.pop(record.id, None)

    def sweep(self, keep_s: int) -> None:
        """Remove expired files that no running batch uses, and batches that ended at least `keep_s` seconds and at least a day ago. The
        file with the requests of an Anthropic batch is removed with the batch. Raise OSError if the disk refuses to remove one of them; the
        others are removed nevertheless."""
        refused: OSError | None = None
        for remove in self._outdated(keep_s):
            try:
                remove()
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def _outdated(self, keep_s: int) -> Iterator[Callable[[], None]]:
        """Yield, for each file and each batch that `sweep` removes, a function that removes it."""
        expired = [file for file in self.all_files() if file.has_expired]  # before `used`, because no batch begins with an expired file
        used = {file_id for batch in self.all_batches() if not batch.has_ended for file_id in batch.file_ids}
        for file in expired:
            if file.id not in used:
                yield partial(self.delete_file, file.id)
        for batch in [record for record in self.all_batches() if record.has_ended]:
            if max(batch.times.values()) + max(keep_s, DAY_S) <= now():
                yield partial(self.delete_batch, batch)
                if (requests := self.files.get(batch.input_file_id)) is not None and requests.purpose == REQUESTS:
                    yield partial(self.delete_file, requests.id)

    # --- disk ------------------------------------------------------------------------------------------------------------

    def _count(self, num_bytes: int) -> None:
        """Count bytes that were written, or removed if the number is negative."""
        with self._lock:
            self.num_bytes += num_bytes

    def _paths(self, part: str, suffix: str) -> list[Path]:
        """Return the paths in a folder whose names end in `suffix`. Raise OSError if the folder cannot be read."""
        return [path for path in entries_of(self._folder / part) if path.suffix == suffix]

    def _read(self, part: str, kind: type[R]) -> list[R]:
        """Return all records in a folder. Raise StoreError if one cannot be read."""
        return [_decoded(path, kind) for path in self._paths(part, ".json")]

    def _write(self, part: str, record: FileRecord | BatchRecord) -> None:
        """Write a record into a folder."""
        with self._recording, replacing(self._folder / part / f"{record.id}.json", ORDINARY, synced=False) as file:
            file.write(msgspec.json.encode(record))

    def _remove_unknown_data(self) -> None:
        """Remove the data of uploads that a killed server has not finished, and files with the requests of Anthropic batches that do not
        exist. Keep the files that running batches write, which have no record yet."""
        named = {batch.input_file_id for batch in self.batches.values()}
        for file in [file for file in self.files.values() if file.purpose == REQUESTS and file.id not in named]:
            del self.files[file.id]
            (self._folder / "files" / f"{file.id}.json").unlink()
        known = set(self.files)
        for batch in self.batches.values():
            if not batch.has_ended:
                known |= {*batch.file_ids}
        for path in self._paths("files", ".data"):
            if path.stem not in known:
                path.unlink()


class Upload:
    """A file while it arrives. `finish` keeps the file; otherwise, `abandon` removes it. All methods but `add` wait for the disk, so they
    run on a thread of `Store.on_disk`."""

    def __init__(self, store: Store, file_id: str) -> None:
        self.store = store
        self.id = file_id
        self.num_bytes = 0
        self._unwritten: list[bytes] = []
        self._writing = threading.Lock()  # a thread may still write for a task that was cancelled
        self._is_abandoned = False
        self._file = store.data(file_id).open("xb")

    def add(self, data: bytes) -> None:
        """Add bytes, which `write` or `finish` writes. Raise ApiError if there is no room for them."""
        self.store.reserve(len(data))
        self.num_bytes += len(data)
        self._unwritten.append(data)

    def write(self) -> None:
        """Write what was added."""
        with self._writing:
            self._flush()

    def finish(self, describe: Callable[[str, int], FileRecord]) -> FileRecord:
        """Write the rest of the file, and keep the file. `describe` makes its record from the id and the number of bytes. Return the
        record. Raise ValueError if the file was abandoned."""
        with self._writing:  # `abandon` waits for this, and then removes the kept file
            if self._is_abandoned:
                raise ValueError(f"upload {self.id} was abandoned")
            self._flush()
            self._file.close()
            record = describe(self.id, self.num_bytes)
            self.store.keep(record)
        return record

    def abandon(self) -> None:
        """Remove the file, even if it was finished."""
        with self._writing:
            self._is_abandoned = True
            with suppress(OSError):  # closing fails if the disk has no room for the buffered bytes
                self._file.close()
        self.store.delete_file(self.id, self.num_bytes)

    def _flush(self) -> None:
        """Write what was added. The caller holds `_writing`."""
        unwritten, self._unwritten = self._unwritten, []
        for data in unwritten:
            self._file.write(data)


def _decoded(path: Path, kind: type[R]) -> R:
    """Read a record. Raise StoreError if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is no record of this version: {error}; move it away, or name another batch_dir") from error


class StoreError(ValueError):
    """Raised if the folder of batches cannot be used."""
