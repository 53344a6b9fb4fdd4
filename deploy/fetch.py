"""A model's source becomes a folder on this machine: `demo` is the built-in model, a path is taken as it is, a hub id is
downloaded, and a download that broke off is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy import demo
from server.handle import LoadError


def unwatched(fraction: float) -> None:
    """For those who do not show it."""


def local_folder(source: str, report: Callable[[float], None] = unwatched) -> Path:
    """`report` is told the fraction of a download that has come."""
    path = Path(source).expanduser()
    if source == demo.NAME or is_former_demo(path):
        return demo.MODEL
    if path.exists():
        return path
    if source[:1] in ("/", ".", "~"):
        raise LoadError("invalid_source", f"{source!r} does not exist; expected a folder or a .gguf file")
    try:
        from deploy.hub import download
    except ImportError:
        raise LoadError(
            "invalid_source",
            f"{source!r} is no path here, and to download it from the hub the extra is missing: pip install 'relaxserve[hub]'",
        ) from None
    try:
        return download(source, report)
    except Exception as error:  # the hub's own tree of errors: network, rights, names
        raise LoadError("fetch_failed", f"{source!r} is no path here and the hub did not deliver it: {error}") from error


def is_former_demo(path: Path) -> bool:
    """State files of older versions name the built-in model by the folder it was installed in, which an upgrade may have moved."""
    return path.is_absolute() and path.parts[-3:] == demo.MODEL.parts[-3:] and not path.exists()


def gguf_or_folder(path: Path) -> Path:
    """The GGUF file where that is all a folder has."""
    if path.is_file() or (path / "config.json").exists():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise LoadError("load_refused", f"{path} has several models: {names}; name one of the files")
    return found[0] if found else path
