"""Read the built-in texts, and texts that a user names, as tokens of a model."""

from __future__ import annotations

from pathlib import Path

from deploy.model_loading.tokenizer import TokenizerSource
from runtime.files import regular
from server.interfaces import LoadError
from server.messages import ErrorCode

CALIBRATION = Path(__file__).with_name("calibration.txt")  # prose, dialogue, code, tables and several languages
MOST_BYTES = 1 << 20  # largest text that a user may name; a longer one is cut
LEAST_TOKENS = 64


def read_text(path: Path) -> bytes:
    """Return the first MOST_BYTES bytes of a file. Raise LoadError if the file cannot be read."""
    try:
        with regular(path).open("rb") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise LoadError(ErrorCode.INVALID_VALUE, f"the text {path} cannot be read: {error.strerror or error}") from error


def tokens_of(tokenizer: TokenizerSource, path: Path) -> list[int]:
    """Return the tokens of the text in a file. Raise LoadError if they are fewer than LEAST_TOKENS."""
    tokens = tokenizer.build().encode(read_text(path).decode(errors="replace"), False)
    if len(tokens) < LEAST_TOKENS:
        raise LoadError(ErrorCode.INVALID_VALUE, f"the text {path} has {len(tokens)} tokens, expected at least {LEAST_TOKENS}")
    return tokens
