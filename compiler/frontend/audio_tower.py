"""Read the `audio_config` of a model that hears audio in conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.frontend.audio import Listening
from compiler.frontend.config import read_activation
from compiler.frontend.fields import Fields

# Names of the encoder's sizes in files of Whisper and Qwen -> their names in files of Voxtral.
SIZES: Mapping[str, str] = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
LARGE_V3: Mapping[str, Any] = {  # the values of absent fields, as in transformers: those of Whisper-large-v3
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
UNREAD = (
    "model_type",
    "tie_word_embeddings",
    "vocab_size",
    "head_dim",
    "num_key_value_heads",
    "encoder_layerdrop",
    "layerdrop",
    "init_std",
)


def read_listening(fields: Fields, *, merge: int | None = None, window: str | int = "max_source_positions", **others: Any) -> Listening:
    """Return the encoder of a model with these fields. `merge` is the number of frames of a row; None: as many as fill a vector of the
    intermediate size of the encoder's MLP, as in Voxtral. `window` is the value of `num_positions` in Listening, or the name of the field
    that states it. `others` are the fields of Listening that the family determines. Raise ConfigError if a value is not supported."""
    inner = fields.fields("audio_config")
    names = {name: other if other in inner.values and name not in inner.values else name for name, other in SIZES.items()}
    inner.fill(**{names.get(name, name): value for name, value in LARGE_V3.items()})
    inner.skip(*UNREAD, *SIZES.values())
    size_name, layers_name, heads_name, wide_name = names.values()
    size, heads, wide = (inner.integer(name) for name in (size_name, heads_name, wide_name))
    if size % heads:
        raise inner.error(heads_name, f"a divisor of {size_name} ({size})")
    if others.get("sinusoids") and (size % 2 or size < 4):
        raise inner.error(size_name, "an even number, at least 4")
    inner.require(scale_embedding=False)
    if read_activation(inner, "activation_function", "gelu") != "gelu":
        raise inner.error("activation_function", "gelu")
    if merge is None and wide % size:
        raise inner.error(wide_name, f"a multiple of {size_name} ({size})")
    each = merge or wide // size
    return Listening(
        num_mels=inner.integer("num_mel_bins", maximum=1 << 12),
        num_positions=_read_window(inner, window, each),
        hidden_size=size,
        intermediate_size=wide,
        num_layers=inner.integer(layers_name, maximum=1000),
        num_heads=heads,
        merge=each,
        **others,
    )


def _read_window(inner: Fields, window: str | int, each: int) -> int:
    """Return `num_positions` of Listening. Raise ConfigError if a field states it, and the number is no multiple of `each`, the number of
    frames of a token."""
    if isinstance(window, int):
        inner.skip("max_source_positions")
        return window
    positions = inner.integer(window, maximum=inner.integer("max_source_positions", maximum=1 << 16))
    if positions % each:
        raise inner.error(window, f"a multiple of {each}, the frames of a token")
    return positions


def read_token(fields: Fields, vocab_size: int, default: int | None) -> int:
    """Return the audio token, for which newer and older files have different fields. `default` is the token if no field states one. Raise
    ConfigError if there is neither a field nor a default, or if the token is not in the vocabulary."""
    name = "audio_token_index" if "audio_token_index" in fields else "audio_token_id"
    token = fields.integer(name, minimum=0) if name in fields or default is None else default
    if token >= vocab_size:
        raise fields.error(name, f"a token of the vocabulary, below {vocab_size}")
    return token
