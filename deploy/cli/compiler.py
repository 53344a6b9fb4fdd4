"""`relaxserve opt`, `eval` and `cache`: use the compiler without a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.output import answers, errors
from runtime.units import in_units

if TYPE_CHECKING:
    from compiler.ir.module import IRModule
    from deploy.cache import Item, Kept

Program = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A program in text form.", metavar="FILE.ir")]
Archive = Annotated[Path, typer.Argument(help="Archive to write, with all entries.")]

TOLERANCE = 1e-4  # largest error relative to the largest element; another order of f32 sums causes a smaller error


def opt(
    program: Program,
    until: Annotated[str | None, typer.Option(help="Print the program after this pass, and stop.", metavar="PASS")] = None,
    passes: Annotated[str | None, typer.Option(help="Run only these passes, in this order.", metavar="PASS,PASS")] = None,
    target: Annotated[str, typer.Option(help="Compile for this machine.")] = "host",
) -> None:
    """Run compiler passes on a program and print the result.

    [bold]Examples[/bold]

      relaxserve opt mlp.ir --until fuse

      relaxserve opt mlp.ir --passes legalize,fuse,eliminate_dead_code

      RELAXSERVE_DEBUG=5 relaxserve opt mlp.ir --target avx512
    """
    from compiler.backends.registry import backend_of
    from compiler.driver import watched
    from compiler.ir.text.printer import print_module
    from compiler.machine.target import get
    from runtime import flags

    if until is not None and passes is not None:
        raise typer.BadParameter("--until and --passes cannot be used together")
    machine = get(target)
    with flags.scope(verify=True), watched() as instruments:
        chosen = backend_of(machine).pipeline(machine, instruments)
        if until is not None:
            chosen = chosen.until(until)
        if passes is not None:
            chosen = chosen.only([name.strip() for name in passes.split(",")])
        result = chosen(_read(program))
    answers.print(print_module(result), highlight=False, soft_wrap=True, end="")


def eval_(
    program: Program,
    entry: Annotated[str, typer.Argument(help="The function to call.")] = "main",
    dim: Annotated[list[str] | None, typer.Option(help="Value of a symbolic dimension; may be repeated.", metavar="NAME=N")] = None,
    check: Annotated[bool, typer.Option(help="Compare with the interpreter. An error above 1e-4 of the largest element fails.")] = False,
    check_bounds: Annotated[
        bool, typer.Option(help="First check every index in hand-written loop nests with the interpreter; slow.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
) -> None:
    """Compile a program and call it on random inputs.

    [bold]Examples[/bold]

      relaxserve eval mlp.ir main --dim n=7 --check

      relaxserve eval mlp.ir --dim n=1 --dim k=64 --seed 3

      relaxserve eval nests.ir --dim n=7 --check-bounds
    """
    from deploy.run_program import leaves, run_program

    ran = run_program(_read(program), entry, _dims(dim or []), seed=seed, check=check, check_bounds=check_bounds)
    for leaf in leaves(ran.result):
        answers.print(f"{leaf.dtype}{list(leaf.shape)}", highlight=False)
    if check:
        answers.print(f"largest error: {ran.largest_error:.3g} of the largest element", highlight=False)
        if ran.largest_error > TOLERANCE:
            raise typer.Exit(1)


def _read(program: Path) -> IRModule:
    """Read a program in text form. Raise BadParameter if it is no text, and CompileError if it is no valid program."""
    import compiler.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # fills the tables of operators
    from compiler.ir.text.parser import parse
    from compiler.ir.verify.module import verify

    try:
        text = program.read_text()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{program.name} is not a text file; expected a program in text form") from None
    module = parse(text)
    verify(module)
    return module


def _dims(texts: Sequence[str]) -> dict[str, int]:
    """Parse texts of the form NAME=N. Raise BadParameter for any other text, and for a second value of a dimension."""
    found: dict[str, int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise typer.BadParameter(f"--dim {text}: {name} is {found[name]} already; give each dimension once")
        try:
            found[name] = int(value)
        except ValueError:
            raise typer.BadParameter(f"--dim {text}: expected NAME=N, such as n=7") from None
    return found


# --- the cache -----------------------------------------------------------------------------------------------------------

cache = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Manage the cache of compiled programs.")


@cache.command("ls")
def ls() -> None:
    """List the compiled programs, most recently used first, with the models that were loaded with them and the size of their packed
    weights.

    [bold]Examples[/bold]

      relaxserve cache ls
    """
    from datetime import datetime

    from rich.table import Table

    from deploy.cache import Part

    table, folder = Table("models", "key", "ranges", "size", "packed weights", "last used", box=None), _kept()
    items = folder.items()
    ranges = {entry.path: entry.ranges for entry in folder.executables.entries()}
    for item in sorted((item for item in items if item.part is Part.PROGRAM), key=lambda item: -item.used_s):
        packed = [other for other in items if other.part is Part.WEIGHTS and other.key == item.key]
        allowed = {
            f"{v} {r.lower}..{'' if r.upper is None else r.upper}" for of in ranges.get(item.paths[0], {}).values() for v, r in of.items()
        }
        used = datetime.fromtimestamp(item.used_s).isoformat(" ", "seconds")
        models = ", ".join(Path(source).name for source in folder.models_of(item.key))
        table.add_row(models, item.key, ", ".join(sorted(allowed)), in_units(item.num_bytes), _amount(packed), used)
    answers.print(table)
    for part in Part:
        errors.print(f"{part}: {_amount([item for item in items if item.part is part])}", highlight=False)
    errors.print(f"in {folder.folder}", highlight=False, soft_wrap=True)


@cache.command("prune")
def prune(
    keep: Annotated[str | None, typer.Option(help="Largest size of the cache, such as 20G; 0 removes everything.", metavar="BYTES")] = None,
    keep_days: Annotated[float | None, typer.Option(help="Keep files that were used within this number of days.", metavar="DAYS")] = None,
    dry_run: Annotated[bool, typer.Option(help="Only report what would be removed.")] = False,
) -> None:
    """Remove cached files that cannot be used any more: packed weights and assembled code whose program was removed, and leftovers of
    interrupted loads. With --keep or --keep-days, also remove other files beyond that limit, least recently used first. Running servers
    keep the files that they have opened.

    [bold]Examples[/bold]

      relaxserve cache prune

      relaxserve cache prune --keep 20G --dry-run

      relaxserve cache prune --keep-days 30
    """
    from deploy.cache import Part
    from deploy.settings import num_bytes

    try:
        keep_bytes = 0 if keep is None else num_bytes(keep)
    except ValueError:
        raise typer.BadParameter(f"--keep {keep}: expected a number of bytes, such as 1000000, 64M or 2G") from None
    if keep_days is not None and not keep_days >= 0:
        raise typer.BadParameter(f"--keep-days {keep_days}: expected a number of days, such as 30")
    asked, folder = keep is not None or keep_days is not None, _kept()
    removed = folder.prune(keep_bytes=keep_bytes if asked else None, keep_s=(keep_days or 0.0) * 86400, dry_run=dry_run)
    for part in Part:
        gone = [item for item in removed if item.part is part]
        answers.print(f"{part}: {'would remove' if dry_run else 'removed'} {_amount(gone)}", highlight=False)
    if not asked and (rest := [item for item in folder.items() if item not in removed]):
        errors.print(f"kept: {_amount(rest)}; limit that with --keep BYTES or --keep-days DAYS", highlight=False)


@cache.command("verify")
def verify(
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged files; the next start builds them again.")] = False,
) -> None:
    """Compare compiled programs, weights and all other cached files that have checksums with these. Fail if any file is damaged.

    [bold]Examples[/bold]

      relaxserve cache verify

      relaxserve cache verify --remove
    """
    num_damaged, folder = 0, _kept()
    for path, fault in folder.verify():
        answers.print(
            f"{'damaged' if fault else 'sound'}  {path.relative_to(folder.folder)}  {fault}".rstrip(), highlight=False, soft_wrap=True
        )
        if fault:
            num_damaged += 1
            if remove:
                folder.remove(path)
    if num_damaged:
        remedy = (
            "removed; the next start builds them again"
            if remove
            else "`relaxserve cache verify --remove` removes them, and the next start builds them again"
        )
        errors.print(f"{num_damaged} damaged: {remedy}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _amount(items: Sequence[Item]) -> str:
    """Return the number and the size of items in words."""
    return f"{len(items)}, {in_units(sum(item.num_bytes for item in items))}" if items else "none"


@cache.command("export")
def export(archive: Archive) -> None:
    """Write all compiled programs to one file.

    [bold]Examples[/bold]

      relaxserve cache export compiled.tar
    """
    executables = _kept().executables
    entries = list(executables.entries())
    executables.export(archive, entries)
    answers.print(f"wrote {len(entries)} entries to {archive}", highlight=False)


@cache.command("import")
def import_(archive: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Archive that `cache export` wrote.")]) -> None:
    """Add the compiled programs of an archive, written by a machine of the same kind, to the cache.

    [bold]Examples[/bold]

      relaxserve cache import compiled.tar
    """
    taken = _kept().executables.load_archive(archive)
    answers.print(f"imported {len(taken)} entries", highlight=False)


def _kept() -> Kept:
    """Return the cache of this user, even if RELAXSERVE_NO_CACHE disables it. Raise BadParameter if its path is that of a
    file, or cannot be looked up. The folder may be missing."""
    from deploy.cache import Kept
    from runtime import flags

    folder = flags.current().cache
    try:
        is_other = folder.exists() and not folder.is_dir()
    except OSError as error:
        text = f"the cache {folder} cannot be read: {error.strerror}; set RELAXSERVE_CACHE to a folder of this user"
        raise typer.BadParameter(text) from error
    if is_other:
        raise typer.BadParameter(f"the cache {folder} is not a folder; set RELAXSERVE_CACHE to a folder")
    return Kept(folder)
