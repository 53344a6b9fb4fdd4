"""Make llguidance's tokenizer, which grammars share, from the content of tokenizer.json."""

from __future__ import annotations

import msgspec
from llguidance import LLTokenizer

from server.constraints.process.wire import GrammarSettings


def tokenizer_of(tokenizer_json: bytes, settings: GrammarSettings) -> LLTokenizer | str:
    """Return the tokenizer, or an error message if it cannot be used. The tokenizer gets the model's number of tokens. If llguidance
    refuses this number, the tokenizer keeps its own: some vision models have tokens for images, for which their decoder has no
    embedding."""
    fault = ""
    for n_vocab in (settings.vocab_size, None):
        try:
            return LLTokenizer(untruncated(tokenizer_json).decode(), n_vocab=n_vocab, eos_token=settings.eos_ids or None)
        except (ValueError, RecursionError) as error:
            fault = f"constraints cannot use this model's tokenizer: {error}"
    return fault


def untruncated(tokenizer_json: bytes) -> bytes:
    """Return the content of tokenizer.json without its settings for truncation and padding, which come from the training run."""
    fields = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in ("truncation", "padding")})
