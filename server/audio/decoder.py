"""Decode files of audio for the front: every file is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

import numpy as np

from server.audio.decoding import Decoding, File, Outcome
from server.audio.recording import Recording
from server.errors import AUDIO_NOT_DECODED, INVALID_AUDIO
from server.isolated.files import FileCalls
from server.isolated.held import HeldBytes

PATIENCE_S = 120.0  # seconds to wait for an answer of the process that decodes


def held_audio(most_bytes: int) -> HeldBytes:
    """Return a counter of the decoded samples that all transcriptions hold together."""
    return HeldBytes(most_bytes, names="audio", setting="max_held_audio_bytes", refused=AUDIO_NOT_DECODED)


class AudioDecoder:
    """Decodes files to transcribe."""

    def __init__(self, most_s: float, held: HeldBytes) -> None:
        """A file may last at most `most_s` seconds. `held` counts the decoded samples; several decoders may share it."""
        self.held = held
        self._calls = FileCalls(Decoding(most_s), Outcome, PATIENCE_S, invalid=INVALID_AUDIO, not_decoded=AUDIO_NOT_DECODED)

    async def decode(self, data: bytes, num_mels: int) -> Recording:
        """Return the recording in a file, for a model that reads `num_mels` mel energies per hop, and count its samples. Raise ApiError if
        the file cannot be decoded, or if requests hold too many samples."""
        self.held.require_room("file")
        outcome = await self._calls.decode(File(data, num_mels), "file")
        recording = Recording(np.frombuffer(outcome.samples, "<f4"), outcome.loudest)
        self.held.hold([recording], "file")
        return recording
