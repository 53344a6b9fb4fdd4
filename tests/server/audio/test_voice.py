"""Speech is found in a stream by its loudness, in whatever pieces the stream arrives."""

from __future__ import annotations

import numpy as np
import pytest

from server.audio.voice import Began, Ended, TurnDetection, VoiceDetector

RATE = 24_000


def stream(*parts: tuple[float, float], noise: float = 0.0005) -> bytes:
    """Return samples: for each part seconds of a tone of an amplitude, with noise over all."""
    rng = np.random.default_rng(0)
    values = []
    for seconds, amplitude in parts:
        at = np.arange(round(RATE * seconds)) / RATE
        values.append(amplitude * np.sin(2 * np.pi * 200 * at) + noise * rng.standard_normal(len(at)))
    return (np.clip(np.concatenate(values), -1, 1) * 32767).astype("<i2").tobytes()


def events(data: bytes, turns: TurnDetection, step: int = 4800) -> list[Began | Ended]:
    detector = VoiceDetector(turns, RATE)
    return [event for at in range(0, len(data), step) for event in detector.feed(data[at : at + step])]


@pytest.mark.parametrize("noise", [0.0, 0.0005, 0.01])
def test_two_utterances(noise: float) -> None:
    data = stream((1.0, 0), (1.0, 0.3), (1.0, 0), (0.6, 0.2), (1.0, 0), noise=noise)
    found = events(data, TurnDetection())
    assert [type(event) for event in found] == [Began, Ended, Began, Ended]
    assert [event.at_ms for event in found] == pytest.approx([700, 2500, 2700, 4100], abs=60)


def test_pieces_change_nothing() -> None:
    data = stream((0.5, 0), (1.0, 0.3), (1.0, 0))
    assert events(data, TurnDetection(), 2) == events(data, TurnDetection(), 777 * 2) == events(data, TurnDetection(), len(data))


def test_a_short_pause_and_a_click_are_no_turn() -> None:
    assert len(events(stream((0.5, 0), (0.5, 0.3), (0.3, 0), (0.5, 0.3), (1.0, 0)), TurnDetection())) == 2
    assert events(stream((1.0, 0), (0.03, 0.5), (1.0, 0)), TurnDetection()) == []
    assert len(events(stream((0.5, 0), (0.5, 0.3), (0.3, 0), (0.5, 0.3), (1.0, 0)), TurnDetection(silence_ms=200))) == 4


def test_silence_and_steady_noise_are_no_speech() -> None:
    assert events(stream((3.0, 0), noise=0.0), TurnDetection()) == []
    assert events(stream((3.0, 0), noise=0.05), TurnDetection()) == []


def test_speech_from_the_first_sample() -> None:
    """The noise is unknown yet, so speech is found after its first quiet frames."""
    found = events(stream((0.5, 0.3), (0.1, 0), (0.5, 0.3), (1.0, 0)), TurnDetection())
    assert [type(event) for event in found] == [Began, Ended]
