"""Read and check the forms that ask for a transcription or a translation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from server.api.request.prepare import invalid
from server.errors import MISSING_FIELD, UNKNOWN_FIELD, UNSUPPORTED_FIELD, ApiError
from server.http.multipart import Form

FILE = "file"
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}
GRANULARITIES, INCLUDE = "timestamp_granularities[]", "include[]"  # fields that are lists
ITEM = re.compile(r"\[\d{0,3}\]$")  # brackets after the name of a list; PHP and axios write an index into the brackets
LOGPROBS = "logprobs"
CHUNKING = "chunking_strategy"  # no effect: the model's time stamps decide where a recording is divided
KNOWN = ("model", "language", "prompt", "response_format", "temperature", "stream", "seed", "user", CHUNKING, GRANULARITIES, INCLUDE)
WHOLE = ("srt", "vtt")  # formats that are written as a whole, and not streamed
UNSUPPORTED = {
    "known_speaker_names[]": "speakers are not told apart",
    "known_speaker_references[]": "speakers are not told apart",
}


@dataclass(frozen=True, slots=True)
class SpeechForm:
    """The fields of a form, checked."""

    model: str | None
    language: str | None  # None: the model finds the language
    prompt: str
    format: Format
    temperature: float  # 0: begin with 0, and try higher temperatures for windows whose transcript is bad
    stream: bool
    seed: int
    times: frozenset[str]  # parts of the transcript whose times are requested: "segment", "word"
    tells_logprobs: bool = False  # report the log-probability of each token
    ignored: tuple[str, ...] = ()  # names of unknown fields


def read_form(form: Form, *, strict: bool, translates: bool) -> SpeechForm:
    """Return the fields of a form. `translates`: the form asks for a translation. Raise ApiError if the file is absent, for a field that is
    not supported, and for a value that is not accepted; if `strict`, also for an unknown field."""
    fields = form.fields
    given: dict[str, list[str]] = {}  # values that are not empty, by the name of the field
    for field, values in form.values.items():
        given.setdefault(_name_of(field), []).extend(value for value in values if value)
    if form.filename is None:
        raise ApiError(MISSING_FIELD, "file is absent; expected a form with an audio file", param=FILE)
    for name, reason in UNSUPPORTED.items():
        if given.get(name):
            raise ApiError(UNSUPPORTED_FIELD, f"{name} is not supported: {reason}; leave it out", param=name)
    if translates and any(values and name.partition("[")[0] == "language" for name, values in given.items()):
        raise ApiError(UNSUPPORTED_FIELD, "language is not a field of translations, which are into English; leave it out", param="language")
    ignored = tuple(field for field in fields if _name_of(field) not in (*KNOWN, *UNSUPPORTED))
    if strict and ignored:
        raise ApiError(UNKNOWN_FIELD, f"{ignored[0]!r:.60} is not a field of this request", param=ignored[0][:60])
    format, stream = _format(fields.get("response_format") or "json"), _flag("stream", fields.get("stream", ""))
    if stream and format in WHOLE:
        raise invalid("response_format", f"response_format is {format!r}, which is written as a whole; leave out stream, or ask for json")
    return SpeechForm(
        model=fields.get("model") or None,
        language=fields.get("language") or None,
        prompt=fields.get("prompt", ""),
        format=format,
        temperature=_temperature(fields.get("temperature") or "0"),
        stream=stream,
        seed=_seed(fields.get("seed") or "0"),
        times=_times(given.get(GRANULARITIES, ()), format),
        tells_logprobs=_includes(given.get(INCLUDE, ()), format),
        ignored=ignored,
    )


def _name_of(field: str) -> str:
    """Return the name of a field as this module writes it: the name of a list ends with [], whatever brackets follow it in the form. Fields
    such as `chunking_strategy[type]` count as CHUNKING."""
    name = ITEM.sub("", field)
    if f"{name}[]" in (GRANULARITIES, INCLUDE, *UNSUPPORTED):
        return f"{name}[]"
    return CHUNKING if field.startswith(f"{CHUNKING}[") else field


def _format(text: str) -> Format:
    """Return the format of the answer. Raise ApiError if the format is unknown."""
    if text not in FORMATS:
        raise invalid("response_format", f"response_format is {text!r:.40}; expected one of {', '.join(FORMATS)}")
    return text


def _times(asked: Sequence[str], format: Format) -> frozenset[str]:
    """Return the kinds of parts whose times are requested. Raise ApiError if a kind is unknown, or if the format does not show times of
    words."""
    times = frozenset(asked) or frozenset({"segment"})
    if unknown := times - {"segment", "word"}:
        raise invalid(GRANULARITIES, f"{GRANULARITIES} is {min(unknown)!r:.40}; expected segment or word")
    if "word" in times and format != "verbose_json":
        raise invalid(GRANULARITIES, f"{GRANULARITIES} is 'word', which needs verbose_json; response_format is {format!r}")
    return times


def _includes(asked: Sequence[str], format: Format) -> bool:
    """Return whether log-probabilities are requested. Raise ApiError if anything else is requested, or if the format does not show
    log-probabilities."""
    if unknown := set(asked) - {LOGPROBS}:
        raise invalid(INCLUDE, f"{INCLUDE} is {min(unknown)!r:.40}; expected {LOGPROBS}")
    if LOGPROBS in asked and format != "json":
        raise invalid(INCLUDE, f"{INCLUDE} is {LOGPROBS!r}, which only json shows; response_format is {format!r}")
    return LOGPROBS in asked


def _temperature(text: str) -> float:
    """Return the temperature. Raise ApiError unless the text is a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise invalid("temperature", f"temperature is {text!r:.40}; expected a number from 0 to 1")
    return value


def _flag(name: str, text: str) -> bool:
    """Return the value of a field that is true or false. Raise ApiError for any other text."""
    if text.lower() not in FLAGS:
        raise invalid(name, f"{name} is {text!r:.40}; expected true or false")
    return FLAGS[text.lower()]


def _seed(text: str) -> int:
    """Return the seed. Raise ApiError unless the text is an integer that is not negative."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise invalid("seed", f"seed is {text!r:.40}; expected an integer from 0 to 10^18")
    return int(text)
