"""`relaxserve compile`: compile a model into the cache before it is first served."""

from __future__ import annotations

from typing import Any

from deploy.cli.output import answers, stages
from deploy.cli.sources import PROGRAM, Source, load_of, takes


@takes(*PROGRAM, "max_batch")
def compile_(model: Source, **form: Any) -> None:
    """Compile a model for this machine and keep the result, so that later starts need not compile.

    [bold]Examples[/bold]

      relaxserve compile ~/models/Qwen2.5-0.5B-Instruct

      relaxserve compile demo --max-context 512
    """
    from deploy.inspection import compiled
    from deploy.model_loading.known import begin

    load = load_of(model, **form)
    with stages(load.name) as report:
        program = compiled(begin(load, report)).program
    how = "was in the cache" if program.cache_hit else f"compiled in {program.compile_s:.1f} s"
    answers.print(f"{program.key} {how}", highlight=False)
