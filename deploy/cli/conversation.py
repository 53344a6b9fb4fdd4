"""The state of a conversation in `relaxserve chat`, and the slash commands that change it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from deploy.client import Client
from runtime.files import at_home


class CommandError(Exception):
    """Raised if a slash command cannot be executed; the conversation is then unchanged."""


@dataclass(slots=True)
class Conversation:
    """A conversation with a model of a running server."""

    client: Client
    model: str  # name of the model that answers
    system: str = ""  # the system message; "": there is none
    turns: list[dict[str, Any]] = field(default_factory=list)  # the messages after the system message, in the form of a chat request

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, in the form of a chat request."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def obey(self, line: str) -> str:
        """Execute the command `/NAME ARGUMENT` and return the text to show. Raise CommandError if there is no such command or it cannot be
        executed, and ServerFault if the server fails."""
        name, _, argument = line.removeprefix("/").partition(" ")
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1)
            raise CommandError(f"/{name} is not a command{f' (is /{near[0]} meant?)' if near else ''}; /help lists them")
        return COMMANDS[name].carry_out(self, argument.strip())


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command. `carry_out` gets the conversation and the command's argument, changes the conversation, and returns the text to
    show."""

    usage: str  # the command with its argument, as the help shows it
    meaning: str
    carry_out: Callable[[Conversation, str], str]


def _help(_: Conversation, __: str) -> str:
    rows = [(command.usage, command.meaning) for command in COMMANDS.values()]
    rows += [('""" ... """', "Write several lines; so does \\ at the end of a line"), ("Ctrl-C, Ctrl-D", "Stop the answer; leave")]
    return "\n".join(f"{usage:16}{meaning}" for usage, meaning in rows)


def _model(conversation: Conversation, name: str) -> str:
    """Let another model answer, or list the models that can chat if `name` is empty. Raise CommandError if no model of this name can
    chat."""
    listed = conversation.client.get("/v1/models")["data"]
    chatting = [model for model in listed if model.get("chats", model.get("generates", True))]
    names = dict.fromkeys(known for model in chatting for known in (model["id"], *model.get("aliases", ())))
    if not name:
        return "\n".join(f"{'*' if known == conversation.model else ' '} {known}" for known in names)
    if name not in names:
        raise CommandError(f"no model that can chat is named {name!r}; those that can: {', '.join(names) or 'none'}")
    conversation.model = name
    return f"answers come from {name}"


def _system(conversation: Conversation, text: str) -> str:
    conversation.system = text
    return "the system message is set" if text else "there is no system message"


def _clear(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "all messages are deleted"


def _save(conversation: Conversation, name: str) -> str:
    """Write the conversation to a new file, as the body of a request that can be sent to a server. Raise CommandError if the file exists or
    cannot be written; a part that was written is removed."""
    if not name:
        raise CommandError("/save needs the name of a file")
    path = at_home(name)
    body = {"model": conversation.model, "messages": conversation.messages}
    content = json.dumps(body, ensure_ascii=False, indent=2).encode(errors="backslashreplace")  # a lone surrogate is written as an escape
    try:
        file = path.open("xb")
        try:
            with file:
                file.write(content)
        except BaseException:  # also for an error of closing, because NFS and FUSE may report only then that the disk is full
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise CommandError(f"{path} exists; name another file") from None
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
    return f"written to {path}"


COMMANDS = {
    "help": Command("/help", "This list", _help),
    "model": Command("/model [NAME]", "Change the model, or list those that are loaded", _model),
    "system": Command("/system [TEXT]", "Set the system message, or remove it", _system),
    "clear": Command("/clear", "Delete all messages of the conversation", _clear),
    "save": Command("/save FILE", "Write the conversation to a file as JSON", _save),
}
