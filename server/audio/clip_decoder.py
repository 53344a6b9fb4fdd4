"""The decoder of recordings in conversations as the front uses it: every file is a call of the job `Decoding`, which runs in another
process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from server.audio.decoder import PATIENCE_S
from server.audio.decoding import Decoding, File, Outcome
from server.errors import AUDIO_NOT_DECODED, INVALID_AUDIO, ApiError
from server.fetching import Fetcher
from server.isolated.files import FileCalls
from server.messages import Clip, Listening


@dataclass(frozen=True, slots=True)
class HeardRecording:
    """A recording as a model hears it in a conversation."""

    clips: Sequence[Clip]

    @property
    def num_tokens(self) -> int:
        return sum(clip.num_tokens for clip in self.clips)


class ClipDecoder:
    """Decodes recordings, and counts the samples that requests hold: those that run or wait keep theirs, because a worker may die."""

    def __init__(self, most_s: float, most_held_bytes: int, fetcher: Fetcher) -> None:
        """A file may last `most_s` seconds."""
        self.num_held_bytes = 0
        self._fetcher = fetcher
        self._most_held_bytes = most_held_bytes
        self._calls = FileCalls(Decoding(most_s), Outcome, PATIENCE_S, invalid=INVALID_AUDIO, not_decoded=AUDIO_NOT_DECODED)

    async def decode(self, given: str, listening: Listening, param: str, *, is_url: bool) -> HeardRecording:
        """Return the recording at a URL, or in a file that is given in base64. Raise ApiError if there is none; `param` is its field."""
        if self.num_held_bytes >= self._most_held_bytes:
            held = f"the running and waiting requests hold {self.num_held_bytes >> 20} MiB of audio (max_held_audio_bytes)"
            raise ApiError(AUDIO_NOT_DECODED, f"{param} was not decoded, because {held}; try again later", param=param)
        found = await self._fetcher.given(given, param) if is_url else given
        file = File(text=found, listening=listening) if isinstance(found, str) else File(found, listening=listening)
        outcome = await self._calls.decode(file, param)
        for clip in outcome.clips:
            self._count(len(clip.samples))
            weakref.finalize(clip, self._count, -len(clip.samples)).atexit = False
        return HeardRecording(outcome.clips)

    def _count(self, num_bytes: int) -> None:
        self.num_held_bytes += num_bytes
