"""Make tokenizer files from a GGUF file and store them in the cache: `python -m deploy.model_loading.made_tokenizer FILE`.

A vocabulary of 260,000 tokens takes a second, and 150 MB for a moment. The front imports modules meanwhile, and what these create lies
between the objects of the vocabulary, so that the allocator could give back only a third. So a process of its own reads large vocabularies.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tokenizers

from deploy.cache import keep, kept, recall
from runtime.files import digest_of_sources
from runtime.launch import command

if TYPE_CHECKING:
    from compiler.frontend.gguf.file import GgufFile

LARGE = 100_000  # tokens; to read fewer takes less time than to start a process

COMMAND = command("deploy.model_loading.made_tokenizer")


def made_of(file: GgufFile) -> dict[str, bytes]:
    """Return the tokenizer files that are made from a GGUF file, from the cache if an earlier start stored them."""
    from compiler.frontend.gguf.tokenizer import tokenizer_files

    if (cache := kept()) is None:
        return tokenizer_files(file.metadata)
    place = cache.tokenizer_of(_key_of(file))
    if (stored := _stored(place)) is None and _is_large(file):
        # it fails if the file is damaged, which the lines below then report, or if the cache is full
        subprocess.run([*COMMAND, file.path], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        stored = _stored(place)
    if stored is not None:
        return stored
    made = tokenizer_files(file.metadata)
    keep(place, msgspec.msgpack.encode(made), "the tokenizer")
    return made


def is_made(file: GgufFile) -> bool:
    return (cache := kept()) is not None and cache.tokenizer_of(_key_of(file)).exists()


def _is_large(file: GgufFile) -> bool:
    from compiler.frontend.gguf.file import Texts

    texts = file.metadata.get("tokenizer.ggml.tokens")
    return isinstance(texts, Texts) and len(texts) >= LARGE


def _stored(place: Path) -> dict[str, bytes] | None:
    if (content := recall(place)) is not None:
        with suppress(msgspec.ValidationError):  # an earlier version stored something else
            return msgspec.msgpack.decode(content, type=dict[str, bytes])
    return None


def _key_of(file: GgufFile) -> str:
    """Return a digest of the file's metadata, and of the code that reads vocabularies."""
    import compiler.frontend.gguf
    import compiler.frontend.vocabulary

    readers = (Path(package.__path__[0]) for package in (compiler.frontend.gguf, compiler.frontend.vocabulary))
    parts = file.digest(), tokenizers.__version__, *map(digest_of_sources, readers)
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _main(path: str) -> None:
    from compiler.frontend.gguf.file import GgufFile
    from compiler.frontend.gguf.tokenizer import tokenizer_files

    file = GgufFile(Path(path))
    if (cache := kept()) is not None:
        keep(cache.tokenizer_of(_key_of(file)), msgspec.msgpack.encode(tokenizer_files(file.metadata)), "the tokenizer")


if __name__ == "__main__":
    _main(*sys.argv[1:])
