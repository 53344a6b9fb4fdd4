"""The configuration of layers that keep a recurrent state per sequence."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from compiler.frontend.fields import Fields

LARGEST_F32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Layers with a causal convolution instead of attention."""

    layers: frozenset[int]
    taps: int  # number of tokens that a result depends on: the token itself and earlier ones


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Layers with a scan (`compiler/ops/scan.py`) after a causal convolution."""

    layers: frozenset[int]
    taps: int  # number of taps of the convolution
    num_keys: int  # number of query heads and of key heads; a divisor of num_heads
    num_heads: int  # number of value heads
    key_size: int  # elements of a head's key
    size: int  # elements of a head's value
    convolution_bias: bool = False
    input_bias: bool = False
    output_bias: bool = False
    tiled: bool = False  # whether value head i reads key head i % num_keys; otherwise adjacent value heads read the same key head
    # The fields below concern Mamba-2.
    has_norm: bool = True  # whether the result of the scan is normalised before the output projection
    gated_behind_norm: bool = False  # whether the gate is applied after the norm instead of before it
    # `factors` multiply the projected gate, values, keys, queries and step sizes.
    factors: tuple[float, float, float, float, float] | None = None

    @property
    def keys(self) -> int:
        """The number of elements of a token's keys in all heads together."""
        return self.num_keys * self.key_size

    @property
    def values(self) -> int:
        """The number of elements of a token's values in all heads together."""
        return self.num_heads * self.size

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


def read_mamba(fields: Fields, layers: Collection[int], inner_size: int) -> Recurrence:
    """Read the fields `mamba_*` that Granite 4 and Falcon-H1 share. `inner_size` is the number of elements of all value heads together.
    Raise ConfigError if the fields contradict each other, or ask for something that is not supported."""
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    size = inner_size // heads if fields.raw("mamba_d_head", "auto") == "auto" else fields.integer("mamba_d_head", maximum=1024)
    if size * heads != inner_size:
        raise fields.error("mamba_d_head", f"{inner_size} elements divided by mamba_n_heads ({heads})")
    bias = fields.flag("mamba_proj_bias", False)
    require_free_steps(fields)
    fields.skip("mamba_chunk_size")  # ignored, since tokens are computed one by one, without chunks
    return Recurrence(
        layers=frozenset(layers),
        taps=fields.integer("mamba_d_conv", 4, minimum=2, maximum=64),
        num_keys=groups,
        num_heads=heads,
        key_size=fields.integer("mamba_d_state", 256, maximum=1024),
        size=size,
        convolution_bias=fields.flag("mamba_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
    )


def require_free_steps(fields: Fields) -> None:
    """Raise ConfigError if `time_step_limit` is malformed or limits the step size. An upper limit of at least the largest float of 32 bits
    is no limit."""
    limits = fields.raw("time_step_limit", [0.0, math.inf])
    if not isinstance(limits, list) or len(limits) != 2 or limits[0] != 0 or type(limits[1]) is not float or limits[1] < LARGEST_F32:
        raise fields.error("time_step_limit", "[0.0, Infinity]: limits of the step size are not supported")
