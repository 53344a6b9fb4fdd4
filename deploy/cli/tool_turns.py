"""Let a model and the tools of MCP servers take turns in the terminal. Each call is shown, and made only if the user approves it, or has
approved all calls or all calls of this tool before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from deploy.attachments import sessions
from deploy.cli.output import answers, errors
from deploy.toolbox import Offer, Toolbox
from server.mcp.tools import ToolResult

MAX_TURNS = 32  # largest number of turns with calls before the answer to one message
SHOWN_CHARS = 2000  # characters of a call or of its result that the terminal shows at most
REFUSED = ToolResult("The user did not approve this call.", is_error=True)
CANCELLED = ToolResult("The user cancelled this call.", is_error=True)


# Gets the offered tools and an empty list, adds the calls that the model makes to this list, and returns the text of the answer.
Answer = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]


class Approval:
    """Asks the user, and remembers for which tools the answer is always yes."""

    def __init__(self, *, approves_all: bool = False) -> None:
        self._approves_all = approves_all
        self._always: set[tuple[str, str]] = set()

    def approves(self, offer: Offer) -> bool:
        """Return whether a call of a tool may be made. Ask the user unless all calls, or all calls of this tool, are approved. Without a
        terminal to ask on, return False and say so."""
        key = (offer.session.name, offer.tool.name)
        if self._approves_all or key in self._always:
            return True
        if not sys.stdin.isatty():
            errors.print("not made: there is no terminal to ask on; --yes approves all calls", style="red", highlight=False)
            return False
        while True:
            answer = _asked("make this call? yes, no, or always for this tool [y/n/a] ")
            if answer in ("a", "always"):
                self._always.add(key)
            if answer in ("y", "yes", "a", "always", "n", "no"):
                return answer[0] != "n"


class ToolTurns:
    """Lets the model answer and call tools in turns, until it answers without a call."""

    def __init__(self, toolbox: Toolbox, approval: Approval) -> None:
        self._toolbox = toolbox
        self._approval = approval

    def take(self, turns: list[dict[str, Any]], answer: Answer) -> None:
        """Let the model answer the messages in `turns`, and add its answers, their calls and the results of the calls to `turns`, until the
        model answers without a call. After MAX_TURNS answers with calls, stop and say so. A call that is refused, cancelled or of an
        unknown tool has a text that says so as its result."""
        tools = self._toolbox.offered()
        for _ in range(MAX_TURNS):
            calls: list[dict[str, Any]] = []
            said: dict[str, Any] = {"role": "assistant", "content": answer(tools, calls)}
            turns.append({**said, "tool_calls": calls} if calls else said)
            if not calls:
                return
            for call in calls:
                result = self._made(call["function"]["name"], call["function"]["arguments"])
                turns.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
        errors.print(f"stopped after {MAX_TURNS} turns with calls", style="red", highlight=False)

    def _made(self, name: str, arguments: str) -> ToolResult:
        """Make a call if the user approves it, and show it with its result. An interrupt cancels the call."""
        offer = self._toolbox.find(name)
        if offer is None:
            return ToolResult(f"there is no tool {name}", is_error=True)
        _show(f"{offer.title} {_printable(arguments)}", "bold")
        try:
            if not self._approval.approves(offer):
                return REFUSED
            result = self._toolbox.call(offer, arguments, lambda told: _show(_printable(told), "dim"))
        except KeyboardInterrupt:
            errors.print()
            result = CANCELLED
        _show(_printable(result.text), "red" if result.is_error else "dim")
        return result


@contextmanager
def attached(texts: Sequence[str], *, approves_all: bool) -> Generator[ToolTurns]:
    """Yield the `ToolTurns` that offers the tools of the MCP servers that `texts` name. Close the sessions at the end."""
    with Toolbox(sessions(texts), lambda fault: _show(_printable(fault), "red")) as toolbox:
        yield ToolTurns(toolbox, Approval(approves_all=approves_all))


def _asked(question: str) -> str:
    """Ask the user, and return the answer in lower case. The end of input counts as no, and an answer that is no text as an empty one."""
    try:
        return input(question).strip().lower()
    except EOFError:
        return "no"
    except UnicodeDecodeError:
        return ""


def _show(text: str, style: str) -> None:
    answers.file.flush()
    errors.print(text, style=style, highlight=False, soft_wrap=True)


def _printable(text: str) -> str:
    """Return a text from outside as a terminal may show it: without control characters, and not too long."""
    shown = "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text[:SHOWN_CHARS])
    return f"{shown} ... ({len(text)} characters)" if len(text) > SHOWN_CHARS else shown
