"""`relaxserve chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from deploy.cli.admin import DEFAULT_URL, Key, Url
from deploy.cli.output import answers, errors
from deploy.client import Client, ServerFault

PROMPT = "> "


def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this and leave; without it, a conversation.")] = None,
    model: Annotated[str | None, typer.Option(help="Name or alias; by default the first of the server that generates.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 takes the most probable token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Talk to a model of a running server. The answer comes as it is made; Ctrl-C stops it, Ctrl-D leaves.

    [bold]Examples[/bold]

      relaxserve chat "What is the capital of France?"

      relaxserve chat --model qwen --system "Answer in one sentence."

      echo "What is 12 plus 30?" | relaxserve chat
    """
    client = Client(url, key)
    name = model or first_model(client)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {option: value for option, value in options.items() if value is not None}
    messages = [] if system is None else [{"role": "system", "content": system}]
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None:
        messages.append({"role": "user", "content": question.strip()})
        write(client.chat(name, messages, **options))
        return
    errors.print(f"{name} at {client.url}; Ctrl-D leaves", style="dim", highlight=False)
    while (line := _ask()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": write(client.chat(name, messages, **options))})
        except ServerFault as error:
            messages.pop()
            errors.print(f"error: {error}", style="red", markup=False, highlight=False)


def first_model(client: Client) -> str:
    models = client.generative_models()
    if not models:
        raise ServerFault(f"the server at {client.url} has no model that generates; load one with `relaxserve load`")
    return models[0]


def write(pieces: Iterable[str]) -> str:
    """Print as it comes; an interrupt ends the answer, not the conversation."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            answers.file.write(piece)
            answers.file.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    answers.file.write("\n")
    return "".join(said)


def _ask() -> str | None:
    try:
        return input(PROMPT)
    except EOFError:
        answers.file.write("\n")  # the shell's prompt begins a line
        return None
