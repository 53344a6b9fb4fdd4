"""Describe a model and its memory before its weights are loaded: from its configuration, the headers of its files, and the plan of the
compiled program.

python -m deploy.inspection < LOAD      LOAD is a message `Load` as JSON; prints the plan, or {"code", "message", ...} if it refuses
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec

from compiler.frontend.weights import WeightSource
from compiler.passes.number_schemes import schemes_of
from compiler.signature import signature
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.facts import values_by_type
from deploy.model_loading.files import Opened
from deploy.model_loading.known import Asked, Progress, begin, carried, silent
from deploy.model_loading.modes import Encoder, format_named
from deploy.model_loading.plan import WORKER_BYTES, Plan, plan_of, wanted_plan
from deploy.model_loading.servable import Servable
from deploy.model_loading.serving import limits_of
from deploy.model_loading.stages import advance
from deploy.quantizing.kept import in_format
from runtime import generated_code
from runtime.cache_groups import PAGE_SIZE
from runtime.device.base import Limits
from runtime.device.registry import open_device
from runtime.units import in_units
from server.interfaces import LoadError
from server.messages import Load


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts about a model that `relaxserve inspect` shows."""

    source: str
    family: str  # models with the same layers, fields of the configuration and names of weights
    defaults: str  # values for fields that requests leave out, from the file beside the model, in words
    serves: tuple[str, ...]  # what the server answers with this model, in words
    embedding_note: str  # how embeddings and scores are computed, in words; "" if the server gives none with this model
    num_parameters: int
    file_bytes: int
    bytes_by_part: dict[str, int]  # bytes in the files per part of the model: embeddings, attention, mlp, norms, head, other
    dtypes: dict[str, int]  # number of parameters by the type in which the files store them
    quantize: str  # the setting `quantize` of the load
    format: str  # the format of weights that `quantize` stands for
    max_context: int
    least_context: int  # tokens of a sequence for which there must be memory
    model_context: int  # longest context that the model supports
    max_batch: int
    devices: tuple[str, ...]  # the devices that compute the model; if there are several, `plan` is the plan of each device
    plan: Plan
    signature: str  # the types of the parameters of the program's entry point, with symbolic dimensions and their ranges
    key: str  # key of the compiled program in the cache
    cache_hit: bool  # whether the program was found in the cache, so that nothing was compiled
    compile_s: float  # seconds that the compilation took; 0 after a cache hit
    available_bytes: int  # memory of the device that is free now
    numeric_class: str  # programs with the same numeric class compute the same bits
    schemes: dict[str, int]  # number of matrix products, by a text that describes the numbers that they multiply

    @property
    def required_bytes(self) -> int:
        """The bytes of the plan and of the worker process itself."""
        return self.plan.total_bytes + WORKER_BYTES

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.available_bytes


def inspect_model(load: Load, progress: Progress = silent) -> Inspection:
    """Describe a model. Compile it, or find it in the cache, to read its memory plan."""
    return inspection_of(compiled(begin(load, progress)))


def compiled(begun: Asked) -> Compiled:
    """Run the stages of a load up to the compiled program, without loading weights. Also build the tokenizer, which a server does in
    another process. Raise LoadError if the tokenizer is missing or damaged, or if a stage refuses the load."""
    model = advance(begun, Servable)
    model.tokenizer_source.build()
    return advance(model, Compiled)


def inspection_of(known: Compiled) -> Inspection:
    """Describe a compiled model, with the memory that it would take on this machine."""
    files, mode, load, program = known.files, known.mode, known.load, known.program
    tensors, counts = files.weights.tensors, values_by_type(files)
    limits = _limits_of(known)
    plan = wanted_plan(known, limits)
    return Inspection(
        source=str(files.path),
        family=files.config.family,
        defaults=known.tokenizer_source.defaults().note,
        serves=known.serves,
        embedding_note=known.embedding_note,
        num_parameters=sum(counts.values()),
        file_bytes=sum(info.num_bytes for info in tensors.values()),
        bytes_by_part=_by_part(files.weights),
        dtypes=counts,
        quantize=load.quantize,
        format=format_named(files.config, load),
        max_context=mode.max_context if isinstance(mode, Encoder) else limits_of(mode, [of.num_pages for of in plan.groups]).capacity,
        least_context=mode.max_context if isinstance(mode, Encoder) else mode.least_context,
        model_context=files.config.max_context,
        max_batch=load.max_batch,
        devices=known.devices,
        plan=plan,
        signature=signature(known.module, mode.entry),
        key=program.key,
        cache_hit=program.cache_hit,
        compile_s=program.compile_s,
        available_bytes=limits.free_bytes,
        numeric_class=known.numeric_class,
        schemes=schemes_of(known.module),
    )


def plan_load(load: Load) -> Plan:
    """Plan the memory of a load. Raise LoadError if the load is impossible."""
    known = compiled(begin(load))
    return replace(plan_of(known, _limits_of(known)), cache_hit=known.program.cache_hit)


def _limits_of(known: Compiled) -> Limits:
    """Open the device of a compiled model for a moment, and return its limits, such as its free memory."""
    meta, num_ranks = known.program.executable.meta, known.load.tensor_parallel
    with closing(open_device(meta, num_threads=1, number=known.number, num_ranks=num_ranks)) as device:
        return device.limits


# --- remedies for a lack of memory --------------------------------------------------------------------------------------------


def remedies(known: Opened, found: Inspection) -> Iterator[str]:
    """Yield, in words, a setting with which a model that does not fit into this machine's memory would fit: a smaller KV cache if that is
    enough, else the first of int8 and 4bit with which the model fits. Yield nothing if it fits with neither. To plan the memory of another
    format, compile its program."""
    room = found.available_bytes - WORKER_BYTES - (found.plan.total_bytes - found.plan.kv_cache_bytes)
    least = -(-found.least_context // PAGE_SIZE) * found.plan.page_bytes
    if room >= least + found.plan.page_bytes:
        num_tokens = room // found.plan.page_bytes * PAGE_SIZE
        yield f"--kv-cache-bytes {room >> 20}M: {num_tokens} tokens of context for all sequences together"
        return
    for quantize in ("int8", "4bit"):
        if quantize == found.quantize:
            continue
        smaller_load = in_format(known.load, quantize)
        smaller = inspection_of(compiled(Opened(**carried(known, Opened, load=smaller_load))))
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
    """Return the part of a model to which the tensor of this name belongs: the first of _PARTS with a word in the name, or "other"."""
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
    generated_code.keep()


if __name__ == "__main__":
    main()
