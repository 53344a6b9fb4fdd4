"""`relaxserve stop`, `show`, `cp` and `create`: put models of a running server to sleep, describe them, and give them further names. Users
of Ollama know these commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from deploy.cli.admin import DEFAULT_URL, Key, Url
from deploy.cli.output import answers
from deploy.cli.sources import OPTIONS
from deploy.client import Client, segment
from deploy.modelfile import Modelfile, ModelfileError
from deploy.modelfile import read as read_modelfile
from deploy.settings import KEY_VARIABLE
from server.defaults import DefaultsError, read_texts

Name = Annotated[str, typer.Argument(help="Name or alias of a model of the server.", metavar="MODEL")]
NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}  # our names of defaults -> those of Ollama's API
MODELFILE = "Modelfile"  # the file that `create` reads if no other is named
QUESTION, BEGINNING = "What is the capital of France?", "The capital of France is"
OF_NO_PARAMETER = ("system", "template")  # defaults that are fields of the request itself, not of its `parameters`


def stop(model: Name, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Free the memory of a model once its requests have ended. Its next request loads it again; `unload` removes it for good.

    [bold]Examples[/bold]

      relaxserve stop qwen
    """
    client = Client(url, key, timeout_s=None)  # the server alone knows how long it waits for running requests
    done = client.post(f"/sleep?model={quote(model, safe='')}&mode=wait", {})
    state = "sleeps" if done["is_sleeping"] else "is still busy, and stays loaded"
    answers.print(f"{model} {state}", highlight=False)


def show(model: Name, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Describe a model of a running server: size, context, capabilities, defaults for requests, and a call that works.

    [bold]Examples[/bold]

      relaxserve show qwen
    """
    client = Client(url, key)
    entry = client.get(f"/v1/models/{segment(model)}")
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(entry, client.post("/api/show", {"model": model})):
        table.add_row(name, value)
    answers.print(table)
    if call := call_of(entry, client.url, has_key=bool(key)):
        answers.print(f"\n{call}", highlight=False, soft_wrap=True)


def call_of(entry: Mapping[str, Any], url: str, *, has_key: bool) -> str:
    """Return a curl command that asks a model, with a line break that a shell accepts; "" if the model serves none of the three APIs
    below."""
    if entry.get("chats"):
        path, body = "chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}
    elif entry.get("generates"):
        path, body = "completions", {"prompt": BEGINNING}
    elif entry.get("embedding_size"):
        path, body = "embeddings", {"input": QUESTION}
    else:
        return ""
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    data = shlex.quote(json.dumps({"model": entry["id"], **body}, ensure_ascii=False))
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' \\\n  -d {data}"


def _rows(entry: dict[str, Any], shown: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a title and a text for each fact about a model. `entry` is the answer of /v1/models/NAME, and `shown` that of Ollama's path
    /api/show."""
    details = shown["details"]
    yield "model", ", ".join([entry["id"], *entry["aliases"]])
    yield "architecture", f"{details['family']}, {details['parameter_size']} parameters, {details['quantization_level']} in its files"
    yield "context", f"{entry['max_model_len']:,} tokens"
    if entry.get("embedding_size"):
        yield "embeddings", f"{entry['embedding_size']:,} numbers"
    yield "capabilities", ", ".join(shown["capabilities"])
    if entry.get("sampling"):
        yield "sampling", ", ".join(f"{name} {value:g}" for name, value in entry["sampling"].items())
    for name, value in entry.get("defaults", {}).items():
        yield name, ", ".join(value) if isinstance(value, list) else str(value)


def cp(
    source: Annotated[str, typer.Argument(help="Name of a model of the server.")],
    destination: Annotated[str, typer.Argument(help="Further name for it.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Give a model of a running server a further name.

    [bold]Examples[/bold]

      relaxserve cp qwen gpt-4o-mini
    """
    Client(url, key).post("/api/create", {"model": destination, "from": source, "stream": False})
    answers.print(f"{source} is also called {destination}", highlight=False)


def create(
    name: Annotated[str, typer.Argument(help="Name of the new model.")],
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help=f"Modelfile with FROM, SYSTEM, TEMPLATE (in Jinja) and PARAMETER; by default ./{MODELFILE}."),
    ] = None,
    source: Annotated[str | None, typer.Option("--from", help="Name of a model of the server, instead of a Modelfile.")] = None,
    default: Annotated[list[str] | None, typer.Option(help=OPTIONS["defaults"].meaning, metavar="TEXT")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Make a model with its own system prompt and parameters from a model of a running server, whose weights it shares.

    [bold]Examples[/bold]

      relaxserve create teacher -f Modelfile

      relaxserve create teacher --from qwen --default system=@teacher.txt --default temperature=0.2
    """
    if source is not None and file is not None:
        raise typer.BadParameter("--from and --file cannot be used together")
    try:
        given = read_texts(default or [], "--default").given
        made = Modelfile(source) if source is not None else _modelfile(Path(MODELFILE) if file is None else file)
    except (DefaultsError, ModelfileError) as error:
        raise typer.BadParameter(str(error)) from error
    parameters = {NAMES.get(each, each): value for each, value in given.items() if each not in OF_NO_PARAMETER}
    fields = {**made.fields, **{each: given[each] for each in OF_NO_PARAMETER if each in given}}
    body = {"model": name, "from": made.source, "stream": False, "parameters": {**made.parameters, **parameters}, **fields}
    Client(url, key).post("/api/create", body)
    answers.print(f"{name} is made from {made.source}", highlight=False)


def _modelfile(file: Path) -> Modelfile:
    """Read a Modelfile. Raise ModelfileError if it cannot be read or is wrong."""
    try:
        return read_modelfile(file.read_text(), str(file))
    except OSError as error:
        raise ModelfileError(f"{file} cannot be read: {error.strerror}; name a Modelfile by --file, or a model by --from") from error
    except UnicodeDecodeError as error:
        raise ModelfileError(f"{file} is no text; expected a Modelfile in UTF-8") from error
