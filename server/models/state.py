"""Read and write the state file, which names the models to load again after a restart. It is replaced as a whole, never half written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from runtime.device.registry import NAME as DEVICE
from runtime.files import regular
from runtime.whole_files import ORDINARY, locked_file, remove_abandoned, replacing
from server.defaults import Defaults
from server.load_settings import LEAST_CONTEXT, LONGEST_GAP_MS, MAX_GAP_MS, MOST_RANKS, MOST_SEQUENCES, LoadSettings

LEAST_FREE_BYTES = 4096
NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"  # names of models and aliases
NAMED = "letters, digits and ._:/- of which the first is a letter or digit, 128 at most"


class ModelSpec(LoadSettings, frozen=True, omit_defaults=True):
    """The settings of a load, and the names of its model. `source` is a result of `sources.resolve`. A state file or configuration is
    refused if a value is outside the ranges below. The worker refuses values in these ranges that the model or the machine does not allow,
    and names the remedy."""

    max_context: Annotated[int, Meta(ge=LEAST_CONTEXT, lt=2**31)] | None = None
    max_batch: Annotated[int, Meta(ge=1, le=MOST_SEQUENCES)] = 64
    max_gap_ms: Annotated[int, Meta(ge=1, le=LONGEST_GAP_MS)] = MAX_GAP_MS
    kv_cache_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)] | Annotated[float, Meta(gt=0, lt=1)] | None = None
    tensor_parallel: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    device: Annotated[str, Meta(pattern=f"^{DEVICE}$")] = "cpu"
    aliases: tuple[str, ...] = ()
    pin: bool = False  # the model is unloaded only by a request with `force`
    tool_parser: str | None = None  # None: the format in which the chat template writes calls
    # whether answers may contain thoughts; None: true if the vocabulary has tokens for think blocks, or if the format writes thoughts
    # without such blocks (harmony)
    reasoning: bool | None = None
    defaults: Defaults = Defaults()  # defaults for requests; they win over those of the defaults file beside the model
    presets: dict[str, Defaults] = msgspec.field(
        default_factory=dict
    )  # the defaults of aliases that have their own, which win over those of the model

    def loads_like(self, other: ModelSpec) -> bool:
        """Return whether both specifications load the same model. Aliases and their defaults, the pin, the quality label and the available
        memory do not matter."""
        others = {"memory_limit_bytes": None, "reserved_bytes": 0, "kv_share": 1.0}
        plain = {"aliases": (), "presets": {}, "pin": False, "label": False, **others}
        return msgspec.structs.replace(self, **plain) == msgspec.structs.replace(other, **plain)

    def with_names(self, other: ModelSpec) -> ModelSpec:
        """Return this specification, with the aliases and the pin of `other` added."""
        return msgspec.structs.replace(self, aliases=self._aliases_with(other), pin=self.pin or other.pin)

    def with_later_names(self, saved: Self) -> Self:
        """Return this specification of the command line, with the further aliases that the model has in the state file (`saved`), and their
        defaults."""
        return msgspec.structs.replace(self, aliases=self._aliases_with(saved), presets={**saved.presets, **self.presets})

    def _aliases_with(self, other: ModelSpec) -> tuple[str, ...]:
        """Return the aliases of this specification, then those of `other`, each once."""
        return tuple(dict.fromkeys((*self.aliases, *other.aliases)))

    def without(self, aliases: Collection[str]) -> Self:
        """Return this specification without these aliases and their defaults."""
        kept = tuple(alias for alias in self.aliases if alias not in aliases)
        presets = {alias: own for alias, own in self.presets.items() if alias not in aliases}
        return msgspec.structs.replace(self, aliases=kept, presets=presets)


class SavedState(msgspec.Struct, frozen=True):
    """The content of a state file."""

    models: tuple[ModelSpec, ...] = ()


class StateError(Exception):
    """The state file cannot be used."""


def read_state(path: Path) -> SavedState:
    """Read a state file. An absent file counts as empty. Raise StateError if the file cannot be read, is not valid, or is a link whose
    target is absent, because the target's disk may not be mounted yet."""
    try:
        return msgspec.json.decode(regular(path).read_bytes(), type=SavedState)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise StateError(f"state file {path}: {error.strerror}; name a file that can be read and written") from error
        return SavedState()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"state file {path}: {error}; repair it, or remove it to start with no models") from error
    except OSError as error:
        raise StateError(f"state file {path}: {error.strerror}; name a file that can be read and written") from error


def require_writable(path: Path) -> None:
    """Raise StateError unless the state file can be written, so that the server fails at its start and not after the first load. Remove
    temporary files that killed servers have left beside it."""
    try:
        remove_abandoned(path)
        descriptor, fresh = locked_file(path)
        try:
            os.posix_fallocate(descriptor, 0, LEAST_FREE_BYTES)  # an empty file can be created even on a full disk
        finally:
            os.close(descriptor)
            os.unlink(fresh)
    except OSError as error:
        raise StateError(f"state file {path}: {error.strerror}; name a file in a folder that can be written and has free space") from error


@contextmanager
def exclusive(path: Path) -> Generator[None]:
    """Hold the lock of a state file while the server runs. Raise StateError if another server holds it, or if the file of the lock cannot
    be written or locked.

    Each server writes all models that it knows, so two servers would erase each other's models. The lock is a separate file, because every
    write replaces the state file itself. The kernel frees the lock however the server ends.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+b", buffering=0)  # unbuffered, so that closing the file writes nothing
    except OSError as error:
        raise StateError(f"state file {path}: {lock}: {error.strerror}; name a file in a folder that can be written") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(20).decode(errors="replace").strip() or "unknown"
            raise StateError(
                f"state file {path} is used by another server (process {owner}); stop that one, or name another file"
            ) from None
        except OSError as error:
            raise StateError(f"state file {path} cannot be locked: {error.strerror}; name a file on a local disk") from error
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        except OSError as error:
            raise StateError(f"state file {path}: {lock}: {error.strerror}; free space there, or name a file on another disk") from error
        yield


def write_state(path: Path, state: SavedState) -> None:
    """Replace a state file, so that even a power cut leaves the old or the new file whole. Raise OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, ORDINARY) as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)))
