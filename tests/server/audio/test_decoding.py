"""Files of every format are decoded to the same sound, and everything else is refused."""

from __future__ import annotations

import asyncio
import gc
import io
import struct
import sys

import av
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.spectrogram import AROUND, BEFORE, RATE
from server.audio import compressed
from server.audio.decoder import AudioDecoder, held_audio
from server.audio.decoding import Decoding, File, Outcome, decoded
from server.audio.loudest import loudest_energy
from server.audio.recording import Recording, with_surroundings
from server.audio.resample import resampled
from server.audio.sound import AudioError
from server.errors import ApiError
from tests.server.audio.files import KINDS, LOSSLESS, encoded, tone, wav


def raw(kind: int, bits: int, data: bytes, *, rate: int = RATE, channels: int = 1, size: int | None = None) -> bytes:
    format = struct.pack("<HHIIHH", kind, channels, rate, 0, 0, bits)
    size = len(data) if size is None else size
    return b"RIFF\0\0\0\0WAVE" + b"fmt " + struct.pack("<I", len(format)) + format + b"data" + struct.pack("<I", size) + data


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis"])
def test_pictures_in_the_container_of_m4a_are_no_audio(brand: bytes) -> None:
    assert compressed.format_of(b"\0\0\0\x18ftyp" + brand) is None
    assert compressed.format_of(b"\0\0\0\x18ftypM4A ") == "M4A"


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


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000, 176_400, 192_000, 352_800, 768_000])
def test_other_rates_give_the_same_tone(rate: int) -> None:
    found = decoded(wav(tone(rate), rate), 10)
    assert len(found) == len(tone(RATE))
    assert np.abs(found - tone(RATE))[200:-200].max() < 2e-3


def test_what_16_khz_cannot_hold_is_filtered_out() -> None:
    assert np.abs(np.concatenate([*resampled([tone(48_000, hertz=11_000)], 48_000, RATE)]))[200:-200].max() < 1e-3


@pytest.mark.parametrize(("kind", "format"), [(6, "alaw"), (7, "mulaw")])
def test_codes_of_telephones(kind: int, format: str) -> None:
    """Each of the 256 codes is the sample that FFmpeg reads."""
    codes = bytes(range(256))
    with av.open(io.BytesIO(codes), format=format) as container:
        expected = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)]) / 32768
    np.testing.assert_array_equal(decoded(raw(kind, 8, codes), 10), expected.astype(np.float32))
    assert len(decoded(raw(kind, 8, codes * 2, rate=8_000, channels=2), 10)) == 2 * 256


def test_a_long_file_states_its_length_in_64_bits() -> None:
    """RF64 has the length in a chunk of its own. What comes after the samples is no sound."""
    plain = raw(1, 16, np.rint(tone(RATE) * 32767).astype("<i2").tobytes(), size=0xFFFFFFFF)
    num_bytes = 2 * len(tone(RATE))
    lengths = b"ds64" + struct.pack("<IQQQI", 28, 0, num_bytes, 0, 0)
    found = decoded(b"RF64" + plain[4:12] + lengths + plain[12:] + b"LIST" + struct.pack("<I", 400) + b"noise..." * 50, 10)
    assert len(found) == len(tone(RATE)) and np.abs(found - tone(RATE)).max() < 1e-4


def test_a_stream_of_unknown_length_is_read_to_its_end() -> None:
    data = (tone(RATE) * 32767).astype("<i2").tobytes()
    plain, lengths = raw(1, 16, data, size=0xFFFFFFFF), b"ds64" + struct.pack("<I28x", 28)
    assert len(decoded(b"RF64" + plain[4:12] + lengths + plain[12:], 10)) == len(tone(RATE))
    for size in (0xFFFFFFFF, 0):
        assert len(decoded(raw(1, 16, data, size=size), 10)) == len(tone(RATE))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a file of WAV, MP3, FLAC, Ogg, M4A, WebM"),
        (b"<html>", "expected a file of WAV, MP3, FLAC, Ogg, M4A, WebM"),
        (b"RIFF\0\0\0\0WAVE", "has no chunk `data`"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "comes before `fmt `"),
        (raw(1, 16, b"", channels=0), "0 channels"),
        (raw(1, 16, b"", channels=33), "33 channels; expected 1 to 32"),
        (raw(1, 12, b""), "samples of 12 bits"),
        (raw(85, 16, b""), "encoding 85"),
        (raw(1, 16, bytes(4), rate=999), "999 samples per second"),
        (
            raw(1, 16, bytes(4), rate=767_999),
            "767999 samples per second; expected a usual rate",
        ),  # its filter would have 26 million weights
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
    outcome = msgspec.msgpack.decode(Decoding(10).run(msgspec.msgpack.encode(File(bytes(data), 80))), type=Outcome)
    assert outcome.fault or len(outcome.samples) % 4 == 0


@given(st.integers(0, 3), st.lists(st.integers(0, 900), max_size=6))
def test_blocks_change_no_sample(number: int, cuts: list[int]) -> None:
    rate, samples = (8_000, 44_100, 48_000, 1_001)[number], tone(22_050, seconds=0.04)
    whole = np.concatenate([*resampled([samples], rate, RATE)])
    parts = np.concatenate([*resampled(np.split(samples, sorted(cuts)), rate, RATE)])
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_compressed_files(kind: str, layout: str) -> None:
    found = decoded(encoded(tone(48_000, seconds=1), 48_000, kind, layout=layout), 10)
    expected = decoded(wav(tone(48_000, seconds=1), 48_000), 10)
    if kind in LOSSLESS:
        np.testing.assert_allclose(found, expected, atol=2e-4)
        return
    assert abs(len(found) - RATE) < 0.1 * RATE  # a codec works with frames
    middle = found[RATE // 4 : RATE // 4 + RATE // 2]
    assert np.abs(np.fft.rfft(middle)).argmax() == 220  # 440 Hz in half a second
    assert np.std(middle) == pytest.approx(np.std(expected), rel=0.1)


@pytest.mark.parametrize("kind", ["MP3", "FLAC"])
def test_tags_may_precede_the_sound(kind: str) -> None:
    """Programs that name pieces of music put ID3 before files of both formats."""
    tag = b"ID3\x04\0\0" + bytes([0, 0, 1, 2]) + bytes(130)  # a digit of the size has 7 bits
    with_footer = b"ID3\x04\0\x10" + bytes([0, 0, 1, 2]) + bytes(130) + b"3DI\x04\0\x10" + bytes([0, 0, 1, 2])
    for before in (tag, with_footer):
        assert len(decoded(before + encoded(tone(RATE), RATE, kind), 10)) == len(tone(RATE))


def test_a_file_lasts_as_long_as_it_declares_or_less() -> None:
    long = encoded(tone(RATE, seconds=11), RATE, "FLAC")
    with pytest.raises(AudioError, match=r"it lasts 11\.0 s; expected at most 10 s"):
        decoded(long, 10)
    declared = bytearray(long)
    declared[21:26] = bytes([declared[21] & 0xF0, 0, 0, 0x3E, 0x80])  # 16,000 samples
    with pytest.raises(AudioError, match="it lasts longer than 10 s"):
        decoded(bytes(declared), 10)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FLAC, silence takes less than a fiftieth of the bytes of its samples, so a small file can be a long recording."""
    silence = encoded(np.zeros(RATE * 600, np.float32), RATE, "FLAC")
    assert len(silence) < 2 * RATE * 600 / 50
    monkeypatch.setattr(compressed, "_mono", lambda frame: pytest.fail("a frame was decoded"))
    with pytest.raises(AudioError, match=r"lasts 600\.0 s; expected at most 60 s"):
        decoded(silence, 60)


def test_other_codecs_are_refused() -> None:
    with pytest.raises(AudioError, match="its codec is 'ac3'; expected one of mp3float, "):
        decoded(encoded(tone(RATE, seconds=0.2), 48_000, "M4A", codec="ac3"), 10)


def test_a_cut_file_is_decoded_to_its_end() -> None:
    data = encoded(tone(RATE, seconds=2), RATE, "Ogg Opus")
    assert 0.2 * RATE < len(decoded(data[: len(data) // 2], 10)) < 1.8 * RATE


@pytest.mark.parametrize("data", [b"ID3", b"fLaC", b"OggS", b"\0\0\0\x20ftypM4A ", b"\x1a\x45\xdf\xa3", b"\xff\xfb"])
def test_beginnings_alone_are_refused(data: bytes) -> None:
    with pytest.raises(AudioError, match=r"it looks like |without audio"):
        decoded(data + bytes(100), 10)


def test_without_the_extra_only_wav_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(tone(RATE), RATE, "FLAC")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(AudioError, match=r"it is FLAC, .* send WAV, or in a checkout, install '\.\[media\]'"):
        decoded(data, 10)
    assert len(decoded(wav(tone(RATE), RATE), 10))


def test_files_are_decoded_in_another_process() -> None:
    async def check() -> None:
        decoder = AudioDecoder(10, held_audio(1 << 20))
        for data in (wav(tone(RATE), RATE), *(encoded(tone(RATE), RATE if "Opus" not in kind else 48_000, kind) for kind in KINDS)):
            recording = await decoder.decode(data, 80)
            samples = decoded(data, 10)
            np.testing.assert_array_equal(recording.samples[BEFORE:-AROUND], samples)
            assert recording.loudest == loudest_energy(with_surroundings(samples), 80)
        with pytest.raises(ApiError, match="file cannot be decoded: it looks like Ogg, and cannot be read as such"):
            await decoder.decode(b"OggS", 80)

    asyncio.run(check())


def test_samples_that_transcriptions_hold_are_limited() -> None:
    """Each of many long recordings that are transcribed at once keeps its samples until its last window."""
    decoder, data = AudioDecoder(10, held_audio(1)), wav(tone(RATE), RATE)

    async def check() -> None:
        found = await asyncio.gather(*(decoder.decode(data, 80) for _ in range(3)), return_exceptions=True)
        (kept,) = (one for one in found if isinstance(one, Recording))
        assert [one.kind.code for one in found if isinstance(one, ApiError)] == ["audio_not_decoded"] * 2
        assert decoder.held.num_bytes == kept.samples.nbytes
        with pytest.raises(ApiError, match="max_held_audio_bytes"):
            await decoder.decode(data, 80)

    asyncio.run(check())
    gc.collect()
    assert decoder.held.num_bytes == 0
