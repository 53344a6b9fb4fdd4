"""Find a model's source on this machine: `demo` is the built-in model, a path is taken as it is, a hub id is downloaded, and a download
that broke off is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from deploy import demo
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.models.state import ModelSpec

READ = (".json", ".safetensors", ".gguf", ".jinja")  # the files of a folder that loading reads


def unwatched(fraction: float) -> None:
    """For those who do not show it."""


def locate(source: str, report: Callable[[float], None] = unwatched, hub_token: str | None = None) -> Path:
    """The model's folder, or its GGUF file. `report` is told the fraction of a download that has come."""
    path = _here(source)
    return _folder_or_gguf(_downloaded(source, report, hub_token) if path is None else path)


def _downloaded(source: str, report: Callable[[float], None], hub_token: str | None) -> Path:
    if source[:1] in ("/", ".", "~"):
        raise LoadError(ErrorCode.INVALID_SOURCE, f"{source!r} does not exist; expected a folder or a .gguf file")
    return download_from_hub(source, report, hub_token)


def download_from_hub(source: str, report: Callable[[float], None] = unwatched, hub_token: str | None = None) -> Path:
    """What a hub id means here: a folder, or a GGUF file. Raises LoadError."""
    library = hub(f"{source!r} is no path here, and to download it from the hub")
    try:
        return library.download(source, report, hub_token)
    except Exception as error:  # the hub's own tree of errors: network, rights, names
        raise LoadError(ErrorCode.FETCH_FAILED, f"{source!r} is no path here and the hub did not deliver it: {error}") from error


def hub(purpose: str = "for models of the hub") -> ModuleType:
    """`deploy.model_loading.hub`, where its extra is installed. Raises LoadError."""
    try:
        return import_module("deploy.model_loading.hub")
    except ImportError:
        raise LoadError(ErrorCode.INVALID_SOURCE, f"{purpose} the extra is missing: pip install 'relaxserve[hub]'") from None


def _here(source: str) -> Path | None:
    path = Path(source).expanduser()
    if source == demo.NAME or is_former_demo(path):
        return demo.MODEL
    return path if path.exists() else None


def is_former_demo(path: Path) -> bool:
    """State files of older versions name the built-in model by the folder it was installed in, which an upgrade may have moved."""
    return path.is_absolute() and path.parts[-3:] == demo.MODEL.parts[-3:] and not path.exists()


def _folder_or_gguf(path: Path) -> Path:
    """The GGUF file where that is all a folder has."""
    if path.is_file() or (path / "config.json").exists():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{path} has several models: {names}; name one of the files")
    return found[0] if found else path


def identity_of(source: str, hub_token: str | None = None) -> str:
    """A digest of what tells one state of the files from the next: names, sizes, times and places on disk, or the hub's revision. Reads
    no file. Empty where the source cannot be looked at."""
    if (path := _here(source)) is None:
        return "" if source[:1] in ("/", ".", "~") else _revision_of(source, hub_token)
    digest = hashlib.sha256()
    try:
        for file in [path] if path.is_file() else sorted(_files_of(path)):
            status = file.stat()
            state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino)
            digest.update(f"{file.name}\0{state}\0".encode(errors="surrogateescape"))
    except OSError:  # replaced right now
        return ""
    return digest.hexdigest()


BITS = {"auto": 16, "f32": 32, "bf16": 16, "int8": 8, "int4": 4}


def weigh(spec: ModelSpec) -> int:
    """About what the weights will take: the sizes of the files, as if they had 16 bits. 0 where there are none yet."""
    path = _here(spec.source)
    if path is None:
        return 0
    try:
        files = [path] if path.is_file() else list(_files_of(path))
        num_bytes = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf"))
    except OSError:  # replaced right now
        return 0
    return num_bytes * BITS.get(spec.quantize.partition("-")[0], 16) // 16


def _files_of(folder: Path) -> Iterator[Path]:
    """Of the folder and those in it: modules of an embedding model lie one below."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from (file for file in path.iterdir() if file.suffix in READ and file.is_file())
        elif path.suffix in READ:
            yield path


def _revision_of(source: str, hub_token: str | None) -> str:
    try:
        return hub().revision(source, hub_token)
    except LoadError:  # without the extra
        return ""
