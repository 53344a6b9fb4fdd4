"""The command line: one file per group of commands; `commands` registers them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

HELP = ("-h", "--help", "--help-all")  # arguments with which `serve` only shows its help


def main() -> None:
    imported()()


def imported() -> Callable[[], None]:
    """Import the commands, and return the function that runs the one that the arguments name. For `serve`, import no other command, start
    the first worker before the imports, and use the code of dataclasses that an earlier start has stored, so that the server is ready
    sooner."""
    if sys.argv[1:2] == ["serve"] and not {*HELP} & {*sys.argv}:
        _start_worker()
        from runtime.generated_code import recall

        recall("serve")
        from deploy.cli.root import new_app, run
        from deploy.cli.serve import add_to

        app = add_to(new_app())
    else:
        from deploy.cli.commands import app
        from deploy.cli.root import run

    return lambda: run(app)


def _start_worker() -> None:
    """Start the first worker before the imports of this process, so that both processes import at the same time."""
    from deploy.secrets import without_secrets
    from runtime.launch import command
    from server.workers.starting import start_ahead

    start_ahead(command("deploy.worker"), without_secrets(os.environ))
