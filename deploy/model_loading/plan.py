"""Open the device, and plan the memory of a load from the compiled program, before any weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from compiler.frontend.hearing import ENTRY as HEAR
from compiler.frontend.listening import ENTRY as LISTEN
from compiler.frontend.seeing import ENTRY as SEE
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.graphs import captured_launches
from deploy.model_loading.known import carried
from deploy.model_loading.locate import BITS
from deploy.model_loading.modes import Pages
from deploy.quality.label import Labelled
from runtime.cache_groups import PAGE_SIZE
from runtime.device.base import Limits
from runtime.executable import DTYPES, PREPARATION, Executable, ParamSpec, TensorSpec, VMFunction
from runtime.session import Session
from runtime.units import in_units
from server.interfaces import LoadError
from server.load_settings import LEAST_CONTEXT
from server.messages import ErrorCode, Load

WORKER_BYTES = 300 << 20  # memory of a worker without its model: interpreter, libraries, tokenizer, code
DEFAULT_KV_BYTES = 1 << 30
BESIDE = (HEAR, SEE, LISTEN)  # programs that a model may have beside the one of its mode


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A cache group in a memory plan: see `runtime.cache_groups`."""

    num_layers: int
    window: int | None
    keeps_states: bool
    page_size: int  # tokens
    num_pages: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a served model, divided into parts."""

    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    num_pages: int  # number of pages in all cache groups together
    page_bytes: int  # bytes of PAGE_SIZE tokens in all groups
    groups: tuple[PlannedGroup, ...] = ()
    cache_hit: bool = False  # whether the program was in the cache, if the plan is made without a load
    graphs_bytes: int = 0  # bytes of captured graphs, if the device captures launches

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes + self.graphs_bytes

    def with_pages(self, num_pages: Sequence[int]) -> Plan:
        """Return the plan with these numbers of pages, one per cache group."""
        groups = tuple(replace(group, num_pages=count) for group, count in zip(self.groups, num_pages, strict=True))
        return replace(self, groups=groups, kv_cache_bytes=sum(group.num_bytes for group in groups), num_pages=sum(num_pages))


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned(Labelled):
    """The state of a load once its device is open and its memory planned."""

    session: Session
    plan: Plan

    @property
    def costs_file(self) -> Path | None:
        """The file with the measured times of the program's steps, or None if nothing is stored."""
        if self.cache is None or self.relay is not None:  # the times depend on the machines of the other stages
            return None
        return self.cache.costs_of(self.program.key, self.session.num_threads)


def plan_memory(known: Labelled) -> Planned:
    """Open the device or, if the model is divided over GPUs, its devices, and plan the memory. Raise LoadError if the plan does not fit."""
    session = known.program.session(known.cache, known.load.source, known.number, known.load.tensor_parallel)
    return Planned(**carried(known, Labelled), session=session, plan=plan_of(known, session.device.limits))


def plan_of(known: Compiled, device: Limits) -> Plan:
    """Plan the memory of a load. Raise LoadError if the plan exceeds the memory that the load may take."""
    plan, limit = wanted_plan(known, device), limit_of(known.load, device)
    if plan.total_bytes <= limit:
        return plan
    parts = [f"{in_units(plan.weights_bytes)} of weights", f"{in_units(plan.arena_bytes)} of arena"]
    parts += [f"{in_units(plan.graphs_bytes)} of graphs"] if plan.graphs_bytes else []
    takes = f"the model takes {in_units(plan.total_bytes)}: {', '.join(parts)}, {in_units(plan.kv_cache_bytes)} of KV cache"
    advice = _advice(known.load, limit - plan.total_bytes + plan.kv_cache_bytes, plan.page_bytes)
    message = f"{takes}; {in_units(limit)} are free. {advice}"
    raise LoadError(ErrorCode.INSUFFICIENT_MEMORY, message, plan.total_bytes, limit)


def limit_of(load: Load, device: Limits) -> int:
    """Return the bytes that a load may take: its limit, or the free memory of the device minus the memory of a worker."""
    return load.memory_limit_bytes if load.memory_limit_bytes is not None else max(0, device.free_bytes - WORKER_BYTES)


def wanted_plan(known: Compiled, device: Limits) -> Plan:
    """Plan the memory of a load, also if it exceeds what the load may take. Raise LoadError if `kv_cache_bytes` is less than two pages of
    each group."""
    executable, entry, pages, load = known.program.executable, known.mode.entry, known.mode.pages(), known.load
    step, others = executable.meta.functions[entry], _others(executable, entry)
    # Functions after the step read its results in the arena, and steps run between the parts of an encoder, so these three kinds of
    # functions have separate parts of the arena.
    arena_bytes = _arena_of(step) + sum(
        max((_arena_of(f) for f in others if (f.name in BESIDE) is beside), default=0) for beside in (False, True)
    )
    weights_bytes = weights_of(step.weights) + sum(weights_of(f.weights) for f in others)
    graphs_bytes = device.launch_bytes * captured_launches(executable) if device.launch_bytes else 0
    room = limit_of(load, device) - weights_bytes - arena_bytes - graphs_bytes
    groups = tuple(
        PlannedGroup(len(of.group.layers), of.group.window, of.group.keeps_states, of.group.page_size, count, of.group.bytes_per_page)
        for of, count in zip(pages, _num_pages(pages, load, room), strict=True)
    )
    kv_cache_bytes, num_pages = sum(group.num_bytes for group in groups), sum(group.num_pages for group in groups)
    page_bytes = sum(-(-group.page_bytes * PAGE_SIZE // group.page_size) for group in groups)
    return Plan(weights_bytes, arena_bytes, kv_cache_bytes, num_pages, page_bytes, groups, graphs_bytes=graphs_bytes)


def _advice(load: Load, room_bytes: int, page_bytes: int) -> str:
    """Suggest a setting with which the model fits, if `room_bytes` are left for its KV cache. One page is padding, which stores no
    context."""
    room = max(0, room_bytes) // page_bytes if page_bytes else 0
    num_tokens = (room - 1) * PAGE_SIZE
    if load.kv_cache_bytes is not None and room >= 2:
        return f"kv_cache_bytes={room * page_bytes} fits, with {num_tokens} tokens of context"
    if num_tokens >= LEAST_CONTEXT:
        return f"max_context={num_tokens} fits"
    narrower = [form for form in ("int8", "4bit") if BITS[form] < BITS.get(load.quantize.partition("-")[0], 0)]
    other = f"choose {' or '.join(narrower)} weights, " if narrower else ""
    return f"Its weights leave no room: {other}unload another model, or raise memory_limit_bytes"


def _num_pages(pages: Sequence[Pages], load: Load, room_bytes: int) -> list[int]:
    """Return the number of pages of each group. If `kv_cache_bytes` is a number of bytes, pages fill these bytes. Otherwise there are as
    many pages as are useful, up to a limit. If `kv_cache_bytes` is a share, the limit is that share of the free memory. If `kv_cache_bytes`
    is None, the limit is the larger of DEFAULT_KV_BYTES and the pages of one sequence of full length, but at most this model's share of the
    free memory. If the load names no context either, the limit is also at most half of the free memory, or DEFAULT_KV_BYTES if that is
    more. The limit never goes below `floor` pages. The free memory is `room_bytes`, which the rest of the model leaves; for shares, less
    what the load reserves for other models. Raise LoadError if a number of bytes is less than two pages of each group."""
    each = [of.group.bytes_per_page for of in pages]
    floor, least, most = ([of.floor for of in pages], [of.least for of in pages], [of.most for of in pages])
    if load.kv_cache_bytes is None or not pages:
        shared_bytes = int((room_bytes - load.reserved_bytes) * load.kv_share)
        if load.max_context is None:
            shared_bytes = min(shared_bytes, max(DEFAULT_KV_BYTES, room_bytes // 2))
        wanted_bytes = min(_sum(most, each), max(_sum(least, each), DEFAULT_KV_BYTES))
        return _divided(max(min(wanted_bytes, shared_bytes), _sum(floor, each)), each, (floor, least, most))
    if isinstance(load.kv_cache_bytes, float):
        share_bytes = int((room_bytes - load.reserved_bytes) * load.kv_cache_bytes)
        return _divided(max(min(_sum(most, each), share_bytes), _sum(floor, each)), each, (floor, least, most))
    if load.kv_cache_bytes < 2 * sum(each):
        text = f"kv_cache_bytes is {load.kv_cache_bytes}; expected at least two pages of {sum(each)} bytes"
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    return _divided(load.kv_cache_bytes, each, (floor, least, most))


def _divided(num_bytes: int, each: Sequence[int], stages: tuple[list[int], list[int], list[int]]) -> list[int]:
    """Return the number of pages of each group. A page of group i has `each[i]` bytes, and all pages together have at most `num_bytes`.
    All groups grow to two pages, then to the numbers of each entry of `stages` in turn. If the memory does not suffice for an entry, each
    group gets the same share of the pages that it lacks. Memory that remains after the last entry is divided in proportion to its
    numbers."""
    most = stages[-1]
    counts, steps = [0] * len(each), most
    for target in ([2] * len(each), *stages):
        if num_bytes < _sum(target, each):
            steps = [max(0, end - count) for count, end in zip(counts, target, strict=True)]
            break
        counts = target
    room_bytes, step_bytes = num_bytes - _sum(counts, each), max(1, _sum(steps, each))
    return [count + room_bytes * step // step_bytes for count, step in zip(counts, steps, strict=True)]


def _sum(counts: Sequence[int], each: Sequence[int]) -> int:
    return sum(count * num_bytes for count, num_bytes in zip(counts, each, strict=True))


def _others(executable: Executable, entry: str) -> list[VMFunction]:
    """Return the functions beside the step that run while the model serves."""
    known = executable.meta.functions
    return [function for name, function in known.items() if name != entry and PREPARATION not in name]


def _arena_of(function: VMFunction) -> int:
    assert isinstance(function.arena_bytes, int), "an arena is planned for the declared bounds"
    return function.arena_bytes


def weights_of(params: Iterable[ParamSpec]) -> int:
    """Return the number of bytes of the weights."""
    return sum(_spec_bytes(p.spec) for p in params)


def _spec_bytes(spec: Any) -> int:
    assert isinstance(spec, TensorSpec) and spec.shape is not None and spec.dtype is not None, "weights are tensors"
    return prod(dim for dim in spec.shape if isinstance(dim, int)) * DTYPES[spec.dtype].itemsize
