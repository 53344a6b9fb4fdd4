"""The defaults of a model: values for fields that a request leaves out. They come from a file beside the model, from the command line or
the configuration, from a load request or from Ollama's /api/create. A request's own value always wins.

DefaultsError        a default is unknown or has a value that no request could have; a ValueError
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import reprlib
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

FILE = "relaxserve.toml"  # file in the folder of a model; for a model in NAME.gguf it is called NAME.relaxserve.toml
MOST_FILE_BYTES = 1 << 20
MOST_SHOWN = 60  # largest number of characters of a text in `Defaults.note`

Text = Annotated[str, Meta(max_length=1 << 18)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
D = TypeVar("D", bound="Defaults")


class DefaultsError(ValueError):
    """Raised for a default that cannot be used."""


class Defaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Values for fields that a request leaves out. All but `system` and `template` are named like the fields of a chat request. None: there
    is no default."""

    system: Text | None = None  # the system message of conversations without one
    template: Annotated[str, Meta(min_length=1, max_length=1 << 18)] | None = None  # replaces the chat template of the model's files
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: Annotated[tuple[StopString, ...], Meta(max_length=16)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The defaults that are set, by name. The `max_context` of a file beside a model is not among them."""
        return {name: value for name in Defaults.__struct_fields__ if (value := getattr(self, name)) is not None}

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that are set, by name."""
        return {name: value for name, value in self.given.items() if name in SAMPLING}

    @property
    def thinking(self) -> dict[str, Any]:
        """The variables of chat templates that say whether and how much the model thinks, if there are defaults for them. If only
        `reasoning_effort` has a default, `enable_thinking` is false for `none`, and true for all other values."""
        found = {name: value for name, value in self.given.items() if name in THINKING}
        if self.reasoning_effort is not None:
            found.setdefault("enable_thinking", self.reasoning_effort != "none")
        return found

    @property
    def note(self) -> str:
        """The defaults in words, for one line."""
        return ", ".join(f"{name} {_in_words(value)}" for name, value in self.given.items())

    def over(self, other: Defaults) -> Defaults:
        """Return these defaults. A field without a default here has the default of `other`."""
        return Defaults(**{**other.given, **self.given})

    def mark(self, fingerprint: str) -> str:
        """Return the fingerprint of a model with these defaults. `fingerprint` is that of the model without defaults, and is returned
        unchanged if no default is set. Equal requests get equal bytes only if the defaults are equal, too."""
        if not self.given:
            return fingerprint
        return f"fp_{hashlib.sha256(msgspec.json.encode((fingerprint, self.given))).hexdigest()[:16]}"


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
THINKING = ("enable_thinking", "reasoning_effort")


class BesideModel(Defaults, frozen=True, omit_defaults=True):
    """The file beside a model: defaults, and the context for which the model is loaded."""

    max_context: Annotated[int, Meta(ge=16, lt=2**31)] | None = None

    @classmethod
    def read(cls, content: bytes, name: str) -> Self:
        """Read the content of a file. `name` names the file in errors. Raise DefaultsError if the file is too large or not TOML, or has an
        unknown key or a wrong value."""
        if len(content) > MOST_FILE_BYTES:
            raise DefaultsError(f"{name} has {len(content)} bytes; at most {MOST_FILE_BYTES} are read")
        try:
            values = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:  # the file is not TOML, or not UTF-8
            raise DefaultsError(f"{name} is not TOML: {error}; correct it, or remove it to serve the model without defaults") from error
        return read_values(values, name, cls)


def read_values(values: Mapping[str, Any], where: str, of: type[D] = Defaults) -> D:
    """Convert a mapping from names to values into a struct of class `of`. `where` names the source of the values in errors. A single stop
    string need not be in a list. Raise DefaultsError for an unknown name, or for a wrong value, such as a number that is not finite."""
    known = of.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f" (is {near[0]} meant?)" if near else ""
            raise DefaultsError(f"{str(name)!r:.80} in {where} is no default{meant}; expected {', '.join(known)}; correct or remove it")
    stop = values.get("stop")
    try:
        found = msgspec.convert({**values, "stop": [stop]} if isinstance(stop, str) else dict(values), of)
    except msgspec.ValidationError as error:
        expectation, _, place = str(error).partition(" - at `$.")
        name = re.split(r"\W", place)[0]
        expected = expectation[:1].lower() + expectation[1:]
        raise DefaultsError(f"{name} in {where} is {reprlib.repr(values.get(name))}: {expected}; correct or remove it") from error
    for name, value in found.given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DefaultsError(f"{name} in {where} is {value}; expected a finite number")
    return found


def read_texts(texts: list[str], where: str) -> Defaults:
    """Read defaults that a command line gives as texts NAME=VALUE. `stop` may be repeated; of any other repeated name, the last value
    counts. `@FILE` as a value means the content of a file. `where` names the option in errors. Raise DefaultsError for a text of another
    form, an unknown name, a wrong value, or a file that cannot be read."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise DefaultsError(f"{where} is {text!r:.80}; expected NAME=VALUE, such as temperature=0.2")
        if value.startswith("@"):
            value = _content(value[1:], name, where)
        values[name] = [*values.get(name, []), value] if name == "stop" else value
    fields = {field.name: field.type for field in msgspec.structs.fields(Defaults)}
    for name, value in values.items():
        if name in fields and isinstance(value, str):
            try:
                values[name] = msgspec.convert(value, fields[name], strict=False)
            except msgspec.ValidationError as error:
                raise DefaultsError(f"{name} in {where} is {value!r:.80}: {error}") from error
    return read_values(values, where)


def _content(path: str, name: str, where: str) -> str:
    """Return the text of a file that is given as the default `name`. At most MOST_FILE_BYTES + 1 bytes are read, which are more than any
    default may have. Raise DefaultsError if the file cannot be read or is not UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        return content.decode()
    except OSError as error:
        raise DefaultsError(f"{name} in {where} is @{path}, which cannot be read: {error.strerror}; name a text file") from error
    except ValueError as error:
        raise DefaultsError(f"{name} in {where} is @{path}, which is no text; name a file in UTF-8") from error


def _in_words(value: object) -> str:
    """Return a value as `Defaults.note` shows it. Long texts and lists are cut off."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"{value:g}"
        case str():
            return repr(value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}...")
        case _:
            return reprlib.repr(list(value) if isinstance(value, tuple) else value)
