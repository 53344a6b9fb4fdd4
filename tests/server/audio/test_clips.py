"""A recording is cut into clips, and takes as many tokens, as the processors of transformers do."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.spectrogram import AROUND, BEFORE, HOP
from server.audio.clips import clips_of
from server.audio.sound import AudioError
from server.messages import Clip, Listening

HOPS = 40
WINDOW = HOPS * HOP
ENDING = Listening(1, num_mels=80, num_hops=HOPS, frames_each=2, ends=True, most_windows=1)  # like Qwen2-Audio
MANY = Listening(1, num_mels=80, num_hops=HOPS, frames_each=2, ends=True, most_windows=4)  # like Qwen2.5-Omni
PIECES = Listening(1, num_mels=80, num_hops=HOPS, frames_each=4, ends=True, most_windows=0, piece_hops=20, reflects=True)  # like Qwen3-Omni
WHOLE = Listening(1, num_mels=80, num_hops=HOPS, frames_each=4, ends=False, most_windows=0)  # like Voxtral


def noise(num_samples: int) -> np.ndarray:
    return np.random.default_rng(num_samples).uniform(0.1, 1.0, num_samples).astype(np.float32)


@pytest.mark.parametrize("num_samples", [3 * HOP, 3 * HOP + 1, 1234, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW])
def test_tokens_of_a_recording_whose_end_is_heard(num_samples: int) -> None:
    """The formula is that of transformers' Qwen2AudioProcessor, from the hops in which the sound has begun."""
    (clip,) = clips_of(noise(num_samples), ENDING)
    hops = min(-(-num_samples // HOP), HOPS)
    assert (clip.num_hops, clip.num_tokens) == (hops, (((hops - 1) // 2 + 1) - 2) // 2 + 1)


@pytest.mark.parametrize("num_samples", [1, HOP, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 77])
def test_every_window_has_the_same_tokens_if_silence_fills_it_up(num_samples: int) -> None:
    clips = clips_of(noise(num_samples), WHOLE)
    assert len(clips) == -(-num_samples // WINDOW)
    assert {(clip.num_hops, clip.num_tokens) for clip in clips} == {(HOPS, HOPS // 2 // 4)}


@pytest.mark.parametrize(
    "num_samples", [3 * HOP, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 3 * HOP, 2 * WINDOW + 1234, 4 * WINDOW, 4 * WINDOW + 1, 9 * WINDOW]
)
def test_tokens_of_several_windows_whose_end_is_heard(num_samples: int) -> None:
    """The formula is that of transformers' Qwen2_5OmniProcessor. A window whose only frame fills no token is not heard."""
    clips = clips_of(noise(num_samples), MANY)
    hops = min(-(-num_samples // HOP), 4 * HOPS)
    assert sum(clip.num_tokens for clip in clips) == (((hops - 1) // 2 + 1) - 2) // 2 + 1
    assert all(clip.num_hops == HOPS for clip in clips[:-1])


def test_silence_follows_a_recording_that_is_shorter_than_the_longest() -> None:
    short, long = (np.frombuffer(clips_of(noise(count * WINDOW), MANY)[-1].samples, "<f4") for count in (3, 4))
    np.testing.assert_array_equal(short[BEFORE:], noise(3 * WINDOW)[2 * WINDOW :])
    np.testing.assert_array_equal(long[BEFORE + WINDOW :], noise(4 * WINDOW)[:-1][::-1][: AROUND - BEFORE])


@pytest.mark.parametrize("num_samples", [HOP, 5 * HOP + 77, WINDOW - 1, WINDOW + 1, 2 * WINDOW + 1234])
def test_a_recording_is_reflected_at_its_own_end_if_the_processor_does(num_samples: int) -> None:
    """A recording has only whole hops: a rest of fewer samples than a hop adds none."""
    given = noise(num_samples)
    clips = clips_of(given, PIECES)
    assert sum(clip.num_hops for clip in clips) == num_samples // HOP
    last, before = np.frombuffer(clips[-1].samples, "<f4"), (len(clips) - 1) * WINDOW - BEFORE
    whole = np.concatenate([given, given[:-1][::-1][: AROUND - BEFORE]])
    np.testing.assert_array_equal(last[max(-before, 0) :], whole[max(before, 0) :][: len(last) - max(-before, 0)])


@pytest.mark.parametrize(("listening", "num_samples"), [(ENDING, 0), (ENDING, 1), (ENDING, 2 * HOP), (WHOLE, 0)])
def test_a_recording_without_a_token_is_refused(listening: Listening, num_samples: int) -> None:
    with pytest.raises(AudioError, match="too short for a token"):
        clips_of(noise(num_samples), listening)


def test_clips_have_the_samples_around_them() -> None:
    given = noise(WINDOW + 700)
    first, second = (np.frombuffer(clip.samples, "<f4") for clip in clips_of(given, WHOLE))
    np.testing.assert_array_equal(first[:BEFORE], given[1 : BEFORE + 1][::-1])
    np.testing.assert_array_equal(first[BEFORE:], given[: WINDOW + AROUND - BEFORE])
    np.testing.assert_array_equal(second, given[WINDOW - BEFORE :])  # without the silence behind it


def test_a_full_window_ends_in_its_reflection() -> None:
    given = noise(3 * WINDOW)
    (clip,) = clips_of(given, ENDING)
    last = np.frombuffer(clip.samples, "<f4")[BEFORE + WINDOW :]
    np.testing.assert_array_equal(last, given[: WINDOW - 1][::-1][: AROUND - BEFORE])


def test_clips_of_a_recording_share_its_loudest_energy() -> None:
    given = noise(2 * WINDOW)
    given[:WINDOW] *= 0.01
    first, second = clips_of(given, WHOLE)
    assert first.loudest == second.loudest > 1e3 * clips_of(given[:WINDOW], WHOLE)[0].loudest


def test_silence_has_no_samples_but_all_tokens() -> None:
    (clip,) = clips_of(np.zeros(WINDOW // 2, np.float32), WHOLE)
    assert (clip.samples, clip.loudest, clip.num_tokens) == (b"", 0.0, HOPS // 8)


def test_equal_clips_have_equal_digests() -> None:
    assert Clip.of(b"abcd", 1.0, 4, 2).digest == Clip.of(b"abcd", 1.0, 4, 2).digest
    others = [Clip.of(b"abce", 1.0, 4, 2), Clip.of(b"abcd", 2.0, 4, 2), Clip.of(b"abcd", 1.0, 5, 2), Clip.of(b"abcd", 1.0, 4, 1)]
    assert len({clip.digest for clip in (Clip.of(b"abcd", 1.0, 4, 2), *others)}) == 5
