"""`relaxserve compile`: fill the cache ahead of the first start."""

from __future__ import annotations

from deploy.cli.output import answers, errors
from deploy.cli.sources import MaxBatch, MaxContext, Quantize, Source, load_of


def compile_(model: Source, quantize: Quantize = "bf16", max_context: MaxContext = None, max_batch: MaxBatch = 64) -> None:
    """Compile a model for this machine and keep the result, so that it starts at once later.

    [bold]Examples[/bold]

      relaxserve compile ~/models/Qwen2.5-0.5B-Instruct

      relaxserve compile demo --max-context 512
    """
    from deploy.inspection import compile_only

    with errors.status(f"compiling {model}"):
        compiled = compile_only(load_of(model, quantize, max_context, max_batch, None))
    how = "was in the cache" if compiled.cache_hit else f"compiled in {compiled.compile_s:.1f} s"
    answers.print(f"{compiled.key} {how}", highlight=False)
