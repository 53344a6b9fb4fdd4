"""`relaxserve launch`: start a coding agent with a model of a running server."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from deploy.agents import AGENTS, Agent, Served, Settings
from deploy.cli.admin import DEFAULT_URL, Key, Url
from deploy.cli.chat import first_model
from deploy.cli.output import answers, errors
from deploy.client import Client, ServerFault
from deploy.settings import KEY_VARIABLE
from runtime.whole_files import remove_abandoned, replacing
from server.settings import SettingsError

Name = Annotated[str, typer.Argument(help=f"One of {', '.join(AGENTS)}.", metavar="AGENT")]


def launch(
    agent: Name,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the agent, behind --.")] = None,
    model: Annotated[str | None, typer.Option(help="Name or alias of the model; by default the first one that generates text.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the settings and the command, and start nothing.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Start a coding agent with a model of a running server. The agent's own settings stay as they are.

    [bold]Examples[/bold]

      relaxserve launch codex

      relaxserve launch claude --model qwen3-coder -- -p "Explain this repository."

      relaxserve launch opencode --show
    """
    chosen = AGENTS.get(agent)
    if chosen is None:
        raise typer.BadParameter(f"{agent!r} is not known; expected one of {', '.join(AGENTS)}")
    client = Client(url, key)
    served = served_by(client, model or first_model(client), key)
    settings = chosen.settings(served)
    if served.context < 2 * chosen.first_tokens:
        text = f"{agent} begins with about {chosen.first_tokens:,} tokens, and the context of {served.model} is {served.context:,}"
        errors.print(f"{text}: load the model with a larger max_context", style="yellow", highlight=False, soft_wrap=True)
    file = written(settings)
    words = [chosen.program, *settings.arguments, *([] if file is None else [str(file)]), *(arguments or [])]
    if show:
        answers.print(script(settings, words, key), highlight=False, soft_wrap=True)
        return
    start(chosen, words, settings)


def served_by(client: Client, name: str, key: str | None) -> Served:
    """Return the server's model with this name or alias. Raise ServerFault if there is none."""
    known = client.get("/v1/models")["data"]
    found = next((model for model in known if name in (model["id"], *model.get("aliases", ()))), None)
    if found is None:
        names = ", ".join(model["id"] for model in known)
        raise ServerFault(f"the server at {client.url} has no model {name!r}; it has {names or 'none'}")
    return Served(client.url, name, found["max_model_len"], key)


def written(settings: Settings) -> Path | None:
    """Write the settings file so that only its owner can read it, because it may contain the key. Return the path that the agent's
    arguments name, or None if the agent needs no file. Raise SettingsError if the file cannot be written."""
    if not settings.file:
        return None
    home = os.environ.get("XDG_CONFIG_HOME")
    folder = (Path(home) if home else Path.home() / ".config") / "relaxserve"
    path = folder / settings.file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)  # a file that a killed command has left may contain the key, too
        with replacing(path, synced=False) as file:
            file.write(f"{settings.file}\n".encode())
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}; set XDG_CONFIG_HOME to a folder of this user") from error
    return folder / settings.named


def script(settings: Settings, words: list[str], key: str | None) -> str:
    """Return the agent's variables and its command, `words`, as lines for a shell. The lines refer to the variable RELAXSERVE_KEY instead
    of containing the key, and do not set this variable to the key."""
    named = {name: f'"${KEY_VARIABLE}"' if value == key else shlex.quote(value) for name, value in settings.environment.items()}
    lines = [f"export {name}={value}" for name, value in named.items() if (name, settings.environment[name]) != (KEY_VARIABLE, key)]
    return "\n".join([*lines, shlex.join(words)])


def start(agent: Agent, words: list[str], settings: Settings) -> None:
    """Replace this process by the agent. Raise ServerFault if the agent is not installed."""
    program = shutil.which(agent.program)
    if program is None:
        raise ServerFault(f"{agent.name} is not installed: no program {agent.program!r} is in PATH; install it with `{agent.package}`")
    os.execve(program, words, {**os.environ, **settings.environment})
