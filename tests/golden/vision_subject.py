"""Describe small random vision models, and the conversations in which their goldens are made (`make_vision.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.golden.media import SIZES, picture
from tests.golden.small_model import SmallModel

LETTERS = "ĠĊabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:;-_'\"()[]{}<>/|=+*#"  # byte-level BPE writes a space as Ġ
CONVERSATIONS = (("What is it?", [0]), ("Compare.", [1, 2]), ("Hello!", []))  # a text, and the images before it
CONTINUATION = 64
PATCH = 8
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
}
ENCODER: Mapping[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
PIXELS: Mapping[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "rescale_factor": 1 / 255,
}


@dataclass(frozen=True)
class Subject(SmallModel):
    kind = "vision_models"

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    special: tuple[str, ...]  # texts of the special tokens: the first begins a text, the second ends an answer
    image_text: str
    template: str
    rows: int  # number of tokens of a crop, or of a square if crops may have any size
    classes: tuple[str, str]  # classes of transformers: the processor, and the image processor on Pillow
    options: Mapping[str, Any]  # options of the processor
    special_names: Mapping[str, str]  # attributes of the tokenizer, and the special tokens that they name
    between: str = ""  # special token between two rows of tokens of a crop; empty: there is none
    square: int = 0  # pixels of an edge of a square of a crop that may have any size; 0: crops have one size

    @property
    def any_size(self) -> bool:
        return self.square > 0

    @property
    def crop(self) -> int:
        """The number of pixels of an edge of a crop, or of a square if crops may have any size."""
        if self.any_size:
            return self.square
        size = self.config["vision_config"]["image_size"]
        return size[0] if isinstance(size, list) else size

    @property
    def tokens(self) -> list[str]:
        return [*LETTERS, *self.special]

    @property
    def image(self) -> int:
        return self.tokens.index(self.image_text)

    @property
    def files(self) -> list[bytes]:
        """The images as files."""
        return [picture(number) for number in range(len(SIZES))]


def token_of(special: tuple[str, ...], text: str) -> int:
    return len(LETTERS) + special.index(text)


def text_of(model_type: str, epsilon: float, special: tuple[str, ...]) -> dict[str, Any]:
    """Return the config of a decoder. The second special token ends an answer."""
    sizes = {"vocab_size": len(LETTERS) + len(special), "eos_token_id": len(LETTERS) + 1}
    return {**TEXT, "model_type": model_type, "rms_norm_eps": epsilon, **sizes}
