"""The tokenizer of a source. The front needs nothing else of a model's files, so the compiler is not imported for it."""

from __future__ import annotations

from pathlib import Path

from deploy.fetch import gguf_or_folder, local_folder
from server.handle import LoadError
from server.text.tokenizer import ModelFilesError, Tokenizer


def load_tokenizer(source: str, hub_token: str | None = None) -> Tokenizer:
    path = gguf_or_folder(local_folder(source, hub_token=hub_token))
    try:
        return _of_file(path) if path.is_file() else Tokenizer.from_dir(path)
    except ModelFilesError as error:
        raise LoadError("load_refused", f"{path.name}: {error}") from error


def _of_file(path: Path) -> Tokenizer:
    from compiler.frontend.errors import ModelError
    from compiler.frontend.gguf_model import GgufModel

    try:
        return Tokenizer(GgufModel(path).hub_files())
    except ModelError as error:
        raise LoadError("load_refused", str(error)) from error
