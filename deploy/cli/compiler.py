"""`relaxserve opt`, `run` and `cache`: the compiler by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.output import answers, errors, in_units

if TYPE_CHECKING:
    from compiler.cache import Cache
    from compiler.ir.module import IRModule

Program = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A program in text.", metavar="FILE.ir")]
Archive = Annotated[Path, typer.Argument(help="One file that holds all entries.")]

TOLERANCE = 1e-4  # of the largest element: the roundings of f32 in another order


def opt(
    program: Program,
    until: Annotated[str | None, typer.Option(help="Stop behind this pass.", metavar="PASS")] = None,
    passes: Annotated[str | None, typer.Option(help="Run only these, in this order.", metavar="PASS,PASS")] = None,
    target: Annotated[str, typer.Option(help="Compile for this machine.")] = "host",
) -> None:
    """Take a program through the passes and print what they make of it.

    [bold]Examples[/bold]

      relaxserve opt mlp.ir --until fuse

      relaxserve opt mlp.ir --passes legalize,fuse,eliminate_dead_code

      RELAXSERVE_DEBUG=5 relaxserve opt mlp.ir --target avx512
    """
    from compiler.ir.printer import print_module
    from compiler.passes.base import Verify
    from compiler.passes.pipeline import pipeline
    from compiler.target import get

    if until is not None and passes is not None:
        raise typer.BadParameter("--until and --passes exclude each other")
    chosen = pipeline(get(target), (Verify(),))
    if until is not None:
        chosen = chosen.until(until)
    if passes is not None:
        chosen = chosen.only([name.strip() for name in passes.split(",")])
    answers.print(print_module(chosen(_read(program))), markup=False, highlight=False, soft_wrap=True, end="")


def run(
    program: Program,
    entry: Annotated[str, typer.Argument(help="The function to call.")] = "main",
    dim: Annotated[list[str] | None, typer.Option(help="Value of a dimension.", metavar="NAME=N")] = None,
    check: Annotated[bool, typer.Option(help="Compare with the interpreter; an error above 1e-4 of the largest element fails.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
) -> None:
    """Compile a program and call it on random inputs.

    [bold]Examples[/bold]

      relaxserve run mlp.ir main --dim n=7 --check

      relaxserve run mlp.ir --dim n=1 --dim k=64 --seed 3
    """
    from deploy.check import leaves, run_program

    ran = run_program(_read(program), entry, dict(_dim(text) for text in dim or []), seed=seed, check=check)
    for leaf in leaves(ran.result):
        answers.print(f"{leaf.dtype}{list(leaf.shape)}", highlight=False)
    if check:
        answers.print(f"largest error: {ran.largest_error:.3g} of the largest element", highlight=False)
        if ran.largest_error > TOLERANCE:
            raise typer.Exit(1)


def _read(program: Path) -> IRModule:
    import compiler.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # fills the tables of operators
    from compiler.ir.parser import parse
    from compiler.ir.verify import verify

    try:
        text = program.read_text()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{program.name} is no text; expected a program in text") from None
    module = parse(text)
    verify(module)
    return module


def _dim(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        raise typer.BadParameter(f"--dim {text}: expected NAME=N, as n=7") from None


# --- the cache -----------------------------------------------------------------------------------------------------------

cache = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="What was compiled before.")


@cache.command("ls")
def ls() -> None:
    """List the compiled programs, those used last first.

    [bold]Examples[/bold]

      relaxserve cache ls
    """
    from datetime import datetime

    from rich.table import Table

    table = Table("key", "ranges", "size", "last used", box=None)
    entries = sorted(_cache().entries(), key=lambda e: -e.used_s)
    for entry in entries:
        ranges = {f"{v} {r.lower}..{'' if r.upper is None else r.upper}" for of in entry.ranges.values() for v, r in of.items()}
        used = datetime.fromtimestamp(entry.used_s).isoformat(" ", "seconds")
        table.add_row(entry.key, ", ".join(sorted(ranges)), in_units(entry.num_bytes), used)
    answers.print(table)
    errors.print(f"{len(entries)} entries, {in_units(sum(e.num_bytes for e in entries))} in {_cache().folder}", highlight=False)


@cache.command("prune")
def prune(
    keep: Annotated[str, typer.Option(help="Bytes that may stay, as 500M; 0 removes all.", metavar="BYTES")] = "0",
    keep_days: Annotated[float, typer.Option(min=0.0, help="Entries used since then stay.")] = 0.0,
) -> None:
    """Remove compiled programs, the longest unused first.

    [bold]Examples[/bold]

      relaxserve cache prune --keep 500M

      relaxserve cache prune --keep-days 30
    """
    from deploy.settings import num_bytes

    try:
        keep_bytes = num_bytes(keep)
    except ValueError:
        raise typer.BadParameter(f"--keep {keep}: expected a number of bytes, as 1000000, 64M or 2G") from None
    removed = _cache().prune(keep_bytes=keep_bytes, keep_s=keep_days * 86400)
    answers.print(f"removed {len(removed)} entries, {in_units(sum(e.num_bytes for e in removed))}", highlight=False)


@cache.command("export")
def export(archive: Archive) -> None:
    """Write all compiled programs to one file.

    [bold]Examples[/bold]

      relaxserve cache export compiled.tar
    """
    entries = list(_cache().entries())
    _cache().export(archive, entries)
    answers.print(f"wrote {len(entries)} entries to {archive}", highlight=False)


@cache.command("import")
def import_(archive: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `cache export` wrote.")]) -> None:
    """Take in what another machine of the same kind compiled.

    [bold]Examples[/bold]

      relaxserve cache import compiled.tar
    """
    taken = _cache().load_archive(archive)
    answers.print(f"took in {len(taken)} entries", highlight=False)


def _cache() -> Cache:
    from compiler.cache import Cache
    from runtime import flags

    return Cache(flags.current().cache / "executables")
