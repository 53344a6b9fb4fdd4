"""Make ten minutes of speech with a known text, for comparisons of transcripts: passages that espeak-ng reads in several voices, some with
noise.

Only the texts are stored (spoken.txt): the same version of espeak-ng and the same seeds give the same samples. A passage is shorter than a
window of Whisper, so engines that batch windows can batch passages.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.spectrogram import RATE
from server.audio.decoding import decoded
from server.settings import SettingsError
from tests.server.audio.files import wav

TEXTS = Path(__file__).with_name("spoken.txt")
VOICES = ("en-us", "en-us+f3", "en-gb", "en-gb+m3", "en-gb-scotland", "en-us+m7", "en-gb+f2")
SPEEDS = (160, 175, 190)  # words per minute, by espeak-ng's count
NOISES_DB = (None, 20.0, None, 12.0)  # power of the speech relative to that of the noise, in dB; None: no noise
PEAK, PAUSE_S = 0.7, 0.3  # largest sample of the speech, and seconds of silence before and after it
MOST_S = 30.0  # maximum length of a passage: a window of Whisper


@dataclass(frozen=True, slots=True)
class Passage:
    text: str
    voice: str
    speed: int
    noise_db: float | None
    seed: int

    def samples(self) -> NDArray[np.float32]:
        """Return the samples of the passage, RATE per second."""
        program = shutil.which("espeak-ng")
        if program is None:
            raise SettingsError("espeak-ng is not installed, which speaks the passages; on Debian: apt install espeak-ng")
        command = [program, "-v", self.voice, "-s", str(self.speed), "--stdout", self.text]
        spoken = decoded(subprocess.run(command, check=True, capture_output=True).stdout, MOST_S)
        pause = np.zeros(round(PAUSE_S * RATE), np.float32)
        whole = np.concatenate([pause, spoken * np.float32(PEAK / np.abs(spoken).max()), pause])
        return whole if self.noise_db is None else in_noise(whole, self.noise_db, self.seed)

    def file(self) -> bytes:
        return wav(self.samples(), RATE)


def passages() -> list[Passage]:
    texts = [" ".join(text.split()) for text in TEXTS.read_text().split("\n\n")]
    return [
        Passage(text, VOICES[i % len(VOICES)], SPEEDS[i % len(SPEEDS)], NOISES_DB[i % len(NOISES_DB)], seed=i)
        for i, text in enumerate(texts)
    ]


def in_noise(samples: NDArray[np.float32], below_db: float, seed: int) -> NDArray[np.float32]:
    """Add noise with `below_db` dB less power than the samples. Its power falls with frequency, like that of streets and fans."""
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(len(samples)))
    noise = np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 1)), len(samples))
    power, own = np.mean(np.square(samples, dtype=np.float64)), np.mean(np.square(noise))
    return np.clip(samples + noise * np.sqrt(power / own / 10 ** (below_db / 10)), -1, 1).astype(np.float32)


def write_files(folder: Path, spoken: Sequence[Passage]) -> list[Path]:
    """Write a WAV file per passage."""
    files = [folder / f"{number}.wav" for number in range(len(spoken))]
    for file, passage in zip(files, spoken, strict=True):
        file.write_bytes(passage.file())
    return files
