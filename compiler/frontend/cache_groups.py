"""Group the layers of a decoder by what they keep of a sequence: each group shares its pages."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.ir.dtypes import DType
from runtime.cache_groups import CacheGroup, KVGroup, StateGroup


def groups_of(config: ModelConfig, dtype: DType, max_context: int) -> tuple[CacheGroup, ...]:
    """Layers that keep all tokens come first. A window that no sequence outgrows keeps all of them."""
    return *_of_attention(config, dtype, max_context), *_of_states(config)


def _of_attention(config: ModelConfig, dtype: DType, max_context: int) -> tuple[KVGroup, ...]:
    stateful = frozenset[int]() if config.convolution is None else config.convolution.layers
    windows = {
        layer: None if window is None or window >= max_context else window
        for layer, window in enumerate(config.windows)
        if layer not in stateful
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


def _of_states(config: ModelConfig) -> tuple[StateGroup, ...]:
    if config.convolution is None or not config.convolution.layers:
        return ()
    return (StateGroup(tuple(sorted(config.convolution.layers)), (config.convolution.taps - 1) * config.hidden_size),)
