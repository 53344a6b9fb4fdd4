"""Layers that keep a state per sequence: how configurations describe them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from compiler.frontend.fields import Fields


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Layers that have a causal convolution in the place of attention."""

    layers: frozenset[int]
    taps: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Layers that have a scan (`compiler/ops/scan.py`) behind a causal convolution."""

    layers: frozenset[int]
    taps: int  # of the convolution
    num_keys: int  # heads of queries and keys: a divisor of num_heads
    num_heads: int
    key_size: int  # of a head
    size: int  # of a head's values
    convolution_bias: bool = False
    input_bias: bool = False
    output_bias: bool = False
    # Of Mamba-2:
    has_norm: bool = True
    gated_behind_norm: bool = False  # instead of before it
    factors: tuple[float, float, float, float, float] | None = None  # of the gate, values, keys, queries and step sizes, as projected

    @property
    def keys(self) -> int:
        """Elements of all keys together."""
        return self.num_keys * self.key_size

    @property
    def values(self) -> int:
        return self.num_heads * self.size

    @property
    def channels(self) -> int:
        """That the convolution takes: queries, keys and values."""
        return 2 * self.keys + self.values


def read_mamba(fields: Fields, layers: Collection[int], inner_size: int) -> Recurrence:
    """The fields `mamba_*` that Granite 4 and Falcon-H1 share. `inner_size`: elements of all heads together."""
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    size = inner_size // heads if fields.raw("mamba_d_head", "auto") == "auto" else fields.integer("mamba_d_head", maximum=1024)
    if size * heads != inner_size:
        raise fields.error("mamba_d_head", f"{inner_size} elements by mamba_n_heads ({heads})")
    bias = fields.flag("mamba_proj_bias", False)
    require_free_steps(fields)
    fields.skip("mamba_chunk_size")  # tokens go one by one
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
    """Refuse limits of the step size."""
    if fields.raw("time_step_limit", [0.0, math.inf]) != [0.0, math.inf]:
        raise fields.error("time_step_limit", "[0.0, Infinity]: steps of any size")
