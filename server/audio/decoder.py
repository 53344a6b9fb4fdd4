"""The decoder of audio as the front uses it: every file is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

import msgspec
import numpy as np

from server.audio.decoding import Decoding, File, Outcome
from server.audio.recording import Recording
from server.errors import AUDIO_NOT_DECODED, INVALID_AUDIO, ApiError
from server.isolated.calls import Calls
from server.isolated.job import CallError, Failure

PATIENCE_S = 120.0


class AudioDecoder:
    def __init__(self, most_s: float) -> None:
        """A file may last `most_s` seconds."""
        self._calls = Calls(Decoding(most_s), PATIENCE_S)

    async def decode(self, data: bytes, num_mels: int) -> Recording:
        """Return the recording in a file, for models that hear `num_mels` energies of a hop. Raise ApiError if it cannot be decoded."""
        work = msgspec.msgpack.encode(File(data, num_mels))
        try:
            outcome = msgspec.msgpack.decode(await self._calls.call(work), type=Outcome)
        except CallError as error:
            raise _described(error) from None
        if outcome.fault:
            raise ApiError(INVALID_AUDIO, f"file cannot be decoded: {outcome.fault}", param="file")
        return Recording(np.frombuffer(outcome.samples, "<f4"), outcome.loudest)


def _described(error: CallError) -> ApiError:
    if error.failure in (Failure.TOO_LARGE, Failure.KILLED):
        most = f"{Decoding.call_s:g} s of CPU time or {Decoding.call_bytes >> 20} MiB"
        return ApiError(INVALID_AUDIO, f"file cannot be decoded: it takes more than {most}", param="file")
    return ApiError(AUDIO_NOT_DECODED, "file was not decoded, because the server is busy; try again later", param="file")
