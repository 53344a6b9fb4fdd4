"""Exports for browsers that are stored between starts, each under a digest of everything that determines its files.

The folder that a server publishes has hard links to the files of a stored export, or copies if the file system has no hard links. So the
stored export may be removed while the server publishes the folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import deploy.export
import runtime
from compiler.cache import Range
from compiler.machine.target import get
from compiler.signature import key_of
from deploy.cache import Kept
from deploy.export.web import LEVELS, WebModel, export_web, web_model
from deploy.model_loading.servable import Servable
from runtime.files import digest_of_sources
from runtime.own_folder import OwnFolder
from runtime.web import page_files


class ExportParts(msgspec.Struct, frozen=True):
    """Everything that determines the files of an export; its digest is the name of the stored folder."""

    programs: tuple[tuple[str, dict[str, dict[str, Range]]], ...]  # for each level: its program's cache key and variables' ranges
    weights: str  # digest of the checkpoint
    model: WebModel
    tokenizer: str  # content of tokenizer.json
    sources: tuple[str, ...]  # digests of the exporter's code, and of the runtime, which is part of an export


def export_kept(model: Servable, name: str, folder: Path, cache: Kept, levels: Sequence[str] = LEVELS) -> None:
    """Fill a folder with the files of an export. If the export is not stored yet, export the model first. Raise LoadError in the same cases
    as `export_web`."""
    place = cache.export_of(_digest(model, name, levels))
    if not place.is_dir():
        with OwnFolder(place.parent, f".{place.name}.") as written:
            export_web(model, name, written.path, levels=levels)
            written.move_to(place)
    with suppress(OSError):  # the folder may be read-only
        os.utime(place)  # record the last use
    shutil.copytree(place, folder, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """Let `target` be a hard link to a file, or a copy if there are no hard links."""
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)


def _digest(model: Servable, name: str, levels: Sequence[str]) -> str:
    """Return the name under which an export is stored, without compiling the model."""
    keys = [key_of(model.module, get(level).key) for level in levels]
    page = hashlib.sha256(b"".join(content for _, content in sorted(page_files().items())))
    roots = [Path(package.__path__[0]) for package in (deploy.export, runtime)]
    parts = ExportParts(
        tuple((level + key.digest, key.ranges) for level, key in zip(levels, keys, strict=True)),
        model.mode.weights.digest(),
        web_model(model, name),
        model.tokenizer.to_json(),
        (*map(digest_of_sources, roots), page.hexdigest()),
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
