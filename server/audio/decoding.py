"""The job that decodes one file, in a process of `server.isolated`. What the file declares is checked before its samples are decoded."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.audio.resample import resampled
from server.audio.wav import AudioError, is_wav, read_wav, samples_of

RATE = 16_000  # samples per second that models hear
MOST_CHANNELS, LEAST_RATE, MOST_RATE = 32, 1_000, 768_000
BLOCK_FRAMES = 1 << 20  # frames decoded at a time


class Outcome(msgspec.Struct, frozen=True):
    """The result of a call: the samples as little-endian f32, or why there are none."""

    samples: bytes = b""
    fault: str = ""


class Decoding:
    """Decodes files of at most `most_s` seconds."""

    prepare_s = 30.0
    call_s = 60.0
    call_bytes = 1 << 30

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s

    def prepare(self) -> None:
        self.warm()

    def warm(self) -> None:
        resampled(np.zeros(64, np.float32), 8_000, RATE)

    def run(self, work: bytes) -> bytes:
        try:
            outcome = Outcome(samples=decoded(work, self._most_s).astype("<f4").tobytes())
        except AudioError as error:
            outcome = Outcome(fault=str(error))
        return msgspec.msgpack.encode(outcome)


def decoded(data: bytes, most_s: float) -> NDArray[np.float32]:
    """Return the samples of a file: the mean of its channels, 16,000 a second. Raise AudioError if it cannot be decoded."""
    if not is_wav(data):
        raise AudioError(f"it begins with {data[:4]!r}; expected a WAV file")
    layout, frames = read_wav(data)
    if layout.channels > MOST_CHANNELS:
        raise AudioError(f"it has {layout.channels} channels; expected at most {MOST_CHANNELS}")
    if not LEAST_RATE <= layout.rate <= MOST_RATE:
        raise AudioError(f"it has {layout.rate} samples per second; expected {LEAST_RATE} to {MOST_RATE}")
    seconds = len(frames) / layout.frame_bytes / layout.rate
    if seconds > most_s:
        raise AudioError(f"it lasts {seconds:.1f} s; expected at most {most_s:g} s (max_audio_s)")
    step = BLOCK_FRAMES * layout.frame_bytes
    mono = [samples_of(layout, frames[at : at + step]).mean(axis=1, dtype=np.float64) for at in range(0, len(frames), step)]
    return resampled(np.concatenate([*mono, np.zeros(0)]).astype(np.float32), layout.rate, RATE)
