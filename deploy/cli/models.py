"""`relaxserve pull`, `ls`, `rm` and `run`: download, list, remove and run models on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from datetime import datetime
from typing import IO, Annotated, Any

import typer
from rich.table import Table

from deploy.bound import bound
from deploy.cli.admin import AsJson
from deploy.cli.chat import MaxTokens, Mcp, Question, Seed, System, Temperature, Yes
from deploy.cli.output import answers, errors, stages
from deploy.cli.sources import name_of, takes
from deploy.client import ServerFault
from deploy.secrets import hub_token, take_secrets
from deploy.settings import CONFIG_VARIABLE, PREFIX, SETTINGS, downloadable, model_spec
from runtime.launch import command
from runtime.units import in_units
from server.interfaces import LoadError
from server.messages import ErrorCode, Load
from server.models.sources import without_host

SERVE = (*command("deploy.cli"), "serve")
READY = re.compile(r"relaxserve at (http://[\w.:\[\]]+): ")
Wanted = Annotated[
    str, typer.Argument(help="Name in `ls --available`, ORGANISATION/NAME on the hub, or one of its files as :FILE.gguf.", metavar="SOURCE")
]


def pull(
    source: Wanted,
    label: Annotated[bool, typer.Option(help="Measure the quality in which `serve` serves the model.")] = True,
) -> None:
    """Download the files of a model that are not here yet. Then measure how far the predictions of the form that is served are from those
    of the exact weights; servers state it with the model.

    [bold]Examples[/bold]

      relaxserve pull smollm2

      relaxserve pull Qwen/Qwen2.5-0.5B-Instruct

      relaxserve pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m
    """
    from deploy.model_loading import origins

    source, token = downloadable(source), hub_token(take_secrets(os.environ))
    _fetch(source, token)
    place = origins.download(source, hub_token=token)
    answers.print(f"{source} is in {place}", highlight=False, soft_wrap=True)
    if label:
        _label(source, str(place))


def _label(source: str, place: str) -> None:
    """Measure the quality label of a downloaded model and print it, or print why it has none. Print nothing for a model that generates no
    text."""
    from deploy.quality.measure import label_of
    from server.models.quality import in_words

    try:
        with stages(source) as report:
            label = label_of(Load(source, place), report)
    except LoadError as error:
        if error.code is not ErrorCode.NOT_A_GENERATIVE_MODEL:  # an embedding model has no quality label, so print nothing
            errors.print(f"{source} has no quality label: {error.message}", highlight=False, soft_wrap=True)
    else:
        answers.print(f"{source} as served: {in_words(label)}", highlight=False, soft_wrap=True)


def _fetch(source: str, token: str | None) -> None:
    """Download a model in a process of its own: an interrupt ends it at once, while the library of the hub would first finish the files
    that it has begun. The next download of this model continues where this one has ended. Raise LoadError if the download fails."""
    from deploy.library import Downloads

    async def fetched() -> None:
        with stages(source) as show:
            async with aclosing(Downloads(token).pull(source)) as parts:
                async for part in parts:
                    if part.total_bytes:
                        show(f"fetch {in_units(part.total_bytes)}", part.completed_bytes / part.total_bytes)

    asyncio.run(fetched())


def ls(as_json: AsJson = False, available: Annotated[bool, typer.Option(help="List the models that have short names.")] = False) -> None:
    """List the downloaded models on this machine.

    [bold]Examples[/bold]

      relaxserve ls

      relaxserve ls --available

      relaxserve ls --json
    """
    from deploy.model_loading import origins

    models = origins.held()
    if available:
        _list_available({name for one in models for name in one.names}, as_json)
        return
    if as_json:
        answers.print_json(data=[{"source": one.source, "bytes": one.num_bytes, "used_at": one.used_s} for one in models])
        return
    table = Table("model", "size", "last used", box=None)
    for one in models:
        table.add_row(one.source, in_units(one.num_bytes), datetime.fromtimestamp(one.used_s).isoformat(" ", "seconds"))
    answers.print(table)


def _list_available(held: set[str], as_json: bool) -> None:
    """Print the models that have short names. `held` has the short names of those that are downloaded."""
    from deploy.catalogue import ENTRIES
    from deploy.model_loading.origins import hub_source, packaged

    found = [
        {
            "name": entry.name,
            "about": entry.about,
            "licence": entry.licence,
            "origin": "package index" if packaged(entry.name) else f"hub: {hub_source(entry.name)}",
            "here": entry.name in held,
        }
        for entry in ENTRIES
    ]
    if as_json:
        answers.print_json(data=found)
        return
    table = Table("name", "model", "licence", "from", "", box=None)
    for one in found:
        table.add_row(str(one["name"]), str(one["about"]), str(one["licence"]), str(one["origin"]), "here" if one["here"] else "")
    answers.print(table)


def rm(sources: Annotated[list[str], typer.Argument(help="Models to remove, as `relaxserve ls` shows them.", metavar="SOURCE")]) -> None:
    """Remove downloaded models from this machine. A server that has loaded one keeps serving it until it restarts.

    [bold]Examples[/bold]

      relaxserve rm smollm2

      relaxserve rm Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m
    """
    from deploy.model_loading import origins

    for source in sources:
        freed = origins.remove(without_host(source))
        if not freed:
            known = ", ".join(one.source for one in origins.held()) or "none"
            raise typer.BadParameter(f"{source!r} is not on this machine; these models are: {known}")
        answers.print(f"what was here of {source} is removed and gave back {in_units(freed)}", highlight=False)


@takes("quantize", "max_context")
def run(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or a name in `ls --available`.")],
    question: Question = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    mcp: Mcp = None,
    yes: Yes = False,
    **form: Any,
) -> None:
    """Start a server for a model, chat with it, and stop the server when the conversation ends.

    [bold]Examples[/bold]

      relaxserve run smollm2 "What is the capital of France?"

      relaxserve run Qwen/Qwen2.5-0.5B-Instruct --quantize int8
    """
    from deploy.cli.chat import chat, check_approval
    from deploy.model_loading.locate import is_here

    check_approval(mcp, yes=yes)  # check this before the download and the load
    if not is_here(source := model_spec(model).source):
        _fetch(source, hub_token(os.environ))
    options = [part for field, value in form.items() for part in (name_of(field), str(value))]
    with _serving(model, options) as url:
        chat(question, None, system, max_tokens, temperature, seed, mcp, yes, url=url, key=None)


@contextmanager
def _serving(model: str, options: list[str]) -> Generator[str]:
    """Start a server and yield its address; stop the server at the end, however this process ends. Settings in the environment are for
    other servers, so the server does not get them: it needs no key and stores no state. Raise ServerFault if the model does not load."""
    others = {CONFIG_VARIABLE, *(PREFIX + setting.name.upper() for setting in SETTINGS)}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    # The server runs in a separate session, so that Ctrl-C interrupts an answer, but not the server.
    words = bound((*SERVE, model, *options, "--port", "0", "--log-level", "warning"))
    server = subprocess.Popen(
        words, env=environment, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", start_new_session=True
    )
    try:
        yield _address(server, model)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _address(server: subprocess.Popen[str], model: str) -> str:
    """Return the server's address once the model is loaded. Until then, show that the model loads, and print the server's warnings. Raise
    ServerFault if the server ends before the model is loaded."""
    assert server.stderr is not None
    with stages(model) as show:
        show("load", 0.0)
        for line in server.stderr:
            if found := READY.search(line):
                threading.Thread(target=_read_on, args=(server.stderr,), daemon=True).start()
                return found[1]
            errors.print(line.rstrip(), style="dim", highlight=False, soft_wrap=True)
    server.stderr.close()
    raise ServerFault("the server ended before the model was ready; the lines above give the reason")


def _read_on(pipe: IO[str]) -> None:
    """Read and discard the server's output until the pipe ends, because a full pipe would block the server."""
    with pipe:
        for _ in pipe:
            pass
