"""`relaxserve dynamo`: serve a model as a worker of NVIDIA Dynamo."""

from __future__ import annotations

import typer

from deploy.cli.output import answers
from runtime.extras import installing
from server.settings import SettingsError

# `parse` in deploy/dynamo/options.py reads all arguments, --help included.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def dynamo(context: typer.Context) -> None:
    """Serve a model as a worker of NVIDIA Dynamo, with Dynamo's options (docs/deployment.md).

    [bold]Examples[/bold]

      relaxserve dynamo demo --discovery-backend file

      relaxserve dynamo ~/models/Qwen3-8B --config relaxserve.yaml

      relaxserve dynamo ~/models/Qwen3-8B --url http://127.0.0.1:8000 --kv-events tcp://127.0.0.1:5557
    """
    is_help = any(word in ("-h", "--help") for word in context.args)
    if is_help:
        answers.print(context.get_help())
    try:
        from deploy.dynamo.engine import run
    except ModuleNotFoundError as error:
        if is_help:
            answers.print(f"The options are shown if Dynamo is installed: {installing('dynamo')}", highlight=False)
            return
        if (error.name or "").partition(".")[0] != "dynamo":
            raise
        raise SettingsError(f"Dynamo is not installed: {installing('dynamo')}") from error
    run(context.args)
