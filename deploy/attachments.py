"""MCP servers that are attached to a conversation: a command, an address, or a file in the format of Claude Desktop or VS Code.

{"mcpServers": {"files": {"command": "npx", "args": ["-y", "server-filesystem", "."], "env": {"KEY": "${KEY}"}},
                "docs": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}}}
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from runtime.files import at_home, regular
from server.mcp.http import HttpTransport, Place, header_fault
from server.mcp.session import Session
from server.mcp.stdio import StdioTransport
from server.settings import SettingsError

# The key under which a file lists its servers: the first one in files of Claude Desktop and most other programs, the second one in files of
# VS Code.
KEYS = ("mcpServers", "servers")
VARIABLE = re.compile(r"\$\{(?:env:)?(\w+)\}")  # stands for a variable of the environment
INPUT = re.compile(r"\$\{(input|command|workspaceFolder|userHome)[:}]")  # stands for a value that only an editor can fill in


def sessions(texts: Sequence[str]) -> list[Session]:
    """Return a session per server, none of which is connected yet. A text that begins with http:// or https:// is an address, the path of
    an existing file that ends in `.json` names a file of servers, and any other text is a command. A server gets a number behind its name
    if an earlier server has this name. Raise SettingsError if a text or a file is wrong."""
    found: list[Session] = []
    for text in texts:
        if re.match(r"https?://", text):
            found.append(_remote(_free(_host(text) or "server", found), text, {}))
        elif text.endswith(".json") and at_home(text).exists():
            for name, entry in _entries(at_home(text)).items():
                found.append(_described(_free(name, found), entry, text))
        else:
            words = _words(text)
            found.append(_local(_free(Path(words[0]).name, found), words, {}))
    return found


def _free(name: str, found: Sequence[Session]) -> str:
    """Return the name, or the name with the first number from 2 on that makes it differ from the names of all sessions found."""
    taken = {session.name for session in found}
    return next(one for number in range(1, len(found) + 2) if (one := name if number == 1 else f"{name}{number}") not in taken)


def _words(text: str) -> list[str]:
    """Split a command into words as a shell does. Raise SettingsError if a quote is not closed, or if there is no word."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"--mcp is {text!r:.200}, which is no command: {error}") from None
    if not words:
        raise SettingsError("--mcp is empty; expected a command, an address, or a JSON file with mcpServers")
    return words


def _local(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Session:
    return Session(name, partial(StdioTransport, name, command, environment))


def _remote(name: str, url: str, headers: Mapping[str, str]) -> Session:
    """Return the session of a server at an address. Raise SettingsError if the address names no host, or a header cannot be sent."""
    if not _host(url):
        raise SettingsError(f"the address of MCP server {name!r} is {url!r:.200}; expected http://HOST or https://HOST")
    if fault := header_fault(headers):
        raise SettingsError(f"headers of MCP server {name!r} {fault}")
    return Session(name, partial(HttpTransport, name, Place(url, headers, may_be_private=True)))


def _host(url: str) -> str:
    """Return the host of an address, or "" if the address names no host."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # brackets without an IPv6 address between them
        return ""


def _entries(path: Path) -> Mapping[str, Any]:
    """Return the servers of a file by their names. Raise SettingsError if the file cannot be read or has no object of servers."""
    try:
        document: object = json.loads(regular(path).read_text())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise SettingsError(f"{path} is not JSON; expected an object with {KEYS[0]}") from None
    read = cast("Mapping[str, Any]", document) if isinstance(document, dict) else {}
    servers = next((read[key] for key in KEYS if isinstance(read.get(key), dict)), None)
    if servers is None:
        raise SettingsError(f"{path} has no {KEYS[0]}; expected an object with the servers by name")
    return cast("Mapping[str, Any]", servers)


def _described(name: str, entry: object, path: str) -> Session:
    """Return the session of a server that a file describes by a `url` or a `command`. Raise SettingsError if the entry has neither, or if a
    part of it has the wrong type. `path` is the file's name in error messages."""
    where = f"{name} in {path}"
    match entry:
        case {"url": str(url)}:
            return _remote(name, _expanded(url, where), _texts(entry, "headers", where))
        case {"command": str(command)}:
            arguments = cast("Mapping[str, object]", entry).get("args", [])
            if not isinstance(arguments, list) or not all(isinstance(one, str) for one in cast("list[object]", arguments)):
                raise SettingsError(f"args of {where} is {arguments!r:.80}; expected a list of texts")
            words = [command, *cast("list[str]", arguments)]
            return _local(name, [_expanded(word, where) for word in words], _texts(entry, "env", where))
        case _:
            raise SettingsError(f"{where} has neither a command nor a url")


def _texts(entry: object, key: str, where: str) -> dict[str, str]:
    """Return the object that an entry has under `key`, such as its headers, with variables replaced; {} if the entry has none. Raise
    SettingsError if a value of the object is not a text."""
    given = cast("Mapping[str, object]", entry).get(key) or {}
    values = cast("Mapping[str, object]", given).values() if isinstance(given, dict) else [None]
    if not all(isinstance(value, str) for value in values):
        raise SettingsError(f"{key} of {where} is no object of texts")
    return {name: _expanded(value, f"{key} of {where}") for name, value in cast("dict[str, str]", given).items()}


def _expanded(text: str, where: str) -> str:
    """Replace ${NAME} and ${env:NAME} by variables of the environment. Raise SettingsError if a variable is missing, or if the text has a
    placeholder of INPUT. Any other text stays as it is."""
    if asked := INPUT.search(text):
        raise SettingsError(f"{where} has {asked[0]}, which only an editor can replace; use ${{NAME}} of the environment")

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise SettingsError(f"{where} needs the variable {match[1]}, which the environment lacks")
        return os.environ[match[1]]

    return VARIABLE.sub(value, text)
