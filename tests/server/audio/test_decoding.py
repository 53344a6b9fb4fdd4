"""WAV files of every kind are decoded to the same sound, and everything else is refused."""

from __future__ import annotations

import asyncio
import io
import struct
import wave

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from server.audio.decoder import AudioDecoder
from server.audio.decoding import Decoding, Outcome, decoded
from server.audio.resample import resampled
from server.audio.wav import AudioError
from server.errors import ApiError

RATE = 16_000


def tone(rate: int, hertz: float = 440.0, seconds: float = 0.25) -> NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int, *, sample_bytes: int = 2, channels: int = 1) -> bytes:
    values = np.repeat(samples, channels).astype(np.float64)
    if sample_bytes == 1:
        data = (np.rint(values * 127) + 128).astype(np.uint8).tobytes()
    else:
        wide = np.rint(values * ((1 << 8 * sample_bytes - 1) - 1)).astype("<i4")
        data = wide.view(np.uint8).reshape(-1, 4)[:, :sample_bytes].tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(sample_bytes)
        file.setframerate(rate)
        file.writeframes(data)
    return out.getvalue()


def raw(kind: int, bits: int, data: bytes, *, rate: int = RATE, channels: int = 1, size: int | None = None) -> bytes:
    format = struct.pack("<HHIIHH", kind, channels, rate, 0, 0, bits)
    size = len(data) if size is None else size
    return b"RIFF\0\0\0\0WAVE" + b"fmt " + struct.pack("<I", len(format)) + format + b"data" + struct.pack("<I", size) + data


@pytest.mark.parametrize(("sample_bytes", "most"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
@pytest.mark.parametrize("channels", [1, 2])
def test_integers_of_every_width(sample_bytes: int, most: float, channels: int) -> None:
    found = decoded(wav(tone(RATE), RATE, sample_bytes=sample_bytes, channels=channels), 10)
    assert np.abs(found - tone(RATE)).max() < most


@pytest.mark.parametrize("bits", [32, 64])
def test_floats(bits: int) -> None:
    samples = np.append(tone(RATE), [np.nan, 9.0, -9.0])
    found = decoded(raw(3, bits, samples.astype(f"<f{bits // 8}").tobytes()), 10)
    np.testing.assert_array_equal(found, np.append(tone(RATE), [0, 1, -1]).astype(np.float32))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_other_rates_give_the_same_tone(rate: int) -> None:
    found = decoded(wav(tone(rate), rate), 10)
    assert len(found) == len(tone(RATE))
    assert np.abs(found - tone(RATE))[200:-200].max() < 2e-3


def test_what_16_khz_cannot_hold_is_filtered_out() -> None:
    assert np.abs(resampled(tone(48_000, hertz=11_000), 48_000, RATE))[200:-200].max() < 1e-3


def test_a_stream_of_unknown_length_is_read_to_its_end() -> None:
    data = (tone(RATE) * 32767).astype("<i2").tobytes()
    assert len(decoded(raw(1, 16, data, size=0xFFFFFFFF), 10)) == len(tone(RATE))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a WAV file"),
        (b"<html>", "expected a WAV file"),
        (b"RIFF\0\0\0\0WAVE", "has no chunk `data`"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "comes before `fmt `"),
        (raw(1, 16, b"", channels=0), "0 channels"),
        (raw(1, 16, b"", channels=33), "33 channels; expected at most 32"),
        (raw(1, 12, b""), "samples of 12 bits"),
        (raw(85, 16, b""), "encoding 85"),
        (raw(1, 16, bytes(4), rate=999), "999 samples per second"),
        (raw(1, 16, bytes(2 * RATE * 11)), "lasts 11.0 s; expected at most 10 s"),
    ],
)
def test_other_files_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(AudioError, match=text):
        decoded(data, 10)


@given(st.binary(max_size=80), st.integers(0, 200))
def test_damaged_files_raise_nothing_else(noise: bytes, at: int) -> None:
    data = bytearray(wav(tone(RATE, seconds=0.01), RATE))
    data[at % 60 : at % 60 + len(noise)] = noise
    outcome = msgspec.msgpack.decode(Decoding(10).run(bytes(data)), type=Outcome)
    assert outcome.fault or len(outcome.samples) % 4 == 0


def test_files_are_decoded_in_another_process() -> None:
    async def check() -> None:
        decoder = AudioDecoder(10)
        np.testing.assert_array_equal(await decoder.decode(wav(tone(RATE), RATE)), decoded(wav(tone(RATE), RATE), 10))
        with pytest.raises(ApiError, match="file cannot be decoded: it begins with b'OggS'"):
            await decoder.decode(b"OggS")

    asyncio.run(check())
