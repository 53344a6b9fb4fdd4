"""Group the layers of a decoder by what they keep of a sequence: each group shares its pages."""

from __future__ import annotations

from compiler.frontend.config import Heads, ModelConfig
from compiler.ir.dtypes import DType
from runtime.cache_groups import PAGE_SIZE, CacheGroup, KVGroup, StateGroup

MOST_TOKENS = 256  # from one kept state to the next: a hit in the prefix cache loses fewer than these


def groups_of(config: ModelConfig, dtype: DType, max_context: int) -> tuple[CacheGroup, ...]:
    """Layers that keep all tokens come first. A window that no sequence outgrows keeps all of them."""
    attention = _of_attention(config, dtype, max_context)
    return *attention, *_of_states(config, sum(group.bytes_per_page for group in attention))


def _of_attention(config: ModelConfig, dtype: DType, max_context: int) -> tuple[KVGroup, ...]:
    kinds: dict[tuple[Heads, int | None], list[int]] = {}
    for layer in config.keeping:
        window = config.windows[layer]
        kept = None if window is None or window >= max_context else window
        kinds.setdefault((config.heads_of_layer(layer), kept), []).append(layer)
    groups = [KVGroup(tuple(layers), heads.num_kv, heads.size, str(dtype), window) for (heads, window), layers in kinds.items()]
    return tuple(sorted(groups, key=lambda group: (group.window is not None, group.window or 0)))


def _of_states(config: ModelConfig, kv_bytes: int) -> tuple[StateGroup, ...]:
    """States are kept so often that they take no more memory than `kv_bytes`, what a page of keys and values has in all layers."""
    if not config.stateful:
        return ()
    layers, sizes = tuple(sorted(config.stateful)), _sizes(config)
    num_tokens = PAGE_SIZE
    while num_tokens < MOST_TOKENS and StateGroup(layers, sizes).bytes_per_page * PAGE_SIZE > kv_bytes * num_tokens:
        num_tokens *= 2
    return (StateGroup(layers, sizes, num_tokens),)


def _sizes(config: ModelConfig) -> tuple[int, ...]:
    """The inputs that a convolution reads again, and the matrices of a scan."""
    if config.convolution is not None:
        return ((config.convolution.taps - 1) * config.hidden_size,)
    r = config.recurrence
    assert r is not None, config
    return (r.taps - 1) * r.channels, r.values * r.key_size
