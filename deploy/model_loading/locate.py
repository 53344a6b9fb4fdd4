"""Resolve a model source to a path on this machine: `demo` is the built-in model, a path names a GGUF file or a folder that holds a model,
and anything else is downloaded unless it is here already (`origins.py`). An interrupted download continues with the first file that
is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy import demo
from deploy.model_loading import origins
from runtime.files import at_home, is_there
from runtime.split_files import parts_of, stem_of
from server.defaults import FILE
from server.interfaces import LoadError
from server.messages import LOCAL, ErrorCode
from server.models.state import ModelSpec

CONFIG = "config.json"
CT2 = "model.bin"  # the weights in the format of CTranslate2
SNAPSHOTS = "snapshots"  # the folder of the hub's cache that has a folder for each downloaded commit of a repository
READ = (".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt")  # suffixes of the files that loading reads


def locate(source: str, report: Callable[[float], None] = origins.unwatched, hub_token: str | None = None) -> Path:
    """Return the model's folder or its GGUF file. Call `report` with the completed fraction of a download. Raise LoadError if the source
    does not exist, cannot be downloaded, or names no single model."""
    path = _here(source)
    return _folder_or_gguf(_downloaded(source, report, hub_token) if path is None else path)


def is_here(source: str) -> bool:
    """Return whether a source names files on this machine. Downloads from the hub count as absent: they may be incomplete. Raise LoadError
    if the path cannot be read, or does not say which snapshot to load."""
    return _here(source) is not None


def _downloaded(source: str, report: Callable[[float], None], hub_token: str | None) -> Path:
    """Download a source that is not on this machine. Raise LoadError if it is written as a path, or if the download fails."""
    if source[:1] in ("/", ".", "~"):
        raise LoadError(ErrorCode.INVALID_SOURCE, f"{source!r} does not exist; expected a folder or a .gguf file")
    return origins.download(source, report, hub_token)


def _here(source: str) -> Path | None:
    """Return the path of a source that is on this machine, or None if it must be downloaded. Downloads from the hub count as absent. Raise
    LoadError if the path cannot be read, or does not say which snapshot to load."""
    path = at_home(source)
    if source == demo.NAME or is_former_demo(path):
        return demo.MODEL
    try:
        return _snapshot(path) if path.exists() else origins.here(source)
    except OSError as error:  # a name that is too long, or a folder that this user may not read
        raise LoadError(ErrorCode.INVALID_SOURCE, f"{source!r:.200} cannot be read: {error.strerror}") from error


def _snapshot(path: Path) -> Path:
    """Return the folder of a snapshot if the path is a repository's folder in the hub's cache, or the folder `snapshots` within it. Take
    the snapshot that `refs/main` names or, without that file, the only one. Raise LoadError if neither determines one. Return any other
    path unchanged."""
    snapshots = path if path.name == SNAPSHOTS else path / SNAPSHOTS
    if not snapshots.is_dir() or (path / CONFIG).exists():
        return path
    main = snapshots.parent / "refs" / "main"
    found = sorted(folder.name for folder in snapshots.iterdir() if folder.is_dir())
    named = [main.read_text().strip()] if main.is_file() else found
    if len(named) == 1 and named[0] in found:
        return snapshots / named[0]
    listed = ", ".join(found) or "none"
    raise LoadError(ErrorCode.LOAD_REFUSED, f"{path} does not say which of its snapshots to load: {listed}; name the folder of one")


def is_former_demo(path: Path) -> bool:
    """Return whether the path is a former location of the built-in model. State files of older versions name its installation folder, which
    an upgrade may have moved."""
    return path.is_absolute() and path.parts[-3:] == demo.MODEL.parts[-3:] and not path.exists()


def _folder_or_gguf(path: Path) -> Path:
    """Return the path that is loaded. A file, or a folder with config.json and safetensors files, is returned unchanged. For any other
    folder, return its GGUF file or the first part of it, or the folder itself if it has none. Files with the image encoder of a model
    (`mmproj`) do not count. Raise LoadError if the folder has several GGUF models, or if a file that is not GGUF lies beside a
    config.json."""
    if path.is_file():
        return _require_whole(path)
    if is_there(path / CONFIG) and any(path.glob("*.safetensors")):
        return path
    found = sorted(file for file in path.glob("*.gguf") if "mmproj" not in file.name)
    models = sorted({parts_of(file.name)[0] for file in found})
    if len(models) > 1:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{path} has several models: {', '.join(models)}; name one of the files")
    return found[0] if found else path


def _require_whole(path: Path) -> Path:
    """Return the path of a file. Raise LoadError if it is not GGUF and lies beside a config.json: it is one of the files of a model."""
    if path.suffix == ".gguf" or not is_there(path.with_name(CONFIG)):
        return path
    raise LoadError(ErrorCode.LOAD_REFUSED, f"{path} is one of the files of a model; name its folder, {path.parent}")


def files_of_model(path: Path) -> list[Path]:
    """Return the files of a model. In a folder and its direct subfolders, these are the files that loading may read (READ, and CT2 in the
    folder itself). For a GGUF file, these are all its parts that exist."""
    if not path.is_file():
        return sorted(_files_of(path))
    return [part for name in parts_of(path.name) if (part := path.with_name(name)).is_file()]


def defaults_of(path: Path) -> Path:
    """Return where the file with the defaults of a model is, if there is one: in its folder, or beside its GGUF file."""
    return path.with_name(f"{stem_of(path.name)}.{FILE}") if path.is_file() else path / FILE


def identity_of(source: str, hub_token: str | None = None) -> str:
    """Return a digest that changes when the files change. It is computed from the names, sizes, times and inodes of files on this machine;
    for a model to download, from its revision. The contents of files are not read. Return "" if the source is inaccessible."""
    digest = hashlib.sha256()
    try:
        if (path := _here(source)) is None:
            return "" if source[:1] in ("/", ".", "~") else origins.revision(source, hub_token)
        for file in (*files_of_model(path), *(file for file in [defaults_of(path)] if file.is_file())):
            status = file.stat()
            state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino)
            digest.update(f"{file.name}\0{state}\0".encode(errors="surrogateescape"))
    except (OSError, LoadError):  # a file is being replaced right now, or cannot be read
        return ""
    return digest.hexdigest()


BITS = {"auto": 16, "f32": 32, "bf16": 16, "int8": 8, "6bit": 7, "5bit": 6, "4bit": 5, "int4": 4}  # bits per weight, rounded to integers


def weigh(spec: ModelSpec) -> int:
    """Estimate the bytes of the weights that this machine holds from the sizes of the files, as if the files stored every weight in 16
    bits, and as if all stages of the model had the same number of weights. Return 0 if no files are on this machine, or if they cannot be
    read."""
    try:
        if (path := _here(spec.source)) is None:
            return 0
        num_bytes = sum(
            file.stat().st_size for file in files_of_model(path) if file.suffix in (".safetensors", ".gguf") or file.name == CT2
        )
    except (OSError, LoadError):  # a file is being replaced right now, or cannot be read
        return 0
    of_stages = num_bytes * spec.stages.count(LOCAL) // len(spec.stages) if spec.stages else num_bytes  # without those of other machines
    return round(of_stages * _bits_of(spec.quantize) / 16)


def _bits_of(form: str) -> float:
    """Return the bits of a weight in a form, which is a name or a number of bits. An unknown name, or a number that is not from 0 to 32,
    counts as 16 bits: the load refuses it."""
    kind = form.partition("-")[0]
    try:
        found = BITS.get(kind) or float(kind)
    except ValueError:
        return 16
    return found if 0 < found <= 32 else 16


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of its direct subfolders, where embedding models keep their modules."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from (file for file in path.iterdir() if file.suffix in READ and file.is_file())
        elif path.suffix in READ or path.name == CT2:
            yield path
