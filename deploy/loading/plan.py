"""What a load will take, by the compiler's plan, known before a byte of the weights is touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from deploy.loading.locate import BITS
from deploy.loading.modes import Pages
from runtime.device.base import Limits
from runtime.executable import DTYPES, PREPARATION, Executable, ParamSpec, TensorSpec, VMFunction
from runtime.kv_pool import PAGE_SIZE
from runtime.units import in_mib
from server.interfaces import LoadError
from server.messages import ErrorCode, Load
from server.models.state import LEAST_CONTEXT

WORKER_BYTES = 300 << 20  # interpreter, libraries, tokenizer, code
DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes while serving, by part."""

    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    num_pages: int
    page_bytes: int
    cache_hit: bool = False

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes


def plan_of(executable: Executable, entry: str, pages: Pages | None, load: Load, device: Limits, *, cache_hit: bool = False) -> Plan:
    """Raises when it does not fit below the limit of the load, or what is free of the device's memory beside a worker."""
    step = executable.meta.functions[entry]
    arena_bytes = _arena_of(step) + max((_arena_of(f) for f in _above(executable, entry)), default=0)
    weights_bytes = weights_of(step.weights)
    limit = load.memory_limit_bytes if load.memory_limit_bytes is not None else max(0, device.free_bytes - WORKER_BYTES)
    room = limit - weights_bytes - arena_bytes
    num_pages = 0 if pages is None else _num_pages(pages, load, room)
    page_bytes = 0 if pages is None else pages.layout.bytes_per_page
    plan = Plan(weights_bytes, arena_bytes, num_pages * page_bytes, num_pages, page_bytes, cache_hit)
    if plan.total_bytes > limit:
        raise LoadError(
            ErrorCode.INSUFFICIENT_MEMORY,
            f"the model takes {in_mib(plan.total_bytes)}: {in_mib(weights_bytes)} of weights, {in_mib(arena_bytes)} of arena, "
            f"{in_mib(plan.kv_cache_bytes)} of KV cache; {in_mib(limit)} are free. {_advice(load, room, page_bytes)}",
            plan.total_bytes,
            limit,
        )
    return plan


def _advice(load: Load, room_bytes: int, page_bytes: int) -> str:
    """What would fit; a page more than the context has is padding."""
    room = max(0, room_bytes) // page_bytes if page_bytes else 0
    num_tokens = (room - 1) * PAGE_SIZE
    if load.kv_cache_bytes is not None and room >= 2:
        return f"kv_cache_bytes={room * page_bytes} fits, with {num_tokens} tokens of context"
    if num_tokens >= LEAST_CONTEXT:
        return f"max_context={num_tokens} fits"
    narrower = [form for form in ("int8", "int4") if BITS[form] < BITS.get(load.quantize.partition("-")[0], 0)]
    other = f"choose {' or '.join(narrower)} weights, " if narrower else ""
    return f"Its weights leave no room: {other}unload another model, or raise memory_limit_bytes"


def _num_pages(pages: Pages, load: Load, room_bytes: int) -> int:
    """What was asked for, or else as many as are of use, up to DEFAULT_KV_BYTES and this model's share of the room there is."""
    layout = pages.layout
    if load.kv_cache_bytes is None or pages.least == pages.most:
        wanted = min(pages.most, max(pages.least, layout.pages_for(DEFAULT_KV_BYTES)))
        shared_bytes = int((room_bytes - load.reserved_bytes) * load.kv_share)
        return max(min(wanted, layout.pages_for(max(0, shared_bytes))), pages.least)
    asked = layout.pages_for(load.kv_cache_bytes)
    if asked < 2:
        text = f"kv_cache_bytes is {load.kv_cache_bytes}; two pages of {layout.bytes_per_page} are the least"
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    return asked


def _above(executable: Executable, entry: str) -> list[VMFunction]:
    """What runs while the results of the step still lie in its arena."""
    known = executable.meta.functions
    return [function for name, function in known.items() if name != entry and PREPARATION not in name]


def _arena_of(function: VMFunction) -> int:
    assert isinstance(function.arena_bytes, int), "an arena is planned for the declared bounds"
    return function.arena_bytes


def weights_of(params: Iterable[ParamSpec]) -> int:
    return sum(_spec_bytes(p.spec) for p in params)


def _spec_bytes(spec: Any) -> int:
    assert isinstance(spec, TensorSpec) and spec.shape is not None and spec.dtype is not None, "weights are tensors"
    return prod(dim for dim in spec.shape if isinstance(dim, int)) * DTYPES[spec.dtype].itemsize
