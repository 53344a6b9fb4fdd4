"""Read what several encoders of images have in common from the `vision_config` of a model."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation
from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import Fields
from compiler.frontend.vision import MOST_PATCHES, Connector, Tower, Vision

COMMON: Mapping[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SIGLIP: Mapping[str, Any] = {**COMMON, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
CLIP: Mapping[str, Any] = {**COMMON, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
PIXTRAL: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}
COLOURS = 3
PIXTRAL_NORM_EPS = 1e-5
KINDS = ("axial", "default")  # names of the rotation by row and column
# fields that belong to the parts of SigLIP and CLIP beside the encoder, or repeat what the weights show
UNREAD = (
    "model_type",
    "max_image_size",
    "size",
    "tie_word_embeddings",
    "use_base_siglip",
    "vision_use_head",
    "projection_dim",
    "vocab_size",
)


def read_tower(fields: Fields, tower: Tower, defaults: Mapping[str, Any], *, num_left: int = 0, **others: Any) -> Vision:
    """Return the encoder of a model with these fields. `defaults` are those of its `vision_config`. The last `num_left` layers do not run.
    `others` are the fields of Vision that the connector determines."""
    vision = fields.fields("vision_config", defaults)
    vision.skip(*UNREAD)
    size, heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    if size % heads:
        raise vision.error("num_attention_heads", f"a divisor of hidden_size ({size})")
    if vision.integer("num_channels", COLOURS) != COLOURS:
        raise vision.error("num_channels", str(COLOURS))
    crop_size, patch_size = vision.integer("image_size"), vision.integer("patch_size")
    if patch_size > crop_size:
        raise vision.error("patch_size", f"at most image_size ({crop_size})")
    if crop_size // patch_size % others["merge"]:
        raise vision.error("image_size", f"a number of patches of {patch_size} pixels that is a multiple of {others['merge']}")
    num_layers = vision.integer("num_hidden_layers", maximum=1000) - num_left
    if num_layers < 1:
        raise vision.error("num_hidden_layers", f"more than {num_left}")
    return Vision(
        tower=tower,
        crop_size=crop_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        activation=read_activation(vision, "hidden_act", defaults["hidden_act"]),
        norm_eps=vision.number("layer_norm_eps"),
        **others,
    )


def read_square(vision: Fields, size: int) -> dict[str, Any]:
    """Return the sizes of an encoder of images of any size, whose vectors have `size` elements."""
    for name in ("in_channels", "in_chans"):
        if vision.integer(name, COLOURS) != COLOURS:
            raise vision.error(name, str(COLOURS))
    heads, patch, merge = vision.integer("num_heads"), vision.integer("patch_size"), vision.integer("spatial_merge_size")
    if size % (4 * heads):
        raise vision.error("num_heads", f"a number that divides {size} into heads whose halves consist of pairs")
    if merge**2 > MOST_PATCHES:
        raise vision.error("spatial_merge_size", f"at most {isqrt(MOST_PATCHES)}")
    return {
        "crop_size": patch * merge,
        "patch_size": patch,
        "merge": merge,
        "hidden_size": size,
        "num_heads": heads,
        "num_frames": vision.integer("temporal_patch_size"),
        "theta": _theta(vision),
    }


def _theta(vision: Fields) -> float:
    """Return the base of the rotation by row and column."""
    rope = vision.fields("rope_parameters")
    if rope.text("rope_type", KINDS[0]) not in KINDS:
        raise rope.error("rope_type", " or ".join(KINDS))
    return rope.number("rope_theta", vision.number("rope_theta", 10_000.0))


def read_pixtral(fields: Fields, defaults: Mapping[str, Any], **others: Any) -> Vision:
    """Return the encoder of a model with Pixtral. `others` are the fields of Vision that the connector determines."""
    vision = fields.fields("vision_config", defaults)
    vision.skip("model_type", "image_size", "is_composition")  # the largest image, which the processor states
    heads, size, patch = vision.integer("num_attention_heads"), vision.integer("hidden_size"), vision.integer("patch_size")
    if vision.integer("num_channels", COLOURS) != COLOURS:
        raise vision.error("num_channels", str(COLOURS))
    if size % (4 * heads):
        raise vision.error("num_attention_heads", f"a number that divides {size} into heads whose halves consist of pairs")
    vision.require_equal("head_dim", size // heads, "hidden_size / num_attention_heads")
    if others["merge"] ** 2 > MOST_PATCHES:
        raise fields.error("spatial_merge_size", f"at most {isqrt(MOST_PATCHES)}")
    if fields.raw("vision_feature_layer", -1) != -1:
        raise fields.error("vision_feature_layer", "-1")
    return Vision(
        tower=Tower.PIXTRAL,
        crop_size=patch * others["merge"],
        patch_size=patch,
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size"),
        num_layers=vision.integer("num_hidden_layers", maximum=1000),
        num_heads=heads,
        activation=read_activation(vision, "hidden_act", defaults["hidden_act"]),
        norm_eps=PIXTRAL_NORM_EPS,
        theta=_theta(vision),
        connector=Connector.PERCEPTRON,
        qkv_bias=False,
        around=("", "[IMG_END]"),
        between="[IMG_BREAK]",
        **others,
    )


def require_windows(config: ModelConfig) -> None:
    """Raise ConfigError if the tokens of an image, which attend to all of them, may be more than a window holds."""
    vision, least = config.vision, min((window for window in config.windows if window is not None), default=None)
    if vision is None or not vision.both_ways or least is None:
        return
    if (most := vision.num_rows * vision.most_squares) > least:
        text = f"an image has up to {most} tokens, which attend to each other, and sliding_window is {least}; lower the tokens of an image"
        raise ConfigError(text)


def check_tokens(fields: Fields, vision: Vision, vocab_size: int, names: tuple[str, ...]) -> None:
    """Raise ConfigError if a token of images is not in the vocabulary. `names` are the fields that may name the image token."""
    if vision.image_token >= vocab_size:
        name = next((name for name in names if name in fields), names[0])
        raise fields.error(name, f"a token of the vocabulary, below {vocab_size}")
