"""Speech is found in a stream by its loudness, in whatever pieces the stream arrives."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.spectrogram import RATE as CLIP_RATE
from server.audio.voice import Began, Ended, TurnDetection, VoiceDetector
from tests.real.speech.clips import CLIPS, Clip, samples_of

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
    """The audio begins with speech, so the level of the noise is unknown. The speech is found at the first quiet frames, and its reported
    beginning is the first sample."""
    found = events(stream((0.5, 0.3), (0.1, 0), (0.5, 0.3), (1.0, 0)), TurnDetection())
    assert found == [Began(0), Ended(1600)]
    assert events(stream((1.5, 0.3), (1.0, 0)), TurnDetection()) == [Began(0), Ended(2000)]


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.name)
def test_a_recording_that_begins_inside_a_word(clip: Clip) -> None:
    """The first sample is 60 ms after the first loud one, so speech begins at 0. It is one turn, which may end after the last word."""
    samples = samples_of(clip)
    frames = samples[: len(samples) // 320 * 320].reshape(-1, 320)
    first = int(np.argmax(np.sqrt(np.mean(np.square(frames), axis=1)) > 0.03)) + 3
    data = (samples[first * 320 :] * 32767).astype("<i2").tobytes()
    detector, step_ms, found = VoiceDetector(TurnDetection(), CLIP_RATE), 20, list[Began | Ended]()
    for at_ms in range(0, len(data) * 1000 // (2 * CLIP_RATE), step_ms):
        at, end = (ms * CLIP_RATE // 1000 * 2 for ms in (at_ms, at_ms + step_ms))
        found += detector.feed(data[at:end])
        assert found or detector.kept_ms >= at_ms + step_ms, "the beginning would be dropped"
    assert found[0] == Began(0)
    assert len(found) == 1 or (isinstance(found[1], Ended) and found[1].at_ms > 1000 * len(data) // (2 * CLIP_RATE) - 600)


def test_a_new_detector_knows_the_noise_of_the_one_before() -> None:
    first = VoiceDetector(TurnDetection(), RATE)
    assert first.noise_db is None
    assert [type(event) for event in first.feed(stream((0.5, 0), (0.5, 0.3)))] == [Began]
    assert first.noise_db is not None
    second = VoiceDetector(TurnDetection(), RATE, first.noise_db)
    assert [*second.feed(stream((0.5, 0.3)))] == [Began(0)], "found without a quiet frame"
    assert [*VoiceDetector(TurnDetection(), RATE).feed(stream((0.5, 0.3)))] == []


def test_noise_that_stays_for_long_is_known_at_last() -> None:
    detector = VoiceDetector(TurnDetection(), RATE)
    assert [*detector.feed(stream((1.9, 0), noise=0.05))] == [] and detector.noise_db is None
    assert [*detector.feed(stream((0.2, 0), noise=0.05))] == [] and detector.noise_db == pytest.approx(-26, abs=2)
    assert detector.kept_ms < 500
