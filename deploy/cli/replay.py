"""`relaxserve replay`: send logged requests again, and print the first answer that differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.admin import DEFAULT_URL, Key, Url
from deploy.cli.output import answers
from deploy.client import Client

if TYPE_CHECKING:
    from deploy.replay import Difference


def replay(
    log: Annotated[Path, typer.Argument(help="File that a server wrote with --keep-requests.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Send the requests of a log to a running server, one after another, and compare the answers with the logged ones. Print the first
    difference and exit with status 1, or say that there is none. Servers whose models have the same system_fingerprint answer alike.

    [bold]Examples[/bold]

      relaxserve serve demo --keep-requests requests.jsonl

      relaxserve replay requests.jsonl --url http://127.0.0.1:8001
    """
    from deploy.replay import replay as replayed

    found = replayed(log, Client(url, key))
    skipped = f"; {found.num_skipped} skipped, which failed or cannot be repeated" if found.num_skipped else ""
    skipped += f"; {found.num_torn} torn lines, which a server was writing when it was killed" if found.num_torn else ""
    if found.difference is None:
        answers.print(f"{found.num_equal} answers are equal{skipped}", highlight=False)
        return
    answers.print(f"{found.num_equal} answers are equal{skipped}; then one differs", highlight=False)
    _show(found.difference)
    raise typer.Exit(1)


def _show(difference: Difference) -> None:
    """Print a difference: where it is, both values, and that another model has answered if the fingerprints differ."""
    request = difference.request
    lines = [
        f"{request.path}, {request.request_id}, line {request.line}: {difference.field}",
        f"  logged  {difference.logged}",
        f"  now     {difference.now}",
    ]
    if difference.fingerprint not in ("", request.fingerprint):
        lines.append(f"  the log is of {request.fingerprint}, and the model is {difference.fingerprint}: program, files or numbers differ")
    for line in lines:
        answers.print(line, highlight=False, soft_wrap=True)
