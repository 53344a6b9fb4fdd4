"""Rotary positions: the frequency of each pair of a head's dimensions, and the scaling of frequencies for contexts beyond the training
length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import EMPTY, Fields


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base of the frequencies grows if the context is longer than the declared one. The longest context that is served determines the
    base, not the present length of a sequence, since the rotation of cached keys cannot change."""

    factor: float
    declared_context: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by the factor, high frequencies are kept, and the frequencies between them are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """The frequency of each pair is interpolated between itself and itself divided by the factor, according to the number of turns that the
    pair makes within the original context. Cosines and sines are scaled (Peng et al., arXiv 2309.00071)."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool  # whether the indices of the pairs between which frequencies are interpolated are rounded to integers


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each pair has a divisor, from one list for contexts up to the original length and from another list for longer contexts (Ding et al.,
    arXiv 2402.13753). The longest context that is served determines the list, since the rotation of cached keys cannot change."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factors: tuple[float, float]  # factors of cos and sin: for contexts up to the original length, and for longer ones


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first `num_turning` pairs of a head rotate, at the frequencies of a rope over the whole head, divided by `factor`. The other
    pairs do not rotate."""

    num_turning: int
    factor: float


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """How queries and keys are rotated by the positions of their tokens: each pair of dimensions by an angle proportional to the
    position."""

    theta: float  # base: without scaling, pair i turns by theta^(-2i / size) radians per position
    size: int  # number of rotated dimensions, the first ones of a head; dimensions i and i + size / 2 are a pair
    scaling: RopeScaling | None = None
    interleaved: bool = False  # whether dimensions 2i and 2i + 1 are a pair instead
    axes: tuple[int, ...] = ()  # per pair: the axis by whose coordinate it rotates, if tokens have three; empty: tokens have one position

    def frequencies(self, context: int) -> tuple[NDArray[np.float32], float]:
        """Return the radians per position of each pair, [size / 2], and the factor that multiplies cos and sin, for a context of at most
        `context` tokens."""
        exponents = np.arange(0, self.size, 2) / self.size
        plain = self.theta**-exponents
        scale = 1.0
        match self.scaling:
            case None:
                turns = plain
            case LinearScaling(factor):
                turns = plain / factor
            case DynamicScaling(factor, declared):
                stretch = factor * max(context, declared) / declared - (factor - 1)
                turns = (self.theta * stretch ** (self.size / (self.size - 2))) ** -exponents
            case Llama3Scaling() as llama3:
                turns = _llama3(plain, llama3)
            case YarnScaling() as yarn:
                scale = yarn.attention_factor
                turns = _yarn(plain, self.theta, yarn)
            case LongScaling(short, long, original, scales):
                is_long = context > original
                turns, scale = plain / np.array(long if is_long else short), scales[is_long]
            case ProportionalScaling(num_turning, factor):
                turns = np.where(np.arange(len(plain)) < num_turning, plain / factor, 0.0)
        return turns.astype(np.float32), scale

    def max_context(self, declared: int) -> int:
        """Return the largest context of a model whose `max_position_embeddings` is `declared`."""
        match self.scaling:
            case LinearScaling(factor) | DynamicScaling(factor, _):
                return int(declared * factor)
            case YarnScaling(factor, original):
                return int(original * factor)
            case _:
                return declared


def _llama3(plain: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    turns_in_context = scaling.original_context * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    above = turns_in_context - scaling.low_freq_factor
    keep = np.clip(above / span, 0, 1) if span else above >= 0
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn(plain: NDArray[np.float64], theta: float, scaling: YarnScaling) -> NDArray[np.float64]:
    size = 2 * len(plain)

    def pair_turning(times: float) -> float:
        """Return the index of the pair that turns this many times within the original context."""
        return size * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    stretched = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (1 - stretched) * plain + stretched * plain / scaling.factor


# --- reading the fields of a rope ------------------------------------------------------------------------------------------


def read_rope(config: Fields, head_dim: int, *, theta: float = 10000.0, layer_type: str | None = None) -> Rope:
    """Read `rope_parameters`, the field since transformers 5, which may have an entry per layer type, or the older `rope_theta` and
    `rope_scaling`. `theta` is the base if no field states it. If `layer_type` is given and has an entry, read this entry. Raise ConfigError
    for a scaling that is not supported, or if the number of dimensions of a head that rotate is odd, less than 2 or larger than the head.
    With proportional scaling, any number may rotate, and an odd number is rounded down."""
    fields = rope_fields(config)
    if layer_type is not None and layer_type in fields:
        fields = fields.fields(layer_type)
    theta = fields.number("rope_theta", config.number("rope_theta", theta))
    partial = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    size = int(head_dim * partial)
    if fields.text("rope_type", "default") == "proportional":
        return Rope(theta, head_dim, ProportionalScaling(size // 2, fields.number("factor", 1.0)))
    if size % 2 or not 2 <= size <= head_dim:
        raise ConfigError(f"{size} of {head_dim} dimensions of a head would be rotated (factor {partial}); expected an even number")
    return Rope(theta, size, _read_scaling(config, fields, size))


def rope_fields(config: Fields, overrides: Mapping[str, Any] = EMPTY) -> Fields:
    """Return the fields in `rope_parameters`, or in the older `rope_scaling`; none if both are absent. `overrides` adds or replaces fields,
    but only in the first call for a configuration."""
    return config.fields("rope_parameters" if "rope_parameters" in config else "rope_scaling", overrides=overrides)


def _read_scaling(config: Fields, fields: Fields, size: int) -> RopeScaling | None:
    """Return the scaling of frequencies, or None if there is none. Raise ConfigError if it is unknown or malformed."""
    declared = config.integer("max_position_embeddings", 2048)
    original = fields.integer("original_max_position_embeddings", config.integer("original_max_position_embeddings", declared))
    kind = fields.text("rope_type", fields.text("type", "default"))
    # `read_axes` reads these fields, which say by which coordinate of an image token each pair rotates. Models that read only text do not
    # need them, since the three coordinates of a text token are equal.
    fields.skip("mrope_section", "mrope_interleaved")
    match kind:
        case "default" | "mrope":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "dynamic":
            if size < 4:
                raise ConfigError(f"a rope with dynamic scaling rotates {size} dimensions; expected at least 4")
            return DynamicScaling(_at_least_one(fields, "factor"), declared)  # transformers ignores `original` in this case
        case "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if not low <= high:
                raise fields.error("low_freq_factor", f"at most high_freq_factor ({high})")
            return Llama3Scaling(fields.number("factor"), low, high, original)
        case "yarn":
            factor = fields.number("factor", declared / original)
            return YarnScaling(
                factor,
                original,
                fields.number("beta_fast", 32.0),
                fields.number("beta_slow", 1.0),
                _yarn_attention_factor(fields, factor),
                fields.flag("truncate", True),
            )
        case "longrope" | "su":
            factor = fields.number("factor", declared / original)
            plain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            short, long = fields.numbers("short_factor", size // 2), fields.numbers("long_factor", size // 2)
            scale = fields.number("attention_factor", plain)
            return LongScaling(short, long, original, (scale, scale))
        case _:
            raise fields.error("rope_type", "one of default, dynamic, linear, llama3, longrope, yarn")


def read_axes(config: Fields, num_pairs: int, default: tuple[int, int, int], *, interleaved: bool) -> tuple[int, ...]:
    """Return, for each pair, the axis by whose coordinate it rotates. `mrope_section`, or else `default`, has the number of pairs of each
    of the three axes. Unless pairs are `interleaved`, the pairs of an axis are adjacent. If they are interleaved, the axes take turns, and
    the first axis also has the pairs that are left when the other axes have all of theirs. Raise ConfigError if `mrope_section` is
    malformed, if its numbers do not add up to `num_pairs`, or if the fields contradict `interleaved`."""
    fields = rope_fields(config)
    sections = fields.raw("mrope_section", list(default))
    if not isinstance(sections, list) or len(sections) != 3 or any(type(count) is not int or count < 0 for count in sections):
        raise fields.error("mrope_section", "a list of 3 numbers of pairs")
    if sum(sections) != num_pairs:
        raise fields.error("mrope_section", f"numbers whose sum is {num_pairs}, the pairs of a head")
    fields.require(mrope_interleaved=interleaved)
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))


def _at_least_one(fields: Fields, name: str) -> float:
    if (value := fields.number(name)) < 1:
        raise fields.error(name, "at least 1")
    return value


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """Return the factor that multiplies cos and sin: `attention_factor`, or else the usual factor times `attn_factor`. The usual factor
    is computed from the factor of the scaling, and from `mscale` and `mscale_all_dim` if both are given."""

    def strength(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = fields.number("mscale", None, zero=True), fields.number("mscale_all_dim", None, zero=True)
    plain = strength(mscale) / strength(mscale_all_dim) if mscale and mscale_all_dim else strength(1.0)
    # YaRN's original code, which DeepSeek-R1-0528-Qwen3-8B follows, multiplies the usual factor by `attn_factor`
    return fields.number("attention_factor", plain * fields.number("attn_factor", 1.0))
