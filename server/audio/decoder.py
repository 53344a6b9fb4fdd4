"""Decode files of audio for the front: every file is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

import numpy as np

from server.audio.decoding import Decoding, File, Outcome
from server.audio.recording import Recording
from server.errors import AUDIO_NOT_DECODED, INVALID_AUDIO
from server.isolated.files import FileCalls

PATIENCE_S = 120.0


class AudioDecoder:
    """Decodes files to transcribe."""

    def __init__(self, most_s: float) -> None:
        """A file may last `most_s` seconds."""
        self._calls = FileCalls(Decoding(most_s), Outcome, PATIENCE_S, invalid=INVALID_AUDIO, not_decoded=AUDIO_NOT_DECODED)

    async def decode(self, data: bytes, num_mels: int) -> Recording:
        """Return the recording in a file, for a model that reads `num_mels` mel energies per hop. Raise ApiError if it cannot be
        decoded."""
        outcome = await self._calls.decode(File(data, num_mels), "file")
        return Recording(np.frombuffer(outcome.samples, "<f4"), outcome.loudest)
