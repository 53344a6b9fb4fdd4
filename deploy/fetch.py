"""A model's source becomes a folder on this machine: a path as it is, a hub id by download, resumed where one broke off."""

from __future__ import annotations

from pathlib import Path

from server.handle import LoadError

# What a served model needs; no pickles, no duplicates in other formats or under other names.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
DUPLICATES = ["consolidated*", "original/*", "onnx/*", "openvino/*", "coreml/*"]


def local_folder(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LoadError(
            "invalid_source",
            f"{source!r} is no path here, and to download it from the hub the extra is missing: pip install 'relaxserve[hub]'",
        ) from None
    try:
        return Path(snapshot_download(source, allow_patterns=PATTERNS, ignore_patterns=DUPLICATES))
    except Exception as error:  # the hub's own tree of errors: network, rights, names
        raise LoadError("fetch_failed", f"{source!r} is no path here and the hub did not deliver it: {error}") from error


def gguf_or_folder(path: Path) -> Path:
    """The GGUF file where that is all a folder has."""
    if path.is_file() or (path / "config.json").exists():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise LoadError("load_refused", f"{path} has several models: {names}; name one of the files")
    return found[0] if found else path
