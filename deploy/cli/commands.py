"""`relaxserve`: register all commands. Each command calls a function of another module.

A command imports the modules that it needs only when it runs, so that `--help`, `ps` and `chat` need not wait for the compiler's imports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deploy.cli import (
    admin,
    bench,
    chat,
    compile,
    compiler,
    doctor,
    export,
    generate,
    inspect,
    launch,
    models,
    replay,
    running,
    serve,
    stage,
)
from deploy.cli.output import answers, errors

ALIASES = {"list": "ls", "images": "ls", "remove": "rm", "rmi": "rm"}  # words of Ollama and docker


class Commands(TyperGroup):
    """The commands, which also have the names that users of Ollama and docker know."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})

SERVING, MODELS, COMPILER = "Serving", "Models", "Compiler and measurements"

app.command("serve", cls=serve.ServeCommand, rich_help_panel=SERVING)(serve.serve)
app.command("load", rich_help_panel=SERVING)(admin.load)
app.command("unload", rich_help_panel=SERVING)(admin.unload)
app.command("stop", rich_help_panel=SERVING)(running.stop)
app.command("ps", rich_help_panel=SERVING)(admin.ps)
app.command("show", rich_help_panel=SERVING)(running.show)
app.command("cp", rich_help_panel=SERVING)(running.cp)
app.command("create", rich_help_panel=SERVING)(running.create)
app.command("chat", rich_help_panel=SERVING)(chat.chat)
app.command("launch", rich_help_panel=SERVING)(launch.launch)
app.command("stage", rich_help_panel=SERVING)(stage.stage)
app.command("replay", rich_help_panel=SERVING)(replay.replay)
app.command("run", rich_help_panel=SERVING)(models.run)
app.command("pull", rich_help_panel=MODELS)(models.pull)
app.command("ls", rich_help_panel=MODELS)(models.ls)
app.command("rm", rich_help_panel=MODELS)(models.rm)
app.command("doctor", rich_help_panel=MODELS)(doctor.doctor)
app.command("inspect", rich_help_panel=MODELS)(inspect.inspect)
app.command("compile", rich_help_panel=MODELS)(compile.compile_)
app.command("generate", rich_help_panel=MODELS)(generate.generate)
app.command("export", rich_help_panel=MODELS)(export.export)
app.command("opt", rich_help_panel=COMPILER)(compiler.opt)
app.command("eval", rich_help_panel=COMPILER)(compiler.eval_)
app.add_typer(compiler.cache, name="cache", rich_help_panel=COMPILER)
app.command("bench", rich_help_panel=COMPILER, add_help_option=False, context_settings=bench.CONTEXT, options_metavar="[NAME [OPTIONS]]")(
    bench.bench
)


@app.command("help", hidden=True)
def help_(ctx: typer.Context, command: Annotated[list[str] | None, typer.Argument(help="Name of a command.")] = None) -> None:
    """Show the help of a command, or list all commands.

    [bold]Examples[/bold]

      relaxserve help serve
    """
    parent = ctx.find_root()
    found: Any = parent.command
    for name in command or ():
        below = found.get_command(parent, name) if isinstance(found, TyperGroup) else None
        if below is None:
            raise typer.BadParameter(f"{name!r} is no command; `relaxserve help` lists them")
        found, parent = below, typer.Context(below, info_name=below.name, parent=parent)
    typer.echo(found.get_help(parent))


@app.command("version", hidden=True)
def version_() -> None:
    """Show the version.

    [bold]Examples[/bold]

      relaxserve version
    """
    _tell_version(True)


def _tell_version(asked: bool) -> None:
    if asked:
        answers.print(f"relaxserve {version('relaxserve')}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve language and embedding models, compiled on this machine, over an OpenAI-compatible API."""


def run(command: Callable[[], None]) -> None:
    """Run a command. An expected error prints one line and determines the exit status."""
    try:
        command()
    except (Exception, KeyboardInterrupt) as error:
        from deploy.cli.failure import status_of

        status = status_of(error)
        if status is None:
            raise
        errors.print(f"error: {error}" if str(error) else "interrupted", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(status)
