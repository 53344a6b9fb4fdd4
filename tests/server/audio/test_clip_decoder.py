"""Recordings of conversations are decoded from base64 or a URL, and the memory that they hold is limited."""

from __future__ import annotations

import asyncio
import base64
import gc
import math
import random

import numpy as np
import pytest

from runtime.spectrogram import RATE
from server.audio.clip_decoder import ClipDecoder, HeardRecording
from server.engine.step_model import ListeningLimits
from server.errors import ApiError
from server.fetching import AUDIO, Fetcher
from server.messages import Listening
from tests.server.audio.files import encoded, tone, wav
from tests.server.mutations import damaged

LISTENING = Listening(1, num_mels=80, num_hops=100, frames_each=2, ends=True, most_windows=1)
SOUND = base64.b64encode(wav(tone(RATE), RATE)).decode()


def decoded(given: str, *, is_url: bool = False, most_s: float = 60.0, most_held: int = 1 << 20) -> HeardRecording:
    decoder = ClipDecoder(most_s, most_held, Fetcher(AUDIO, (), 1, 1.0))
    return asyncio.run(decoder.decode(given, LISTENING, "the.field", is_url=is_url))


def test_a_file_in_base64_or_in_a_data_url_is_the_same() -> None:
    assert decoded(SOUND).clips == decoded(f"data:audio/wav;base64,{SOUND}", is_url=True).clips
    assert decoded(SOUND).num_tokens == 6  # 25 hops make 13 frames


def test_other_formats_are_read() -> None:
    found = decoded(base64.b64encode(encoded(tone(RATE), RATE, "FLAC")).decode())
    assert found.num_tokens == 6


@pytest.mark.parametrize(
    ("given", "is_url", "text"),
    [
        ("%%%", False, "not base64"),
        (base64.b64encode(b"noise").decode(), False, "expected a file of WAV"),
        ("", False, "expected a file of WAV"),
        (base64.b64encode(wav(tone(RATE, seconds=0.001), RATE)).decode(), False, "too short for a token"),
        ("file:///etc/passwd", True, "expected a data: URL, or http(s) from a host of audio_hosts"),
        ("data:audio/wav,abc", True, "expected data:audio/wav;base64,DATA"),
        ("https://sounds.example/a.wav", True, "fetches no audio from 'sounds.example', port 443 (audio_hosts)"),
    ],
)
def test_faults_name_the_field(given: str, is_url: bool, text: str) -> None:
    with pytest.raises(ApiError) as raised:
        decoded(given, is_url=is_url)
    assert (raised.value.kind.code, raised.value.param) == ("invalid_audio", "the.field")
    assert text in raised.value.message


def test_a_long_recording_is_refused() -> None:
    with pytest.raises(ApiError, match=r"expected at most 0\.2 s"):
        decoded(SOUND, most_s=0.2)


def test_held_samples_are_counted_and_given_back() -> None:
    decoder = ClipDecoder(60.0, 1, Fetcher(AUDIO, (), 1, 1.0))

    async def run() -> None:
        found = await decoder.decode(SOUND, LISTENING, "a", is_url=False)
        assert decoder.held.num_bytes == len(found.clips[0].samples) > 0
        with pytest.raises(ApiError, match="max_held_audio_bytes") as raised:
            await decoder.decode(SOUND, LISTENING, "b", is_url=False)
        assert raised.value.kind.code == "audio_not_decoded"

    asyncio.run(run())
    gc.collect()
    assert decoder.held.num_bytes == 0


def test_samples_of_recordings_that_are_decoded_at_once_are_limited() -> None:
    """A recording is decoded only if there is room for its samples, and kept only if there is still room afterwards."""
    decoder = ClipDecoder(60.0, 1, Fetcher(AUDIO, (), 1, 1.0))

    async def run() -> None:
        found = await asyncio.gather(*(decoder.decode(SOUND, LISTENING, "a", is_url=False) for _ in range(12)), return_exceptions=True)
        (kept,) = (one for one in found if isinstance(one, HeardRecording))
        refused = [one for one in found if isinstance(one, ApiError)]
        assert len(refused) == 11 and {one.kind.code for one in refused} == {"audio_not_decoded"}
        assert decoder.held.num_bytes == kept.clips[0].num_bytes

    asyncio.run(run())


@pytest.mark.parametrize("count", [24, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files_give_clips_that_a_model_can_hear_or_an_error(count: int) -> None:
    rng, whole = random.Random(0), wav(tone(RATE), RATE)
    limits = ListeningLimits(LISTENING.num_hops, LISTENING.frames_each, LISTENING.audio_token, 1, LISTENING.ends)

    async def check() -> None:
        decoder = ClipDecoder(10.0, 1 << 30, Fetcher(AUDIO, (), 1, 1.0))
        for _ in range(count):
            try:
                found = await decoder.decode(base64.b64encode(damaged(whole, rng)).decode(), LISTENING, "a", is_url=False)
            except ApiError as error:
                assert error.kind.code == "invalid_audio"
                continue
            for clip in found.clips:
                assert limits.fault(clip) == "" and np.isfinite(np.frombuffer(clip.samples, "<f4")).all() and math.isfinite(clip.loudest)

    asyncio.run(check())
