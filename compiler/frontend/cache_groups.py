"""Group the layers of a decoder by what they keep of a sequence: each group shares its pages."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.ir.dtypes import DType
from runtime.cache_groups import PAGE_SIZE, CacheGroup, KVGroup, StateGroup

MOST_TOKENS = 256  # from one kept state to the next: a hit in the prefix cache loses fewer than these


def groups_of(config: ModelConfig, dtype: DType, max_context: int) -> tuple[CacheGroup, ...]:
    """Layers that keep all tokens come first. A window that no sequence outgrows keeps all of them."""
    attention = _of_attention(config, dtype, max_context)
    return *attention, *_of_states(config, sum(group.bytes_per_page for group in attention))


def _of_attention(config: ModelConfig, dtype: DType, max_context: int) -> tuple[KVGroup, ...]:
    windows = {
        layer: None if window is None or window >= max_context else window
        for layer, window in enumerate(config.windows)
        if layer not in config.stateful
    }
    kinds = sorted(set(windows.values()), key=lambda window: (window is not None, window or 0))
    return tuple(
        KVGroup(
            layers=tuple(layer for layer, window in windows.items() if window == kind),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=str(dtype),
            window=kind,
        )
        for kind in kinds
    )


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
