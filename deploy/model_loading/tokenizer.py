"""Read the tokenizer of a model's files. The front imports this module, so the module imports no part of the compiler except its errors
and, on demand, the readers of vocabularies. A worker reads only the parts that its engine needs, because the front builds the tokenizer at
the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.frontend.errors import ModelError
from deploy.model_loading.locate import defaults_of, locate
from deploy.model_loading.made_tokenizer import is_made, made_of
from server.defaults import FILE as DEFAULTS
from server.defaults import BesideModel, Defaults
from server.free_memory import return_free_memory
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.text.templates.errors import TemplateUnavailable
from server.text.tokenizer_files import TOKENIZER, ModelFilesError, TokenizerFiles, missing, read_file, read_files

if TYPE_CHECKING:
    from compiler.frontend.gguf.file import GgufFile
    from server.text.tokenizer import Tokenizer


NO_DEFAULTS = Defaults()


@dataclass(frozen=True)
class TokenizerSource:
    """The files that describe a model's tokenizer. The files are read once, at first use, but `defaults` reads the file of defaults at each
    call. The methods raise LoadError if a file that they need is missing or malformed."""

    path: Path
    gguf: GgufFile | None = None  # the file, if the model is a GGUF file
    own: Defaults = NO_DEFAULTS  # defaults that take precedence over those of the file beside the model

    def build(self) -> Tokenizer:
        from server.text.tokenizer import Tokenizer

        with _refusal(self.path):
            tokenizer = Tokenizer(self._files.contents)
            return tokenizer.with_defaults(self.own) if self.own.given else tokenizer

    def files(self) -> TokenizerFiles:
        """Return the files, which are made if the model is a GGUF file."""
        with _refusal(self.path):
            self._files.tokenizer()  # raises an error if the tokenizer is missing
            return self._files

    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer."""
        with _refusal(self.path):
            return self._files.eos_ids() if self.gguf is None else _ends_of(self.gguf)

    def defaults(self) -> BesideModel:
        """Return the defaults that the file beside the model sets, or none if there is no file. The file is read at each call."""
        with _refusal(self.path):
            return TokenizerFiles(_defaults_in(defaults_of(self.path))).defaults()

    def reader(self) -> Callable[[], bytes]:
        """Return a function that returns the content of tokenizer.json, which constraints need. The function may be called once. Whatever
        must be computed is computed now, so that a call only reads and delays no requests."""
        with _refusal(self.path):
            if self.gguf is None or not is_made(self.gguf):
                return [self._files.tokenizer()].pop  # holds no memory after the call
            gguf = self.gguf
            return lambda: made_of(gguf)[TOKENIZER]

    @cached_property
    def _files(self) -> TokenizerFiles:
        return _files_in(self.path) if self.gguf is None else _files_of(self.gguf, defaults_of(self.path))


def load_tokenizer(source: str, hub_token: str | None = None) -> Tokenizer:
    """Load the tokenizer of a source without opening the other files of the model. The front uses this."""
    tokenizer = _located(source, hub_token).build()
    return_free_memory()
    return tokenizer


def load_files(source: str) -> TokenizerFiles:
    """Return the files that describe the tokenizer of a source, for programs that make prompts in place of the server."""
    return _located(source, None).files()


def _located(source: str, hub_token: str | None) -> TokenizerSource:
    path = locate(source, hub_token=hub_token)
    with _refusal(path):
        return TokenizerSource(path, _open_gguf(path) if path.is_file() else None)


def _open_gguf(path: Path) -> GgufFile:
    from compiler.frontend.gguf.file import GgufFile

    return GgufFile(path)


def _files_in(folder: Path) -> TokenizerFiles:
    """Read the files of a folder. If tokenizer.json is missing, make it from the files of a vocabulary. Raise ModelFilesError if there are
    none that can be read."""
    files = TokenizerFiles.from_dir(folder)
    if TOKENIZER in files.contents:
        return files
    from compiler.frontend.vocabulary.folder import NAMES, Unreadable, tokenizer_files

    try:
        return TokenizerFiles({**files.contents, **tokenizer_files(read_files(folder, NAMES))})
    except Unreadable as error:
        raise missing(str(error)) from error


def _files_of(file: GgufFile, defaults: Path) -> TokenizerFiles:
    """Make the files from a GGUF file, and add the file of defaults if there is one."""
    return TokenizerFiles({**made_of(file), **_defaults_in(defaults)})


def _defaults_in(file: Path) -> dict[str, bytes]:
    """Return the content of the file with a model's defaults, by the name that it has in a folder; none if there is no file."""
    content = read_file(file)
    return {} if content is None else {DEFAULTS: content}


def _ends_of(file: GgufFile) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, without building the tokenizer."""
    from compiler.frontend.gguf.tokenizer import end_ids

    return end_ids(file.metadata)


@contextmanager
def _refusal(path: Path) -> Generator[None]:
    """Raise a LoadError in place of an error of the model's files inside the `with`, or if no process could render their chat template."""
    try:
        yield
    except ModelFilesError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{path.name}: {error}") from error
    except ModelError as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error
    except TemplateUnavailable as error:
        raise LoadError(ErrorCode.LOAD_FAILED, f"{path.name}: {error}") from error
