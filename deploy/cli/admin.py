"""`relaxserve load`, `unload` and `ps`: manage the models of a running server."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from deploy.cli.output import Bars, answers, errors
from deploy.cli.sources import OPTIONS, name_of, takes
from deploy.client import Client, ServerFault, segment
from deploy.settings import KEY_VARIABLE, URL_VARIABLE
from runtime.units import in_units
from server.defaults import DefaultsError, read_texts

DEFAULT_URL = "http://127.0.0.1:8000"
WANT_ADMIN = ("admin_key_required", "admin_disabled")  # error codes of a server whose administration refuses the client's key
STOPPED_S = 120.0  # time that a worker may take to end after its last request

Url = Annotated[str, typer.Option(help="Address of the server.", envvar=URL_VARIABLE)]
Key = Annotated[str | None, typer.Option(help="API key; the variable hides it from other users.", envvar=KEY_VARIABLE, show_envvar=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# Without `calibrate` and `stages`, because a request may name neither files nor other hosts for the server.
@takes(*(field for field in OPTIONS if field not in ("calibrate", "stages")))
def load(
    source: Annotated[str, typer.Argument(help="Folder below the server's model root, or a hub id where the server allows them.")],
    name: Annotated[str | None, typer.Option(help="Name to serve the model under; by default the folder's name.")] = None,
    swap: Annotated[bool, typer.Option(help="Unload the models that lose their last alias to this model.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only show the memory that the model would take.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    **form: Any,
) -> None:
    """Load a model into a running server and follow it until it is ready.

    [bold]Examples[/bold]

      relaxserve load Qwen2.5-0.5B-Instruct --name qwen

      relaxserve load Llama-3.2-1B --alias gpt-4o-mini --kv-cache-bytes 2G --dry-run
    """
    client = Client(url, key)
    if "defaults" in form:
        try:
            form["defaults"] = read_texts(form["defaults"], name_of("defaults")).given
        except DefaultsError as error:
            raise typer.BadParameter(str(error)) from error
    given = {"source": source, **form, **{name: True for name, asked in (("swap", swap), ("dry_run", dry_run)) if asked}}
    operation = client.post("/admin/models", given if name is None else {**given, "name": name})
    if dry_run:
        answers.print_json(json.dumps(operation))
        return
    with Bars() as bars:
        path = f"/admin/operations/{operation['id']}/events"
        for state in client.events("GET", path):
            operation = state
            if operation["state"] == "running":
                bars.show(operation["model"], operation["stage"], operation["fraction"])
    if operation["error"] is not None:
        raise ServerFault(operation["error"]["message"], operation["error"]["code"])
    model = client.get(f"/admin/models/{segment(operation['model'])}")
    memory = model["memory"]
    taken = f"{in_units(memory['resident_bytes'])} in memory, at most {in_units(memory['bound_bytes'])}"
    answers.print(f"{model['id']} is ready: {taken}, context {model['max_model_len']}", highlight=False)
    for note in filter(None, (model.get("context_note"), model.get("embedding_note"), model.get("device_note"))):
        errors.print(note, style="dim", highlight=False, soft_wrap=True)


def unload(
    name: Annotated[str, typer.Argument(help="Name of the model; an alias is refused.")],
    drain_s: Annotated[float, typer.Option(min=0.0, max=86400.0, help="Seconds that running requests may continue.")] = 30.0,
    force: Annotated[bool, typer.Option(help="Unload a pinned model too.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Let a model's running requests finish, then unload it from a running server.

    [bold]Examples[/bold]

      relaxserve unload qwen

      relaxserve unload qwen --drain-s 5 --force
    """
    query = f"?drain_s={drain_s}{'&force=true' if force else ''}"
    freed = Client(url, key, timeout_s=drain_s + STOPPED_S).delete(f"/admin/models/{segment(name)}{query}")
    answers.print(f"{freed['name']} is unloaded and gave back {in_units(freed['freed_bytes'])}", highlight=False)


def ps(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """List the models of a running server with state, memory, load and restarts.

    [bold]Examples[/bold]

      relaxserve ps

      relaxserve ps --json --url http://10.0.0.5:8000
    """
    client = Client(url, key)
    try:
        listed = client.get("/admin/models")
    except ServerFault as fault:
        if fault.code not in WANT_ADMIN:
            raise
        listed = client.get("/v1/models")
        errors.print("state and memory need an admin key; these models are loaded:", style="dim")
    models = listed["data"]
    if as_json:
        answers.print_json(json.dumps(models))
        return
    table = Table(
        "model",
        "state",
        "in memory",
        "weights",
        "arena",
        "kv cache, at most",
        "pages",
        "running",
        "waiting",
        "restarts",
        "source",
        box=None,
    )
    for model in models:
        table.add_row(*_row(model))
    answers.print(table)
    for failed in listed.get("failed", ()):
        errors.print(f"{failed['model']} failed to load: {failed['error']['message']}", style="red", highlight=False)


def _row(model: dict[str, Any]) -> list[str]:
    """Return the cells of a model in the table of `ps`. A cell is empty if the server does not return its value; clients without an admin
    key do not get all values."""
    parts, pages = model.get("bytes", {}), model.get("pages", {})
    return [
        ", ".join([model["id"], *model["aliases"]]),
        model.get("state", ""),
        in_units(model["memory"]["resident_bytes"]) if "memory" in model else "",
        *(in_units(parts[part]) if part in parts else "" for part in ("weights", "arena", "kv_cache")),
        f"{pages['used']}/{pages['total']}" if pages else "",
        *(str(model.get(count, "")) for count in ("running", "waiting", "restarts")),
        model.get("source", ""),
    ]
