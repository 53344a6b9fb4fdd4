"""Read the fields that several encoders of images have in common from the `vision_config` of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from compiler.frontend.config import ModelConfig, read_activation
from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import REQUIRED, Fields
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
KINDS = ("axial", "default")  # values of `rope_type` that stand for RoPE by row and column
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


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names, in a `vision_config`, of the fields that all encoders have."""

    size: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    colours: tuple[str, ...] = ("num_channels",)
    activation: str = "hidden_act"
    norm_eps: str = "layer_norm_eps"


QWEN_NAMES = FieldNames(heads="num_heads", layers="depth", colours=("in_channels", "in_chans"))


def read_tower(fields: Fields, tower: Tower, defaults: Mapping[str, Any], *, num_left: int = 0, **others: Any) -> Vision:
    """Return the encoder of a model whose crops have one size. `defaults` are the values of absent fields of its `vision_config`. The last
    `num_left` layers do not run. `others` are the fields of Vision that the family or the connector determines. Raise ConfigError if the
    fields contradict each other, or ask for something that is not supported."""
    vision = fields.fields("vision_config", defaults)
    vision.skip(*UNREAD)
    common = _common(vision, FieldNames(), defaults, num_left=num_left, **others)
    crop_size, patch_size = vision.integer("image_size"), common["patch_size"]
    if patch_size > crop_size:
        raise vision.error("patch_size", f"at most image_size ({crop_size})")
    if crop_size // patch_size % common["merge"]:
        raise vision.error("image_size", f"a number of patches of {patch_size} pixels that is a multiple of {common['merge']}")
    return Vision(tower=tower, crop_size=crop_size, **common)


def read_any_size(
    inner: Fields, tower: Tower, defaults: Mapping[str, Any], names: FieldNames, *, rotates: bool = True, **others: Any
) -> Vision:
    """Return the encoder of a model whose crops have any size. `inner` are the fields of its `vision_config`, with these `defaults` and
    `names`. `rotates` says whether RoPE rotates one half of each head by the row, and the other half by the column. `others` are the fields
    of Vision that the family or the connector determines. Raise ConfigError if the fields contradict each other, or ask for something that
    is not supported."""
    common = _common(inner, names, defaults, rotates=rotates, **others)
    return Vision(tower=tower, crop_size=common["patch_size"] * common["merge"], **common)


def _common(
    inner: Fields, names: FieldNames, defaults: Mapping[str, Any], *, num_left: int = 0, rotates: bool = False, **others: Any
) -> dict[str, Any]:
    """Return `others`, completed by the fields of Vision that all encoders have in their files. The epsilon of norms, the intermediate size
    and the base of RoPE are not read if `others` has them. Raise ConfigError if the hidden size cannot be divided into equal heads whose
    sizes RoPE allows, if an image has another number of colours than 3, or if no layer is left to run."""
    size, heads = inner.integer(names.size), inner.integer(names.heads)
    if rotates and size % (4 * heads):
        raise inner.error(names.heads, f"a number that divides {size} into heads whose halves consist of pairs")
    if size % heads:
        raise inner.error(names.heads, f"a divisor of {names.size} ({size})")
    for name in names.colours:
        if inner.integer(name, COLOURS) != COLOURS:
            raise inner.error(name, str(COLOURS))
    num_layers = inner.integer(names.layers, maximum=1000) - num_left
    if num_layers < 1:
        raise inner.error(names.layers, f"more than {num_left}")
    if "norm_eps" not in others:
        others["norm_eps"] = inner.number(names.norm_eps)
    if "intermediate_size" not in others:
        others["intermediate_size"] = inner.integer("intermediate_size")
    if rotates and "theta" not in others:
        others["theta"] = read_theta(inner)
    return {
        "patch_size": inner.integer("patch_size"),
        "hidden_size": size,
        "num_layers": num_layers,
        "num_heads": heads,
        "activation": read_activation(inner, names.activation, defaults[names.activation]),
        **others,
    }


def read_merge(fields: Fields, name: str, default: Any = REQUIRED) -> int:
    """Return the edge, in patches, of the squares that become one row, in encoders of images of any size. Raise ConfigError if a square has
    more than MOST_PATCHES patches."""
    merge: int = fields.integer(name, default)
    if merge**2 > MOST_PATCHES:
        raise fields.error(name, f"at most {isqrt(MOST_PATCHES)}")
    return merge


def read_theta(inner: Fields, default: float = 10_000.0) -> float:
    """Return the base of RoPE by row and column, or `default` if no field states it. Raise ConfigError for another kind of RoPE."""
    rope = inner.fields("rope_parameters")
    if rope.text("rope_type", KINDS[0]) not in KINDS:
        raise rope.error("rope_type", " or ".join(KINDS))
    return rope.number("rope_theta", inner.number("rope_theta", default))


def read_pixtral(fields: Fields, **others: Any) -> Vision:
    """Return the encoder of a model that has Pixtral's encoder. `others` are the fields of Vision that the family or the connector
    determines."""
    inner = fields.fields("vision_config")
    inner.fill(**PIXTRAL)
    inner.skip("model_type", "image_size", "is_composition")  # the file of the processor states the largest size of images
    fields.require(vision_feature_layer=-1)
    vision = read_any_size(
        inner,
        Tower.PIXTRAL,
        PIXTRAL,
        FieldNames(),
        norm_eps=PIXTRAL_NORM_EPS,
        connector=Connector.PERCEPTRON,
        qkv_bias=False,
        around=("", "[IMG_END]"),
        between="[IMG_BREAK]",
        **others,
    )
    inner.require_equal("head_dim", vision.hidden_size // vision.num_heads, "hidden_size / num_attention_heads")
    return vision


def require_windows(config: ModelConfig) -> None:
    """Raise ConfigError if the tokens of an image attend to each other, layers have windows, and an image may have more tokens than the
    smallest window holds."""
    vision, least = config.vision, min((window for window in config.windows if window is not None), default=None)
    if vision is None or not vision.both_ways or least is None:
        return
    if (most := vision.num_rows * vision.most_squares) > least:
        text = f"an image has up to {most} tokens, which attend to each other, and sliding_window is {least}; lower the tokens of an image"
        raise ConfigError(text)


def check_tokens(fields: Fields, vision: Vision, vocab_size: int, names: tuple[str, ...]) -> None:
    """Raise ConfigError if the image token is not in the vocabulary. `names` are the fields that may name this token."""
    if vision.image_token >= vocab_size:
        name = next((name for name in names if name in fields), names[0])
        raise fields.error(name, f"a token of the vocabulary, below {vocab_size}")
