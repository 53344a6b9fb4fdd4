"""Make tokenizer files from a GGUF file, and store them in the cache. `python -m deploy.model_loading.made_tokenizer FILE` writes them to
its standard output.

Reading a vocabulary of 260,000 tokens takes a second and, for a moment, 150 MB. The front imports modules at the same time. Their objects
lie between those of the vocabulary, so the allocator could return only a third of this memory to the system. Therefore a separate process
reads large vocabularies.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tokenizers

from deploy.cache import keep, kept
from runtime import generated_code
from runtime.files import digest_of_sources
from runtime.launch import command
from runtime.sealed import recall
from server.signal_names import describe_status

if TYPE_CHECKING:
    from compiler.frontend.gguf.file import GgufFile

log = logging.getLogger(__name__)

LARGE = 100_000  # tokens; to read fewer takes less time than to start a process

COMMAND = command("deploy.model_loading.made_tokenizer")


def made_of(file: GgufFile) -> dict[str, bytes]:
    """Return the tokenizer files that are made from a GGUF file. Take them from the cache if an earlier start stored them, otherwise make
    and store them. Raise ModelError if the file is damaged or its vocabulary is not supported."""
    from compiler.frontend.gguf.tokenizer import tokenizer_files

    if (cache := kept()) is None:
        return tokenizer_files(file.metadata)
    place = cache.tokenizer_of(_key_of(file))
    if (content := recall(place)) is not None and (stored := _unpacked(content)) is not None:
        return stored
    content = _made_apart(file) if _is_large(file) else None
    if content is None:
        content = msgspec.msgpack.encode(tokenizer_files(file.metadata))
    keep(place, content, "the tokenizer")
    return msgspec.msgpack.decode(content, type=dict[str, bytes])


def is_made(file: GgufFile) -> bool:
    """Return whether the cache has tokenizer files that were made from a GGUF file."""
    return (cache := kept()) is not None and cache.tokenizer_of(_key_of(file)).exists()


def _is_large(file: GgufFile) -> bool:
    """Return whether the vocabulary is so large that a separate process should read it."""
    from compiler.frontend.gguf.file import Texts

    texts = file.metadata.get("tokenizer.ggml.tokens")
    return isinstance(texts, Texts) and len(texts) >= LARGE


def _made_apart(file: GgufFile) -> bytes | None:
    """Return the packed tokenizer files that a process of its own makes. Return None if that process fails: this process then makes the
    files itself, and reports a damaged file."""
    try:
        done = subprocess.run([*COMMAND, file.path], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:  # for example, there is too little memory to start a process
        log.debug("the process that reads the vocabulary of %s cannot be started: %s", file.path, error.strerror)
        return None
    if done.returncode == 0:
        return done.stdout
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    log.debug("the process that reads the vocabulary of %s ended early (%s): %s", file.path, describe_status(done.returncode), last)
    return None


def _unpacked(content: bytes) -> dict[str, bytes] | None:
    with suppress(msgspec.DecodeError):  # an earlier version stored something else
        return msgspec.msgpack.decode(content, type=dict[str, bytes])
    return None


def _key_of(file: GgufFile) -> str:
    """Return a digest of the file's metadata, of the code that reads vocabularies, and of the version of the library tokenizers."""
    import compiler.frontend.gguf
    import compiler.frontend.vocabulary

    readers = (Path(package.__path__[0]) for package in (compiler.frontend.gguf, compiler.frontend.vocabulary))
    parts = file.digest(), tokenizers.__version__, *map(digest_of_sources, readers)
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _main(path: str) -> None:
    from compiler.frontend.gguf.file import GgufFile
    from compiler.frontend.gguf.tokenizer import tokenizer_files

    sys.stdout.buffer.write(msgspec.msgpack.encode(tokenizer_files(GgufFile(Path(path)).metadata)))
    generated_code.keep()


if __name__ == "__main__":
    _main(*sys.argv[1:])
