"""Decode one file of audio, as a job in a process of `server.isolated`. The rate, channels and length that the file declares are checked
before its samples are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.spectrogram import RATE
from server.audio.clips import clips_of
from server.audio.compressed import FORMATS, format_of, load_library, open_compressed
from server.audio.loudest import loudest_energy
from server.audio.recording import with_surroundings
from server.audio.resample import MOST_WEIGHTS, num_weights, resampled
from server.audio.sound import AudioError, Sound
from server.audio.wav import is_wav, open_wav
from server.isolated.files import NotBase64, bytes_of
from server.messages import Clip, Listening

MOST_CHANNELS, LEAST_RATE, MOST_RATE = 32, 1_000, 768_000


class File(msgspec.Struct, frozen=True):
    """The work of a call: a file to decode."""

    data: bytes = b""  # the file; empty: it is in `text`
    num_mels: int = 0  # mel energies per hop that the model reads; unused if there is `listening`
    text: str = ""  # the file in base64
    listening: Listening | None = None  # how a model hears the recording in a conversation; None: the recording is to be transcribed


class Outcome(msgspec.Struct, frozen=True):
    """The result of a call: a recording to transcribe in `samples`, or a recording of a conversation in `clips`, or in `fault` why there is
    none."""

    samples: memoryview = memoryview(b"")  # little-endian f32, as `with_surroundings` returns them
    loudest: float = 0.0  # the largest energy of the recording in `samples`
    clips: tuple[Clip, ...] = ()
    fault: str = ""  # why the file cannot be decoded; empty: it was decoded


class Decoding:
    """Decodes files of at most `most_s` seconds."""

    prepare_s = 30.0
    call_s = 90.0
    call_bytes = 1 << 30

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s

    def prepare(self) -> None:
        """Load the libraries that a call may need."""
        load_library()
        self.warm()

    def warm(self) -> None:
        """Compute once what each call computes, so that the first call is not slower."""
        silence = np.concatenate([*resampled([np.zeros(64, np.float32)], 8_000, RATE)])
        loudest_energy(with_surroundings(silence), 80)

    def run(self, work: bytes) -> bytes:
        """Decode the file of a call. Return the Outcome as MessagePack."""
        file = msgspec.msgpack.decode(work, type=File)
        try:
            samples = decoded(file.data or bytes_of(file.text), self._most_s)
            if file.listening is not None:
                return msgspec.msgpack.encode(Outcome(clips=clips_of(samples, file.listening)))
        except (AudioError, NotBase64) as error:
            return msgspec.msgpack.encode(Outcome(fault=str(error)))
        samples = with_surroundings(samples)
        outcome = Outcome(samples.astype("<f4", copy=False).data.cast("B"), loudest_energy(samples, file.num_mels))
        return msgspec.msgpack.encode(outcome)


def decoded(data: bytes, most_s: float) -> NDArray[np.float32]:
    """Return the samples of a file: the mean of its channels, at RATE samples a second. Raise AudioError if the file cannot be decoded."""
    sound = _opened(data)
    if not 1 <= sound.channels <= MOST_CHANNELS:
        raise AudioError(f"it has {sound.channels} channels; expected 1 to {MOST_CHANNELS}")
    if not LEAST_RATE <= sound.rate <= MOST_RATE:
        raise AudioError(f"it has {sound.rate} samples per second; expected {LEAST_RATE} to {MOST_RATE}")
    if num_weights(sound.rate, RATE) > MOST_WEIGHTS:
        raise AudioError(f"it has {sound.rate} samples per second; expected a usual rate, such as 44100 or 192000")
    if sound.seconds is not None and sound.seconds > most_s:
        raise AudioError(f"it lasts {sound.seconds:.1f} s; expected at most {most_s:g} s (max_audio_s)")
    blocks = resampled(_limited(sound.blocks, sound.rate, most_s), sound.rate, RATE)
    return np.concatenate([*blocks, np.zeros(0, np.float32)])


def _opened(data: bytes) -> Sound:
    """Open a file as a Sound. Raise AudioError if its format is unknown, or if it cannot be read."""
    if is_wav(data):
        return open_wav(data)
    if (format := format_of(data)) is not None:
        return open_compressed(data, format)
    raise AudioError(f"it begins with {data[:4]!r}; expected a file of WAV, {', '.join(FORMATS)}")


def _limited(blocks: Iterable[NDArray[np.float32]], rate: int, most_s: float) -> Iterator[NDArray[np.float32]]:
    """Yield the blocks. Raise AudioError as soon as they last longer than `most_s` seconds, whatever length the file declares."""
    num_read = 0
    for block in blocks:
        num_read += len(block)
        if num_read > most_s * rate:
            raise AudioError(f"it lasts longer than {most_s:g} s (max_audio_s)")
        yield block
