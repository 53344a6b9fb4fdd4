"""The attention heads of a speech model that show which frames of the audio a token belongs to. Publishers name these heads in a file
beside the weights."""

from __future__ import annotations

from pathlib import Path

from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import Fields, read_json
from runtime.files import is_there

FILES = ("generation_config.json", "config.json")  # the files in which transformers and CTranslate2 name the heads
FIELD = "alignment_heads"

Heads = tuple[tuple[int, int], ...]  # pairs of a layer and a head


def default_heads(num_layers: int, num_heads: int) -> Heads:
    """Return all heads of the later half of the layers, the default of Whisper's authors."""
    return tuple((layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads))


def read_heads(folder: Path, num_layers: int, num_heads: int) -> Heads:
    """Return the heads, sorted, that the field FIELD names in the first file of FILES that has this field. If no file has the field, or if
    it names layers that the model does not have, return those of `default_heads`. Raise ConfigError if a file is no JSON object, if the
    field is anything but a list of different heads, if the list is empty, or if a head's number is too large for the model."""
    for name in FILES:
        found = Fields(read_json(folder / name), name).raw(FIELD) if is_there(folder / name) else None
        if found is None:
            continue
        heads = {pair for pair in map(_pair, found) if pair is not None} if isinstance(found, list) else set[tuple[int, int]]()
        if len(heads) < 1 or len(heads) != len(found) or any(head >= num_heads for _, head in heads):
            text = f"{folder / name}: {FIELD} is {found!r:.80}; expected pairs of a layer and a head below {num_heads}"
            raise ConfigError(text)
        # Some models have only a few layers of another model's decoder, but the whole list of that model's heads.
        return tuple(sorted(heads)) if all(layer < num_layers for layer, _ in heads) else default_heads(num_layers, num_heads)
    return default_heads(num_layers, num_heads)


def _pair(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one >= 0 for one in value):
        return None
    return value[0], value[1]
