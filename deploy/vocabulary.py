"""The tokenizer of a source. The front needs nothing else of a model's files, so the compiler is not imported for it."""

from __future__ import annotations

from deploy.fetch import gguf_or_folder, local_folder
from server.handle import LoadError
from server.text.tokenizer import Tokenizer


def load_tokenizer(source: str) -> Tokenizer:
    path = gguf_or_folder(local_folder(source))
    if not path.is_file():
        return Tokenizer.from_dir(path)
    from compiler.frontend.errors import ModelError
    from compiler.frontend.gguf_model import GgufModel

    try:
        return Tokenizer(GgufModel(path).hub_files())
    except ModelError as error:
        raise LoadError("invalid_model", str(error)) from error
