"""`relaxserve`: the commands, each a thin face of a function elsewhere."""

from __future__ import annotations

import typer

from deploy.cli import serve

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="rich")
app.command("serve")(serve.serve)


@app.callback()
def root() -> None:
    """Serve language and embedding models, compiled on this machine, over an OpenAI-compatible API."""


def main() -> None:
    app()
