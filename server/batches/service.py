"""Create, find, list, cancel and delete files and batches, for the endpoints."""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TypeVar

from starlette.types import ASGIApp

from server.batches.records import DAY_S, INPUT, REQUESTS, BatchRecord, FileRecord, Status, new_id, now
from server.batches.runner import Runner
from server.batches.store import Store, StoreError
from server.errors import BATCH_NOT_FOUND, BATCHES_OFF, CONFLICTING_BATCH, INVALID_VALUE, STORE_FULL, ApiError
from server.models.registry import Registry
from server.settings import ServerSettings

log = logging.getLogger(__name__)

WINDOW_S = DAY_S  # a batch expires after the only completion window of OpenAI's API, "24h"
MAX_RUNNING = 64  # maximum number of batches of a tenant that have not ended
SWEEP_S = 60.0
R = TypeVar("R", FileRecord, BatchRecord)
OF_OPENAI, OF_ANTHROPIC = "batch_", "msgbatch_"  # how ids of batches begin


class Batches:
    """The store and the runner of a server. If the server has no store, each use of `store` raises ApiError with BATCHES_OFF."""

    def __init__(self, settings: ServerSettings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._opened: tuple[Store, Runner] | None = None
        self._why_off = "the server was started without a folder for files (batch_dir), or with batch_store_bytes 0"
        self._lock: IO[bytes] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, app: ASGIApp) -> None:
        """Open the folder, and continue the batches that have not ended. If no folder is set or the folder cannot be used, files and
        batches stay off, and `store` says why."""
        folder = self._settings.batch_dir
        if folder is None or not self._settings.batch_store_bytes:
            return
        try:
            self._lock = await asyncio.to_thread(_own, folder)
            store = await asyncio.to_thread(Store, folder, self._settings.batch_store_bytes)
        except (OSError, StoreError) as error:
            self._why_off = f"batch_dir {folder}: {error}"
            log.warning("no files and batches: %s", self._why_off)
            return
        runner = Runner(store, self._registry, app, max_line_bytes=self._settings.max_body_bytes, keep_s=int(self._settings.batch_store_s))
        self._opened = store, runner
        for batch in sorted(store.all_batches(), key=lambda record: record.created_at):
            if not batch.has_ended:
                runner.start(batch)
        self._sweeper = asyncio.create_task(self._sweep(store))

    async def close(self) -> None:
        """Stop the runner, which leaves all batches as they are, and free the folder."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._opened is not None:
            await self._opened[1].close()
        if self._lock is not None:
            self._lock.close()

    async def _sweep(self, store: Store) -> None:
        """Remove what has expired, every SWEEP_S seconds. If the disk refuses that, try again the next time."""
        while True:
            try:
                await asyncio.to_thread(store.sweep, int(self._settings.batch_store_s))
            except OSError as error:
                log.warning("expired files and batches stay: %s; they are removed later", error)
            await asyncio.sleep(SWEEP_S)

    @property
    def store(self) -> Store:
        """The store. Raise ApiError with BATCHES_OFF if there is none."""
        if self._opened is None:
            raise ApiError(BATCHES_OFF, f"files and batches are off: {self._why_off}")
        return self._opened[0]

    # --- files -----------------------------------------------------------------------------------------------------------

    def files_of(self, owner: str) -> list[FileRecord]:
        """Return the files of a tenant that have not expired, the newest first. The requests of Anthropic batches are not among them."""
        return _newest_first(
            file for file in self.store.all_files() if file.owner == owner and file.purpose != REQUESTS and not file.has_expired
        )

    async def delete_file(self, file: FileRecord) -> None:
        """Delete a file. While a thread removes the file, no batch can begin with it. If the disk refuses the removal, keep the file's
        record. Raise ApiError if a batch that has not ended uses it."""
        store = self.store
        for batch in store.all_batches():
            if not batch.has_ended and file.id in batch.file_ids:
                raise ApiError(CONFLICTING_BATCH, f"batch {batch.id} uses the file; cancel the batch first", param="file_id")
        store.files.pop(file.id, None)  # on the event loop, like the check above, so that no batch is created in between

        def remove() -> None:
            try:
                store.delete_file(file.id)
            except OSError:
                store.files[file.id] = file
                raise

        await store.on_disk(remove)

    # --- batches ---------------------------------------------------------------------------------------------------------

    def create(
        self,
        file: FileRecord,
        key_digest: str,
        endpoint: str,
        metadata: Mapping[str, str] | None,
        prefix: str = OF_OPENAI,
        models: tuple[str, ...] = (),
    ) -> BatchRecord:
        """Begin a batch of the requests in a file, for the key that asks for it. `models`: patterns of the names that the key may use.
        Raise ApiError if the file has another purpose, or if too many batches of the tenant have not ended."""
        store, owner = self.store, file.owner
        if file.purpose not in (INPUT, REQUESTS):
            raise ApiError(INVALID_VALUE, f"the file's purpose is {file.purpose!r}; expected {INPUT!r}", param="input_file_id")
        running = sum(not batch.has_ended and batch.owner == owner for batch in store.all_batches())
        if running >= MAX_RUNNING:
            raise ApiError(STORE_FULL, f"{running} of your batches have not ended; expected fewer than {MAX_RUNNING}; wait, or cancel some")
        created = now()
        record = BatchRecord(
            new_id(prefix),
            owner,
            key_digest,
            endpoint,
            file.id,
            new_id("file-"),
            new_id("file-"),
            created,
            created + WINDOW_S,
            models=models,
            metadata=None if metadata is None else dict(metadata),
        )
        store.save(record)
        assert self._opened is not None
        self._opened[1].start(record)
        return record

    def batches_of(self, owner: str, prefix: str = OF_OPENAI) -> list[BatchRecord]:
        """Return the batches of a tenant that one API made, the newest first."""
        return _newest_first(batch for batch in self.store.all_batches() if batch.owner == owner and batch.id.startswith(prefix))

    def batch(self, batch_id: str, owner: str, prefix: str = OF_OPENAI) -> BatchRecord:
        """Return a batch of a tenant, made by one API. Raise ApiError if there is none."""
        record = self.store.batches.get(batch_id)
        if record is None or record.owner != owner or not record.id.startswith(prefix):
            raise ApiError(BATCH_NOT_FOUND, f"no batch of yours has the id {batch_id!r:.80}", param="batch_id")
        return record

    def cancel(self, record: BatchRecord) -> None:
        """Begin to cancel a batch, unless that has begun already. Raise ApiError if the batch has ended."""
        if record.has_ended:
            raise ApiError(
                CONFLICTING_BATCH, f"batch {record.id} is {record.status} already, so nothing is left to cancel", param="batch_id"
            )
        if record.status is not Status.CANCELLING:
            assert self._opened is not None
            self._opened[1].cancel(record)

    def delete(self, record: BatchRecord) -> None:
        """Remove a batch that has ended, and its files. Raise ApiError if it has not ended."""
        if not record.has_ended:
            raise ApiError(CONFLICTING_BATCH, f"batch {record.id} is {record.status}; cancel it first", param="batch_id")
        for file_id in record.file_ids:
            self.store.delete_file(file_id)
        self.store.delete_batch(record)


def _newest_first(records: Iterable[R]) -> list[R]:
    """Return records, the newest first."""
    return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)


def _own(folder: Path) -> IO[bytes]:
    """Make the folder if it does not exist, and lock it for this server. The kernel frees the lock however the server ends. Raise
    StoreError if another server holds the lock, and OSError if the folder cannot be made or locked."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = (folder / "lock").open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise StoreError("another server uses it; name another folder") from error
        raise
    return file
