"""Read the settings of a session of `/v1/realtime`, and describe the session to its client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from server.audio.voice import TurnDetection
from server.errors import INVALID_VALUE, MISSING_FIELD, UNSUPPORTED_FIELD, ApiError

RATE = 24_000  # samples per second that clients send
MOST_TEXT = 4096  # characters of a prompt
MOST_SILENCE_MS, MOST_PREFIX_MS = 10_000, 5_000
USUAL_TURNS = TurnDetection()
LOGPROBS = "item.input_audio_transcription.logprobs"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """The settings of a session."""

    model: str | None = None  # None: the server's only model
    language: str | None = None  # None: the model finds the language
    prompt: str = ""
    turns: TurnDetection | None = USUAL_TURNS  # None: the client commits the buffer
    tells_logprobs: bool = False  # report the log-probability of each token

    def described(self, session_id: str) -> dict[str, Any]:
        """Describe the session in OpenAI's shape."""
        turns = self.turns
        detection = None
        if turns is not None:
            detection = {
                "type": "server_vad",
                "threshold": turns.threshold,
                "prefix_padding_ms": turns.prefix_ms,
                "silence_duration_ms": turns.silence_ms,
            }
        audio = {
            "format": {"type": "audio/pcm", "rate": RATE},
            "noise_reduction": None,
            "transcription": {"model": self.model, "language": self.language, "prompt": self.prompt},
            "turn_detection": detection,
        }
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": session_id,
            "include": [LOGPROBS] if self.tells_logprobs else None,
            "audio": {"input": audio},
        }


def updated(session: Session, event: Mapping[str, Any]) -> Session:
    """Return the session after the event `session.update`. Fields that are absent keep their values. Raise ApiError for a value that is not
    accepted."""
    asked = _fields(event, "session")
    if asked is None:
        raise ApiError(MISSING_FIELD, "session is absent; expected an object", param="session")
    if (kind := asked.get("type", "transcription")) != "transcription":
        raise _unsupported("session.type", kind, "'transcription'; this server answers no speech")
    if asked.get("tracing"):
        raise _unsupported("session.tracing", asked["tracing"], "no such field")
    if "include" in asked:
        session = replace(session, tells_logprobs=_includes(asked["include"]))
    audio = _fields(asked, "session.audio") or {}
    given = _fields(audio, "session.audio.input") or {}
    prefix = "session.audio.input."
    if (format := _fields(given, f"{prefix}format")) is not None:
        _check_format(format, f"{prefix}format")
    if given.get("noise_reduction") is not None:
        raise _unsupported(f"{prefix}noise_reduction", given["noise_reduction"], "null")
    if (wanted := _fields(given, f"{prefix}transcription")) is not None:
        session = _transcription(session, wanted, f"{prefix}transcription.")
    if "turn_detection" in given:
        session = replace(session, turns=_turns(_fields(given, f"{prefix}turn_detection"), f"{prefix}turn_detection."))
    return session


def _includes(asked: object) -> bool:
    """Return whether log-probabilities are requested. Raise ApiError if anything else is requested."""
    if asked not in (None, [], [LOGPROBS]):
        raise _unsupported("session.include", asked, f"[{LOGPROBS!r}], or null")
    return bool(asked)


def _check_format(format: Mapping[str, Any], name: str) -> None:
    """Raise ApiError unless the format is the one that this server reads."""
    if (kind := format.get("type", "audio/pcm")) != "audio/pcm":
        raise _unsupported(f"{name}.type", kind, "'audio/pcm'")
    if (rate := format.get("rate", RATE)) != RATE:
        raise _unsupported(f"{name}.rate", rate, str(RATE))


def _transcription(session: Session, wanted: Mapping[str, Any], prefix: str) -> Session:
    """Return the session with the wanted model, language and prompt. Raise ApiError if a value is not accepted. `prefix` is the path of the
    fields."""
    for name in ("delay", "keywords", "languages"):
        if wanted.get(name):
            raise _unsupported(prefix + name, wanted[name], "no such field; a prompt may name words")
    model = _typed(wanted, prefix + "model", str, session.model)
    language = _typed(wanted, prefix + "language", str, session.language)
    prompt = _typed(wanted, prefix + "prompt", str, session.prompt) or ""
    if len(prompt) > MOST_TEXT:
        text = f"{prefix}prompt has {len(prompt)} characters; expected at most {MOST_TEXT}"
        raise ApiError(INVALID_VALUE, text, param=f"{prefix}prompt")
    return replace(session, model=model or None, language=language or None, prompt=prompt)


def _turns(wanted: Mapping[str, Any] | None, prefix: str) -> TurnDetection | None:
    """Return how the session detects turns; None: the client commits the buffer. Raise ApiError if a value is not accepted."""
    if wanted is None:
        return None
    if (kind := wanted.get("type", "server_vad")) != "server_vad":
        raise _unsupported(f"{prefix}type", kind, "'server_vad', or null for turn_detection")
    usual = USUAL_TURNS
    return TurnDetection(
        _number(wanted, f"{prefix}threshold", usual.threshold, 1.0),
        round(_number(wanted, f"{prefix}prefix_padding_ms", usual.prefix_ms, MOST_PREFIX_MS)),
        round(_number(wanted, f"{prefix}silence_duration_ms", usual.silence_ms, MOST_SILENCE_MS)),
    )


def _fields(values: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the object that `values` has under the last part of `name`, a path such as `session.audio`, or None."""
    return _typed(values, name, dict, None)


def _typed(values: Mapping[str, Any], name: str, kind: type[T], usual: T | None) -> T | None:
    """Return the value under the last part of `name`, which may be null, or `usual` if it is absent. Raise ApiError if it is neither null
    nor of the type `kind`."""
    value = values.get(name.rpartition(".")[2], usual)
    if value is not None and not isinstance(value, kind):
        expected = "an object" if kind is dict else "a text"
        raise ApiError(INVALID_VALUE, f"{name} is {value!r:.60}; expected {expected}", param=name)
    return value


def _number(values: Mapping[str, Any], name: str, usual: float, most: float) -> float:
    """Return the number under the last part of `name`, or `usual` if it is absent or null. Raise ApiError unless the number is from 0 to
    `most`."""
    value = values.get(name.rpartition(".")[2])
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ApiError(INVALID_VALUE, f"{name} is {value!r:.60}; expected a number from 0 to {most:g}", param=name)
    return value


def _unsupported(name: str, value: object, expected: str) -> ApiError:
    """Return the error for a value of the field `name` that is not supported."""
    return ApiError(UNSUPPORTED_FIELD, f"{name} is {value!r:.60}; this server supports {expected}", param=name)
