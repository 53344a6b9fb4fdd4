"""Read the tokenizer of a model's files. The front imports this module, so the module imports no part of the compiler except the GGUF
reader. A worker only reads what its engine needs, because the front builds the tokenizer while the worker loads the model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.frontend.errors import ModelError
from deploy.model_loading.locate import locate
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import ModelFilesError, TokenizerFiles

if TYPE_CHECKING:
    from compiler.frontend.gguf.file import GgufFile
    from deploy.model_loading.files import ModelFiles


def tokenizer_of(files: ModelFiles) -> Tokenizer:
    with _refusal(files.path):
        return Tokenizer.from_dir(files.path) if files.gguf is None else _of_gguf(files.gguf)


def eos_ids_of(files: ModelFiles) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer."""
    with _refusal(files.path):
        return TokenizerFiles.from_dir(files.path).eos_ids() if files.gguf is None else _ends_of(files.gguf)


def tokenizer_json_of(files: ModelFiles) -> str:
    """Return the text of tokenizer.json, which constraints need."""
    with _refusal(files.path):
        return (TokenizerFiles.from_dir(files.path) if files.gguf is None else _files_of(files.gguf)).untruncated()


def load_tokenizer(source: str, hub_token: str | None = None) -> Tokenizer:
    """Load the tokenizer of a source without opening the other files of the model. The front uses this."""
    path = locate(source, hub_token=hub_token)
    with _refusal(path):
        return _of_gguf(_open_gguf(path)) if path.is_file() else Tokenizer.from_dir(path)


def _open_gguf(path: Path) -> GgufFile:
    from compiler.frontend.gguf.file import GgufFile

    return GgufFile(path)


def _of_gguf(file: GgufFile) -> Tokenizer:
    return Tokenizer(_files_of(file).contents)


def _files_of(file: GgufFile) -> TokenizerFiles:
    from compiler.frontend.gguf.tokenizer import tokenizer_files

    return TokenizerFiles(tokenizer_files(file.metadata))


def _ends_of(file: GgufFile) -> tuple[int, ...]:
    from compiler.frontend.gguf.tokenizer import end_ids

    return end_ids(file.metadata)


@contextmanager
def _refusal(path: Path) -> Generator[None]:
    try:
        yield
    except ModelFilesError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{path.name}: {error}") from error
    except ModelError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error
