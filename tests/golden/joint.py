"""Describe small random models that embed texts and images in one space, whose goldens `make_joint.py` makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.golden.media import SIZES, picture
from tests.golden.small_model import SmallModel
from tests.golden.vision_subject import ENCODER, LETTERS, PIXELS

TEXTS = ("a cat", "Two dogs, and a red ball!", "x")
SIZE = 40  # elements of a vector
TEXT: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": SIZE,
}


@dataclass(frozen=True)
class Joint(SmallModel):
    kind = "joint_models"

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    special: tuple[str, ...]  # texts of the special tokens
    around: tuple[tuple[str, ...], tuple[str, ...]]  # special tokens before and after a text
    padding: str  # special token with which texts are padded
    length: int  # tokens of the longest text
    is_padded: bool  # whether texts are padded to that length
    cutter: str  # class of transformers that cuts images, on Pillow
    square: int = 0  # pixels of an edge of a square of a crop that may have any size; 0: crops have one size

    @property
    def tokens(self) -> list[str]:
        return [*LETTERS, *self.special]

    @property
    def files(self) -> list[bytes]:
        """The images as files."""
        return [picture(number) for number in range(len(SIZES))]


def _clip() -> Joint:
    special = ("<|startoftext|>", "<|endoftext|>")
    ids = {"bos_token_id": len(LETTERS), "eos_token_id": len(LETTERS) + 1, "pad_token_id": len(LETTERS) + 1}
    text = {**TEXT, "model_type": "clip_text_model", "vocab_size": len(LETTERS) + 2, "max_position_embeddings": 40, **ids}
    vision = {**ENCODER, "model_type": "clip_vision_model", "image_size": 52, "patch_size": 16, "projection_dim": SIZE}
    processor = {
        **PIXELS,
        "crop_size": {"height": 52, "width": 52},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "image_processor_type": "CLIPImageProcessor",
        "resample": 3,
        "size": {"shortest_edge": 52},
    }
    return Joint(
        "clip",
        config={
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "logit_scale_init_value": 2.6592,
            "projection_dim": SIZE,
            "text_config": text,
            "vision_config": vision,
        },
        processor=processor,
        special=special,
        around=((special[0],), (special[1],)),
        padding=special[1],
        length=40,
        is_padded=False,
        cutter="clip.image_processing_pil_clip.CLIPImageProcessorPil",
    )


def _siglip() -> Joint:
    special = ("<pad>", "</s>")
    text = {**TEXT, "model_type": "siglip_text_model", "vocab_size": len(LETTERS) + 2, "max_position_embeddings": 32}
    del text["projection_dim"]
    vision = {**ENCODER, "model_type": "siglip_vision_model", "hidden_size": SIZE, "image_size": 48, "patch_size": 16}
    processor = {
        **PIXELS,
        "do_convert_rgb": None,
        "image_processor_type": "SiglipImageProcessor",
        "resample": 2,
        "size": {"height": 48, "width": 48},
    }
    return Joint(
        "siglip",
        config={
            "architectures": ["SiglipModel"],
            "model_type": "siglip",
            "text_config": {**text, "projection_size": SIZE},
            "vision_config": vision,
        },
        processor=processor,
        special=special,
        around=((), (special[1],)),
        padding=special[0],
        length=32,
        is_padded=True,
        cutter="siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
    )


def _siglip2() -> Joint:
    """Return a model whose table of positions has fewer entries than some crops have patches."""
    like = _siglip()
    text = {**like.config["text_config"], "model_type": "siglip2_text_model"}
    vision = {**ENCODER, "model_type": "siglip2_vision_model", "hidden_size": SIZE, "num_patches": 36, "patch_size": 8}
    config = {"architectures": ["Siglip2Model"], "model_type": "siglip2", "text_config": text, "vision_config": vision}
    processor = {
        **PIXELS,
        "do_convert_rgb": None,
        "image_processor_type": "Siglip2ImageProcessor",
        "max_num_patches": 60,
        "patch_size": 8,
        "resample": 2,
    }
    cutter = "siglip2.image_processing_pil_siglip2.Siglip2ImageProcessorPil"
    return replace(like, name="siglip2", config=config, processor=processor, cutter=cutter, square=8)


SUBJECTS = {subject.name: subject for subject in (_clip(), _siglip(), _siglip2())}
