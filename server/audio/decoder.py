"""Decode files of audio for the front: every file is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

import numpy as np

from server.audio.decoding import Decoding, File, Outcome
from server.audio.recording import Recording
from server.errors import AUDIO_NOT_DECODED, INVALID_AUDIO
from server.isolated.files import FileCalls
from server.isolated.held import HeldBytes

PATIENCE_S = 120.0


class AudioDecoder:
    """Decodes files to transcribe, and limits the samples that transcriptions hold."""

    def __init__(self, most_s: float, most_held_bytes: int) -> None:
        """A file may last `most_s` seconds, and transcriptions may hold `most_held_bytes` of decoded samples together."""
        self.held = HeldBytes(most_held_bytes, names="audio", setting="max_held_audio_bytes", refused=AUDIO_NOT_DECODED)
        self._calls = FileCalls(Decoding(most_s), Outcome, PATIENCE_S, invalid=INVALID_AUDIO, not_decoded=AUDIO_NOT_DECODED)

    async def decode(self, data: bytes, num_mels: int) -> Recording:
        """Return the recording in a file, for a model that reads `num_mels` mel energies per hop. Raise ApiError if it cannot be
        decoded."""
        self.held.require_room("file")
        outcome = await self._calls.decode(File(data, num_mels), "file")
        recording = Recording(np.frombuffer(outcome.samples, "<f4"), outcome.loudest)
        self.held.hold([recording], "file")
        return recording
