"""`relaxserve chat`: talk to a model of a running server in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.admin import DEFAULT_URL, Key, Url
from deploy.cli.conversation import CommandError, Conversation
from deploy.cli.output import answers, errors
from deploy.client import Client, ServerFault

if TYPE_CHECKING:
    from deploy.cli.tool_turns import ToolTurns

Mcp = Annotated[
    list[str] | None,
    typer.Option(help="Attach an MCP server: a command, an address, or a JSON file with mcpServers; may be repeated.", metavar="SERVER"),
]
Question = Annotated[str | None, typer.Argument(help="Ask this question and exit; without it, start a conversation.")]
System = Annotated[str | None, typer.Option(help="System message.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Maximum length of an answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 takes the most probable token.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampler. Equal seeds give equal answers.")]
Yes = Annotated[bool, typer.Option("--yes", help="Make calls of MCP tools without asking.")]


def chat(
    question: Question = None,
    model: Annotated[str | None, typer.Option(help="Name or alias of the model; by default the first one that generates text.")] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    mcp: Mcp = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Talk to a model of a running server. The answer appears as it is generated. Ctrl-C stops it, Ctrl-D leaves, /help lists commands.

    [bold]Examples[/bold]

      relaxserve chat "What is the capital of France?"

      relaxserve chat --model qwen --system "Answer in one sentence."

      echo "What is 12 plus 30?" | relaxserve chat

      relaxserve chat --mcp "npx -y @modelcontextprotocol/server-filesystem ."
    """
    check_approval(mcp, yes=yes)
    client = Client(url, key)
    conversation = Conversation(client, model or first_model(client), system or "")
    options = _options(max_tokens, temperature, seed)
    if not mcp:
        _talk(Talk(conversation, options), question)
        return
    from deploy.cli.tool_turns import attached

    with attached(mcp, approves_all=yes) as tool_turns:
        _talk(Talk(conversation, options, tool_turns), question)


def check_approval(mcp: list[str] | None, *, yes: bool) -> None:
    """Raise BadParameter if --yes approves calls of tools, but no MCP server is named."""
    if yes and not mcp:
        raise typer.BadParameter("--yes is set, and --mcp is not: leave --yes out, or name MCP servers")


def _options(max_tokens: int | None, temperature: float | None, seed: int | None) -> dict[str, Any]:
    """Return those options of a request that the user has given."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return {option: value for option, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, and the options of its requests."""

    conversation: Conversation
    options: Mapping[str, Any]
    tool_turns: ToolTurns | None = None  # lets the model call tools of MCP servers; None: no server is attached


def _talk(talk: Talk, question: str | None) -> None:
    """Answer one question, which may come from standard input, or hold a conversation at the terminal."""
    if question is None and not sys.stdin.isatty():
        try:
            question = sys.stdin.read()
        except UnicodeDecodeError:
            raise typer.BadParameter("standard input is no text; expected a question in UTF-8") from None
    if question is not None:
        _answer(question.strip(), talk)
        return
    from deploy.cli.line_editor import ask, history

    conversation = talk.conversation
    errors.print(f"{conversation.model} at {conversation.client.url}; /help lists commands, Ctrl-D leaves", style="dim", highlight=False)
    with history():
        while (line := ask()) is not None:
            if line.startswith("/"):
                _obey(line, conversation)
            elif line.strip():
                _answer_or_tell(line, talk)


def first_model(client: Client) -> str:
    """Return the name of the server's first model that can chat. Raise ServerFault if there is none."""
    models = client.chat_models()
    if not models:
        raise ServerFault(
            f"the server at {client.url} has no model that generates text by a chat template; load one with `relaxserve load`"
        )
    return models[0]


def _obey(line: str, conversation: Conversation) -> None:
    """Execute a slash command, and print what it returns or why it failed."""
    try:
        errors.print(conversation.obey(line), highlight=False, style="dim")
    except (CommandError, ServerFault) as error:
        errors.print(f"error: {error}", style="red", highlight=False)


def _answer_or_tell(line: str, talk: Talk) -> None:
    """Answer a message. Print a fault of the server. After a fault, or an interrupt outside of an answer and of a call, the conversation is
    as before the message."""
    num_turns = len(talk.conversation.turns)
    try:
        _answer(line, talk, {})
    except KeyboardInterrupt:  # for example while a server of tools starts
        errors.print()
    except ServerFault as error:
        errors.print(f"error: {error}", style="red", highlight=False)
    else:
        return
    del talk.conversation.turns[num_turns:]


def _answer(line: str, talk: Talk, usage: dict[str, int] | None = None) -> None:
    """Add a message and its answer to the conversation, with calls of tools if there are any, and print the answer as it arrives. With
    `usage`, a dict for token counts, also print the decoding rate. Raise ServerFault if the server fails."""
    conversation = talk.conversation
    turns = conversation.turns
    turns.append({"role": "user", "content": line})

    def answer(tools: list[dict[str, Any]], calls: list[dict[str, Any]]) -> str:
        options = {**talk.options, "tools": tools} if tools else talk.options
        told: dict[str, int] = {} if usage is None else usage
        pieces = conversation.client.chat(conversation.model, conversation.messages, told=told.update, called=calls.extend, **options)
        return write(pieces, usage)

    if talk.tool_turns is None:
        turns.append({"role": "assistant", "content": answer([], [])})
    else:
        talk.tool_turns.take(turns, answer)


def write(pieces: Iterable[str], usage: Mapping[str, int] | None = None) -> str:
    """Print the pieces of an answer as they arrive (as Markdown on a terminal) and return the whole text. In a conversation, `usage` is the
    dict that gets the token counts while the answer arrives: then also print the number of tokens and the decoding rate. An interrupt ends
    an answer in a conversation, and its text is kept. Without `usage`, an interrupt raises KeyboardInterrupt."""
    said: list[str] = []
    first_s, num_before = 0.0, 0  # time of the first text, and the tokens generated before it, such as thoughts, which are not shown
    with _writer() as put:
        try:
            for piece in pieces:
                if not said:
                    first_s, num_before = time.monotonic(), (usage or {}).get("completion_tokens", 1)
                said.append(piece)
                put(piece)
        except KeyboardInterrupt:
            if usage is None:
                raise
    if usage and (num_tokens := usage["completion_tokens"]) > 1:
        num_timed = num_tokens - num_before if said else 0
        rate = f", {num_timed / max(time.monotonic() - first_s, 1e-6):.0f} tokens/s" if num_timed else ""
        errors.print(f"{num_tokens} tokens{rate}", style="dim", highlight=False)
    return "".join(said)


@contextmanager
def _writer() -> Generator[Callable[[str], None]]:
    """Yield a function that prints a piece of an answer. If the output is not a terminal, it prints the pieces unchanged, and a new line
    ends the answer."""
    if answers.is_terminal:
        from deploy.cli.markdown import MarkdownWriter

        with MarkdownWriter(answers) as writer:
            yield writer.write
        return

    def put(text: str) -> None:
        answers.file.write(text)
        answers.file.flush()

    try:
        yield put
    finally:
        put("\n")
