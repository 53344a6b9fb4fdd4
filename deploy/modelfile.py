"""Read a Modelfile, in which Ollama's users keep a model's name, system prompt, template and parameters.

ModelfileError        an instruction is unknown, incomplete or not supported, or FROM is missing
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

UNSUPPORTED = ("ADAPTER", "LICENSE", "MESSAGE", "REQUIRES")  # instructions of Ollama that are refused
KNOWN = ("FROM", "SYSTEM", "TEMPLATE", "PARAMETER")  # instructions that are read
QUOTED = '"""'  # begins and ends a text of several lines


class ModelfileError(Exception):
    """Raised for a Modelfile that cannot be used."""


@dataclass(slots=True)
class Modelfile:
    """The content of a Modelfile."""

    source: str = ""  # name of the model that FROM names
    fields: dict[str, str] = field(default_factory=dict[str, str])  # system and template, if the file has them
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])  # values by name; `stop` has a list of texts


def read(text: str, name: str) -> Modelfile:
    """Read the text of a Modelfile. `name` is the file's name in error messages. If an instruction or a parameter other than `stop` occurs
    twice, the last one applies. Raise ModelfileError if the text is wrong."""
    found = Modelfile()
    for number, instruction, value in _instructions(text, name):
        where = f"{name}, line {number}"
        if instruction in UNSUPPORTED:
            raise ModelfileError(f"{where}: {instruction} is not supported; expected {', '.join(KNOWN)}: remove the line")
        if instruction not in KNOWN:
            raise ModelfileError(f"{where}: {instruction[:40]!r} is no instruction; expected {', '.join(KNOWN)}")
        if not value:
            raise ModelfileError(f"{where}: {instruction} has no value")
        if instruction == "FROM":
            found.source = value
        elif instruction == "PARAMETER":
            _add(found.parameters, value, where)
        else:
            found.fields[instruction.lower()] = value
    if not found.source:
        raise ModelfileError(f"{name} has no FROM; expected FROM NAME with the name of a loaded model")
    return found


def _instructions(text: str, name: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each instruction's first line, the instruction in upper case, and its value without quotes. A value in triple
    quotes may have several lines, and text behind the closing quotes is dropped. Empty lines and comments are skipped. Raise ModelfileError
    if the closing quotes are missing."""
    lines = iter(enumerate(text.split("\n"), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, value = _split(line)
        before, quotes, begun = value.partition(QUOTED)
        if quotes:
            while QUOTED not in begun:
                following = next(lines, None)
                if following is None:
                    raise ModelfileError(f"{name}, line {number}: the text that begins with {QUOTED} does not end")
                begun += "\n" + following[1]
            value = before + begun.partition(QUOTED)[0]
        elif len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        yield number, word.upper(), value


def _add(parameters: dict[str, Any], text: str, where: str) -> None:
    """Add the parameter in a text NAME VALUE to `parameters`: true and false as flags, numbers as numbers, other values as texts. The
    values of all parameters named `stop` become one list. Raise ModelfileError, with the place `where`, if there is no value."""
    name, value = _split(text)
    if not value:
        raise ModelfileError(f"{where}: PARAMETER {name[:40]} has no value; expected PARAMETER NAME VALUE")
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = value[1:-1]
    if name == "stop":
        parameters.setdefault(name, []).append(value)
    elif value in ("true", "false"):
        parameters[name] = value == "true"
    else:
        parameters[name] = _number(value)


def _split(text: str) -> tuple[str, str]:
    """Split a text after its first word. Spaces and tabs separate words."""
    word, *rest = text.split(None, 1)
    return word, "".join(rest).strip()


def _number(text: str) -> int | float | str:
    """Return the number that a text stands for, or the text if it is no finite number, or has too many digits."""
    if re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) and math.isfinite(number := float(text)):
        return number
    return text
