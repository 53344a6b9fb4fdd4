"""The settings of a realtime session: what is accepted, what is refused by name, and how a session describes itself."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.speech.realtime_session import LOGPROBS, Session, updated
from server.audio.voice import TurnDetection
from server.errors import ApiError


def update(**given: Any) -> dict[str, Any]:
    """Return the event that sets fields of the audio's input."""
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": given}}}


def test_only_what_is_sent_changes() -> None:
    first = updated(Session("a"), update(transcription={"language": "de", "prompt": "Müller"}))
    assert first == Session("a", "de", "Müller", TurnDetection())
    second = updated(first, update(turn_detection={"type": "server_vad", "threshold": 0.7, "silence_duration_ms": 200}))
    assert second == Session("a", "de", "Müller", TurnDetection(0.7, 300, 200))
    third = updated(second, update(turn_detection=None, noise_reduction=None))
    assert third == Session("a", "de", "Müller", None)
    assert updated(third, update(transcription={"model": "b", "language": None, "prompt": ""})) == Session("b", None, "", None)
    assert updated(third, {"session": {}}) == third
    telling = updated(third, {"session": {"include": [LOGPROBS]}})
    assert telling.tells_logprobs and updated(telling, {"session": {}}) == telling
    assert updated(telling, {"session": {"include": None}}) == third


def test_a_session_accepts_its_own_description() -> None:
    session = Session("a", "de", "Müller", TurnDetection(0.7, 100, 200))
    for one in (session, Session(), Session(tells_logprobs=True)):
        assert updated(Session(turns=None), {"session": one.described("sess_1")}) == one


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ({}, "missing_field", "session"),
        ({"session": []}, "invalid_value", "session"),
        ({"session": {"type": "realtime"}}, "unsupported_field", "session.type"),
        ({"session": {"include": ["item.input_audio_transcription.words"]}}, "unsupported_field", "session.include"),
        ({"session": {"include": "logprobs"}}, "unsupported_field", "session.include"),
        ({"session": {"audio": 1}}, "invalid_value", "session.audio"),
        ({"session": {"audio": {"input": "x"}}}, "invalid_value", "session.audio.input"),
        (update(format={"type": "audio/pcmu"}), "unsupported_field", "session.audio.input.format.type"),
        (update(format={"type": "audio/pcm", "rate": 16000}), "unsupported_field", "session.audio.input.format.rate"),
        (update(noise_reduction={"type": "near_field"}), "unsupported_field", "session.audio.input.noise_reduction"),
        (update(transcription={"language": 5}), "invalid_value", "session.audio.input.transcription.language"),
        (update(transcription={"prompt": "x" * 5000}), "invalid_value", "session.audio.input.transcription.prompt"),
        (update(transcription={"keywords": ["x"]}), "unsupported_field", "session.audio.input.transcription.keywords"),
        (update(turn_detection={"type": "semantic_vad"}), "unsupported_field", "session.audio.input.turn_detection.type"),
        (update(turn_detection={"threshold": 2}), "invalid_value", "session.audio.input.turn_detection.threshold"),
        (update(turn_detection={"threshold": True}), "invalid_value", "session.audio.input.turn_detection.threshold"),
        (update(turn_detection={"silence_duration_ms": "1"}), "invalid_value", "session.audio.input.turn_detection.silence_duration_ms"),
        (update(turn_detection={"prefix_padding_ms": -1}), "invalid_value", "session.audio.input.turn_detection.prefix_padding_ms"),
    ],
)
def test_refusals_name_the_field(event: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        updated(Session(), event)
    assert (refused.value.kind.code, refused.value.param) == (code, param)
