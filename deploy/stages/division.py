"""Divide the layers of a model, and the memory of machines, among its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from compiler.frontend.splitting import bytes_of_layers, split
from deploy.model_loading.files import ModelFiles
from deploy.model_loading.modes import Generator, mode_of
from deploy.model_loading.plan import WORKER_BYTES
from server.messages import HEAD, LOCAL, Load


def loads_of_stages(load: Load, files: ModelFiles, machines: Sequence[str], free_bytes: Mapping[str, int]) -> list[Load]:
    """Return what each stage loads. `machines` names the machine of each stage. `free_bytes` has the free memory of each machine, which is
    divided among the stages of the machine in proportion to their weights. `cuts` in the load are the first layers of all stages but the
    first; without them, the layers are divided so that the weights take the same share of each machine's free memory. If the last stage
    is HEAD, it has no layers, only what follows them."""
    *sizes, head_bytes = bytes_of_layers(files.config, files.weights.tensors)
    has_layers = load.stages[-1:] != (HEAD,)  # whether the last stage has layers
    if has_layers:
        sizes[-1] += head_bytes
    rooms = {machine: _room(load, machine, free_bytes[machine], machines.count(machine)) for machine in machines}
    if load.cuts:
        layers = [range(*ends) for ends in pairwise((0, *load.cuts, files.config.num_layers))]
    else:
        shares = [rooms[machine] // machines.count(machine) for machine in machines]
        layers = [*split(sizes, shares if has_layers else shares[:-1]), *([] if has_layers else [range(len(sizes), len(sizes))])]
    parts = [sum(sizes[i] for i in own) for own in layers]
    if not has_layers:
        parts[-1] = head_bytes
    totals = {name: sum(size for size, machine in zip(parts, machines, strict=True) if machine == name) for name in machines}
    loads = [
        _of_stage(load, own, machine, rooms[machine], size / max(totals[machine], 1))
        for own, machine, size in zip(layers, machines, parts, strict=True)
    ]
    return _with_cache_bytes(load, files, [*(msgspec.structs.replace(own, is_early=True) for own in loads[:-1]), loads[-1]])


def _room(load: Load, machine: str, free_bytes: int, num_stages: int) -> int:
    """Return the bytes that the stages of a machine may take together: the limit of the load, or the free memory minus WORKER_BYTES for
    each stage's process."""
    if machine == LOCAL and load.memory_limit_bytes is not None:
        return load.memory_limit_bytes
    return max(0, free_bytes - num_stages * WORKER_BYTES)


def _of_stage(load: Load, layers: range, machine: str, room: int, share: float) -> Load:
    """Return the load of a stage, which has a share of its machine's memory. On another machine, the load has neither the memory that the
    server reserves for other models nor the server's token for downloads."""
    own = msgspec.structs.replace(
        load,
        layers=(layers.start, layers.stop),
        memory_limit_bytes=int(room * share),
        reserved_bytes=int(load.reserved_bytes * share),
        stages=(),
        stage_secret="",
        peers=None,
        cuts=(),
    )
    return own if machine == LOCAL else msgspec.structs.replace(own, reserved_bytes=0, kv_share=1.0, hub_token=None)


def _with_cache_bytes(load: Load, files: ModelFiles, loads: list[Load]) -> list[Load]:
    """Divide the bytes of the KV cache, if the load says how many, so that all stages have room for the same number of pages."""
    total_bytes = load.kv_cache_bytes
    if not isinstance(total_bytes, int):
        return loads
    page_bytes: list[int] = []
    for own in loads:
        mode = mode_of(files, own)
        assert isinstance(mode, Generator), mode
        page_bytes.append(sum(group.bytes_per_page for group in mode.groups))
    return [
        msgspec.structs.replace(own, kv_cache_bytes=-(-total_bytes * each // sum(page_bytes)))
        for own, each in zip(loads, page_bytes, strict=True)
    ]
