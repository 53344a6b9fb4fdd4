"""`relaxserve doctor`: report what this machine offers for serving and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from deploy.cli.output import answers
from runtime.extras import installing
from runtime.units import in_units

if TYPE_CHECKING:
    from deploy.machine import Machine

OK, NOTE, FAULT = "ok", "note", "fault"  # marks of findings: nothing to do, something could be better, this machine cannot serve
STYLES = {OK: "green", NOTE: "yellow", FAULT: "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Report what this machine offers for serving and what would improve it. Fail if it cannot serve.

    [bold]Examples[/bold]

      relaxserve doctor

      relaxserve doctor --json
    """
    from deploy.machine import survey

    machine = survey()
    findings = examine(machine)
    if as_json:
        target = {"arch": machine.target.arch, "vector_bits": machine.target.vector_bits, "features": machine.features}
        facts = {**asdict(machine), "target": target, "faults": [text for mark, _, text in findings if mark == FAULT]}
        answers.print_json(json.dumps(facts, default=str))
    else:
        table = Table(box=None, show_header=False)
        for mark, subject, text in findings:
            table.add_row(Text(mark, STYLES[mark]), subject, text)
        answers.print(table, highlight=False)
    if any(mark == FAULT for mark, _, _ in findings):
        raise typer.Exit(1)


def examine(machine: Machine) -> list[tuple[str, str, str]]:
    """Return one row per finding: its mark, its subject, and a text with the finding and its remedy."""
    from deploy.machine import EXTRAS

    memory, cache = machine.memory, machine.cache
    limited = machine.num_cores < machine.num_cores_present
    cores = f"{machine.num_cores} of {machine.num_cores_present} cores (affinity or quota)" if limited else f"{machine.num_cores} cores"
    limit = "" if memory.limit_bytes is None else f", limited to {in_units(memory.limit_bytes)} by the control group"
    rows = [
        (OK, "processor", machine.processor),
        (OK, "target", f"{machine.target.arch}, vectors of {machine.target.vector_bits} bits: {', '.join(machine.features)}"),
        (NOTE if limited else OK, "cores", cores),
        (OK, "memory", f"{in_units(memory.available_bytes)} available of {in_units(memory.total_bytes)}{limit}"),
    ]
    if machine.huge_pages == "never":
        rows.append((NOTE, "huge pages", "never; to read weights faster: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"))
    else:
        rows.append((OK, "huge pages", machine.huge_pages))
    if cache.refusal:
        rows.append((FAULT, "cache", cache.refusal))
    elif cache.writable:
        rows.append((OK, "cache", f"{cache.path}: {in_units(cache.used_bytes)} used, {in_units(cache.free_bytes)} free"))
    else:
        text = f"{cache.path} cannot be written: what it lacks is made again at each start, models whose files are packages cannot be"
        rows.append((NOTE, "cache", f"{text} downloaded, and uploads and batches need batch_dir; set RELAXSERVE_CACHE to another folder"))
    if machine.gpus and machine.gpu_problem:
        rows.append((NOTE, "GPU", f"{', '.join(machine.gpus)}; models run on the CPU: {machine.gpu_problem}"))
    else:
        rows += [(OK, f"GPU {number}", f"{gpu}; models run on it with --device cuda:{number}") for number, gpu in enumerate(machine.gpus)]
    if not machine.gpus:
        rows.append((OK, "GPU", "none; models run on the CPU"))
    for name in machine.missing_extras:
        rows.append((NOTE, name, f"not installed: to {EXTRAS[name][1]}, {installing(name)}"))
    return rows
