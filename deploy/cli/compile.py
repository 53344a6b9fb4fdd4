"""`relaxserve compile`: compile a model into the cache before it is first served."""

from __future__ import annotations

from deploy.cli.output import answers, stages
from deploy.cli.sources import (
    Calibrate,
    Device,
    KvDtype,
    MaxBatch,
    MaxContext,
    Numerics,
    Quantize,
    Source,
    Target,
    TensorParallel,
    load_of,
)


def compile_(
    model: Source,
    quantize: Quantize = "auto",
    calibrate: Calibrate = "",
    max_context: MaxContext = None,
    max_batch: MaxBatch = 64,
    kv_dtype: KvDtype = "auto",
    numerics: Numerics = "auto",
    target: Target = "host",
    device: Device = "cpu",
    tensor_parallel: TensorParallel = 1,
) -> None:
    """Compile a model for this machine and keep the result, so that later starts need not compile.

    [bold]Examples[/bold]

      relaxserve compile ~/models/Qwen2.5-0.5B-Instruct

      relaxserve compile demo --max-context 512
    """
    from deploy.inspection import compiled
    from deploy.model_loading.known import begin

    load = load_of(model, quantize, max_context, max_batch, None, kv_dtype, target, device, calibrate, numerics, tensor_parallel)
    with stages(load.name) as report:
        program = compiled(begin(load, report)).program
    how = "was in the cache" if program.cache_hit else f"compiled in {program.compile_s:.1f} s"
    answers.print(f"{program.key} {how}", highlight=False)
