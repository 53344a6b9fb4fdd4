"""Group the layers of a decoder by what they cache: the layers of a group share its pages."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import Heads, ModelConfig
from compiler.ir.dtypes import DType
from runtime.cache_groups import PAGE_SIZE, CacheGroup, HeardGroup, KVGroup, StateGroup

MOST_TOKENS = 256  # maximum number of tokens between two saved states: after a hit in the prefix cache, fewer tokens are computed again


def groups_of(
    config: ModelConfig, dtype: DType, max_context: int, layers: range | None = None, *, coarse: bool = False
) -> tuple[CacheGroup, ...]:
    """Return the cache groups: first those of layers that cache all tokens, then those of layers with windows (the smallest window first),
    then the group of layers with states, and last the group of the keys and values of a speech model's audio. Layers whose key and value
    heads differ in number or size are in different groups. A window of at least `max_context` tokens counts as no window. If `layers` has
    the layers of a stage, a group has only its layers in this stage, possibly none. So all stages of a model have the same groups and use
    the same page tables. `dtype` is the type of cached keys and values. `coarse` says whether products round the rows that they read to 8
    bits."""
    attention = _of_attention(config, dtype, max_context)
    groups = *attention, *_of_states(config, sum(group.bytes_per_page for group in attention)), *_of_audio(config, dtype, coarse=coarse)
    return groups if layers is None else tuple(replace(group, layers=tuple(n for n in group.layers if n in layers)) for group in groups)


def _of_audio(config: ModelConfig, dtype: DType, *, coarse: bool) -> tuple[HeardGroup, ...]:
    """Return the group of the keys and values of audio, or nothing if the model is no speech model. Each step reads all these keys and
    values. So their elements have 8 bits if products round rows to 8 bits and `dtype` is not f32, and otherwise 16 or 32 bits."""
    if config.hearing is None:
        return ()
    layers, whole = tuple(range(config.num_layers)), -(-config.max_context // PAGE_SIZE) * PAGE_SIZE
    held = DType.I8 if coarse and dtype is not DType.F32 else DType.BF16 if dtype is DType.I8 else dtype
    return (HeardGroup(layers, config.num_heads, config.head_dim, str(held), config.hearing.num_frames, whole),)


def _of_attention(config: ModelConfig, dtype: DType, max_context: int) -> tuple[KVGroup, ...]:
    """Return the groups of the layers that append keys and values, in the order that `groups_of` describes."""
    kinds: dict[tuple[Heads, int | None], list[int]] = {}
    for layer in config.keeping:
        window = config.windows[layer]
        kept = None if window is None or window >= max_context else window
        kinds.setdefault((config.heads_of_layer(layer), kept), []).append(layer)
    groups = [
        KVGroup(tuple(layers), heads.num_kv, heads.size, str(dtype), window, heads.value_size) for (heads, window), layers in kinds.items()
    ]
    return tuple(sorted(groups, key=lambda group: (group.window is not None, group.window or 0)))


def _of_states(config: ModelConfig, kv_bytes: int) -> tuple[StateGroup, ...]:
    """Return the group of layers with states, or nothing if there are none. The interval between two saved states is PAGE_SIZE tokens,
    doubled until states take no more memory per token than keys and values do, or until it is MOST_TOKENS. `kv_bytes` is the size of a page
    of keys and values, summed over all layers."""
    if not config.stateful:
        return ()
    layers, sizes = tuple(sorted(config.stateful)), _sizes(config)
    num_tokens = PAGE_SIZE
    while num_tokens < MOST_TOKENS and StateGroup(layers, sizes).bytes_per_page * PAGE_SIZE > kv_bytes * num_tokens:
        num_tokens *= 2
    return (StateGroup(layers, sizes, num_tokens),)


def _sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the number of elements per sequence of each part of a state: the convolution's past inputs, and the matrices of a scan."""
    if config.convolution is not None:
        return ((config.convolution.taps - 1) * config.hidden_size,)
    r = config.recurrence
    assert r is not None, config
    return (r.taps - 1) * r.channels, r.values * r.key_size
