"""The command `relaxserve` without the commands below it: its options, and how an error ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deploy.cli.output import answers, errors

SERVING, MODELS, COMPILER = "Serving", "Models", "Compiler and measurements"  # panels of the help
ALIASES = {"list": "ls", "images": "ls", "remove": "rm", "rmi": "rm"}  # words of Ollama and docker


class Commands(TyperGroup):
    """The commands, which also have the names that users of Ollama and docker know."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))


def new_app() -> typer.Typer:
    """Return the command `relaxserve` without any command below it."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich", context_settings=settings)
    app.callback()(root)
    return app


def tell_version(asked: bool) -> None:
    """If asked, print the version and end the program."""
    if asked:
        answers.print(f"relaxserve {version('relaxserve')}", highlight=False)
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve language and embedding models, compiled on this machine, over an OpenAI-compatible API."""


def run(command: Callable[[], None]) -> None:
    """Run a command. An expected error prints one line and determines the exit status. Any other error is a bug, and is raised again."""
    try:
        command()
    except (Exception, KeyboardInterrupt) as error:
        from deploy.cli.failure import status_of

        status = status_of(error)
        if status is None:
            raise
        errors.print(f"error: {error}" if str(error) else "interrupted", style="red", highlight=False, soft_wrap=True)
        sys.exit(status)
