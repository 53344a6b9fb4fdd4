"""`relaxserve export`: write a model in a form that runs without Python."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.output import answers, stages
from deploy.cli.sources import Source, load_of, takes
from runtime.units import in_units
from server.load_settings import LEAST_CONTEXT

EXPORT_CONTEXT = "Maximum length of a sequence, in tokens; by default the model's, at most 4096, since an export takes the memory for it."


@takes("quantize", "calibrate", "kv_dtype", "numerics", "embeddings")
def export(
    model: Source,
    target: Annotated[str, typer.Option(help="web, or the machine of a C library: aarch64-linux, riscv64-linux, x86-64-v3, ...")] = "web",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New or empty folder; by default ./MODEL-TARGET.")] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Prefix of C names, by default rs. One program can link libraries with different prefixes."),
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Write libMODEL.so, a shared library, beside libMODEL.a.")] = False,
    max_context: Annotated[int | None, typer.Option(min=LEAST_CONTEXT, help=EXPORT_CONTEXT)] = None,
    **form: Any,
) -> None:
    """Write a model in a form that runs without Python: in a browser, or linked into a C program.

    [bold]Examples[/bold]

      relaxserve export demo --target web

      relaxserve export ~/models/Qwen2.5-0.5B-Instruct --quantize 4bit -o site/qwen

      relaxserve export demo --target riscv64-linux --shared
    """
    from deploy.export.c import PREFIX, build_command, c_prefix, c_target, export_c
    from deploy.export.folder import new_folder
    from deploy.export.model import servable
    from deploy.export.web import export_web, page_sees
    from deploy.model_loading.known import begin

    machine = None if target == "web" else c_target(target)
    names = c_prefix(PREFIX if prefix is None else prefix)
    if machine is None and prefix is not None:
        raise typer.BadParameter(f"prefix is {prefix!r}; an export for browsers has no C names: leave --prefix out")
    if machine is None and shared:
        raise typer.BadParameter(
            "--shared is set, but an export for browsers has no C library: leave --shared out, or name a machine: --target aarch64-linux"
        )
    if machine is not None and form.get("embeddings"):
        raise typer.BadParameter("--embeddings is set, but a C library gives none: leave --embeddings out, or name --target web")
    load = load_of(model, max_batch=1, max_context=max_context, **form)
    place = output or Path(f"{load.name.replace('/', '-')}-{target}")
    with _exit_at_sigterm(), new_folder(place) as folder, stages(load.name) as report:
        opened = servable(begin(load, report), page_sees) if machine is None else servable(begin(load, report))
        if machine is None:
            export_web(opened, load.name, folder, report)
            what = "Serve it as static files and open chat.html."
        else:
            library = export_c(opened, load.name, machine, folder, report, prefix=names, shared=shared)
            what = f"Build the example there: {build_command(library.name)}"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    answers.print(f"{folder}: {in_units(size)}. {what}", highlight=False, soft_wrap=True)


@contextmanager
def _exit_at_sigterm() -> Generator[None]:
    """Let SIGTERM raise SystemExit, as SIGINT raises KeyboardInterrupt, so that a folder that is partly filled is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
