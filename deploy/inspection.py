"""Describe a model and its memory before its weights are loaded: from its configuration, the headers of its files, and the plan of the
compiled program.

python -m deploy.inspection < LOAD      LOAD is the message as JSON; prints the plan, or {"code", "message", ...} if the load is refused
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec

from compiler.frontend.weights import WeightSource
from deploy.model_loading.abilities import embedding_note, serves
from deploy.model_loading.facts import values_by_type
from deploy.model_loading.plan import WORKER_BYTES, Plan, plan_of
from deploy.model_loading.program import Compiled, compile_model, executable_cache
from deploy.model_loading.servable import Progress, Servable, require_servable, silent
from runtime.cache_groups import PAGE_SIZE
from runtime.device.base import Limits
from runtime.device.registry import number_of, open_device
from runtime.executable import Executable
from runtime.units import in_units
from server.interfaces import LoadError
from server.messages import Load


@dataclass(frozen=True, slots=True)
class Inspection:
    source: str
    family: str
    serves: tuple[str, ...]  # what the server answers with this model, in words
    embedding_note: str
    num_parameters: int
    file_bytes: int
    bytes_by_part: dict[str, int]  # bytes in the files per part of the model: embeddings, attention, mlp, norms, head, other
    dtypes: dict[str, int]  # number of parameters by the type in which the files store them
    quantize: str
    max_context: int
    model_context: int  # longest context that the model supports
    max_batch: int
    plan: Plan
    signature: str
    key: str  # key of the compiled program in the cache
    cache_hit: bool
    compile_s: float
    available_bytes: int

    @property
    def required_bytes(self) -> int:
        return self.plan.total_bytes + WORKER_BYTES

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.available_bytes


def inspect_model(load: Load, progress: Progress = silent) -> Inspection:
    """Describe a model. Compile it, or find it in the cache, to read its memory plan."""
    model, compiled = _compiled(load, progress)
    files, mode = model.files, model.mode
    tensors, counts = files.weights.tensors, values_by_type(files)
    limits = _limits_of(compiled.executable, load)
    # Plan without a memory limit, so that a plan that does not fit is reported as well.
    unlimited = msgspec.structs.replace(load, memory_limit_bytes=1 << 62)
    return Inspection(
        source=str(files.path),
        family=files.config.family,
        serves=serves(mode),
        embedding_note=embedding_note(mode),
        num_parameters=sum(counts.values()),
        file_bytes=sum(info.num_bytes for info in tensors.values()),
        bytes_by_part=_by_part(files.weights),
        dtypes=counts,
        quantize=load.quantize,
        max_context=mode.max_context,
        model_context=files.config.max_context,
        max_batch=load.max_batch,
        plan=plan_of(compiled.executable, mode.entry, mode.pages(), unlimited, limits),
        signature=compiled.signature,
        key=compiled.key,
        cache_hit=compiled.cache_hit,
        compile_s=compiled.compile_s,
        available_bytes=limits.free_bytes,
    )


def compile_only(load: Load, progress: Progress) -> Compiled:
    """Compile the program into the cache without loading weights."""
    return _compiled(load, progress)[1]


def plan_load(load: Load) -> Plan:
    """Plan the memory of a load. Raise LoadError if the load is impossible."""
    model, compiled = _compiled(load, silent)
    limits = _limits_of(compiled.executable, load)
    return plan_of(compiled.executable, model.mode.entry, model.mode.pages(), load, limits, cache_hit=compiled.cache_hit)


def _limits_of(executable: Executable, load: Load) -> Limits:
    with closing(open_device(executable.meta, num_threads=1, number=number_of(load.device))) as device:
        return device.limits


def _compiled(load: Load, progress: Progress) -> tuple[Servable, Compiled]:
    model = require_servable(load, progress)
    model.tokenizer_source.build()  # the server refuses a model whose tokenizer is missing or damaged
    return model, compile_model(model.module, executable_cache(), model.target, progress)


# --- remedies for a lack of memory --------------------------------------------------------------------------------------------


def remedies(load: Load, found: Inspection) -> Iterator[str]:
    """Yield settings with which the model would fit into this machine's memory, the smallest change first. Yield nothing if there are
    none."""
    room = found.available_bytes - WORKER_BYTES - (found.plan.total_bytes - found.plan.kv_cache_bytes)
    least = -(-found.max_context // PAGE_SIZE) * found.plan.page_bytes
    if room >= least + found.plan.page_bytes:
        num_tokens = room // found.plan.page_bytes * PAGE_SIZE
        yield f"--kv-cache-bytes {room >> 20}M: {num_tokens} tokens of context for all sequences together"
        return
    for quantize in ("int8", "4bit"):
        if quantize == found.quantize:
            continue
        smaller = inspect_model(msgspec.structs.replace(load, quantize=quantize))
        if replace(smaller, available_bytes=found.available_bytes).fits:
            yield f"--quantize {quantize}: {in_units(smaller.required_bytes)}"
            return


# --- the files ---------------------------------------------------------------------------------------------------------

_PARTS = (
    ("embeddings", ("embed", "wte", "wpe")),
    ("head", ("lm_head",)),
    ("norms", ("norm",)),
    ("attention", ("attn", "attention")),
    ("mlp", ("mlp", "intermediate", "output.dense")),
)


def part_of(name: str) -> str:
    return next((part for part, words in _PARTS if any(word in name.lower() for word in words)), "other")


def _by_part(source: WeightSource) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, info in source.tensors.items():
        sizes[part_of(name)] = sizes.get(part_of(name), 0) + info.num_bytes
    return sizes


# --- the command that plans --------------------------------------------------------------------------------------------


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    try:
        print(msgspec.json.encode(plan_load(load)).decode())
    except LoadError as error:
        refusal = {"code": error.code, "message": error.message, "required": error.required_bytes, "free": error.free_bytes}
        print(msgspec.json.encode(refusal).decode())


if __name__ == "__main__":
    main()
