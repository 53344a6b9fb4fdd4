"""Encode batches of cache events in vLLM's wire format: MessagePack arrays whose first entry names the event.

    [time, [event, ...], rank]

    ["BlockStored", [hash, ...], parent hash, [token id, ...], block size, null, "GPU"]
    ["BlockRemoved", [hash, ...], "GPU"]
    ["AllBlocksCleared"]

vLLM's words: a block is a page, and "GPU" is the memory of the model's device. If a model has several cache groups, the group is added to
both of the first two events; in `BlockStored`, two null values precede the group, and what it stores and its window follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from server.messages import CacheChange, PagesRemoved, PagesStored

DEVICE = "GPU"
RANK = 0  # one worker per model
CLEARED = ["AllBlocksCleared"]

encode = msgspec.msgpack.Encoder().encode


def batch(changes: Sequence[CacheChange], time_s: float) -> bytes:
    """Encode a batch of changes."""
    return encode([time_s, [_event(change) for change in changes], RANK])


def cleared(time_s: float) -> bytes:
    """Encode a batch that says that all caches are gone."""
    return encode([time_s, [CLEARED], RANK])


def _event(change: CacheChange) -> list[object]:
    """Return a change in vLLM's format."""
    match change:
        case PagesStored():
            event: list[object] = [
                "BlockStored",
                change.hashes,
                change.parent,
                change.token_ids,
                change.page_size,
                None,  # number of a LoRA adapter
                DEVICE,
            ]
            if change.group is not None:
                adapter, further_keys = None, None
                event += [adapter, further_keys, change.group, _kind(change), change.window]
            return event
        case PagesRemoved():
            return ["BlockRemoved", change.hashes, DEVICE, *([] if change.group is None else [change.group])]


def _kind(change: PagesStored) -> str:
    """Return vLLM's word for what a cache group keeps."""
    return "mamba" if change.keeps_states else "full_attention" if change.window is None else "sliding_window"
