"""Decode the recordings of conversations for the front: every file is a call of the job `Decoding`, which runs in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.audio.decoder import PATIENCE_S
from server.audio.decoding import Decoding, File, Outcome
from server.errors import AUDIO_NOT_DECODED, INVALID_AUDIO
from server.fetching import Fetcher
from server.isolated.files import FileCalls
from server.isolated.held import HeldBytes
from server.messages import Clip, Listening


@dataclass(frozen=True, slots=True)
class HeardRecording:
    """A recording as a model hears it in a conversation."""

    clips: Sequence[Clip]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that stand for the recording in the prompt."""
        return sum(clip.num_tokens for clip in self.clips)


class ClipDecoder:
    """Decodes recordings, and limits the samples that requests hold."""

    def __init__(self, most_s: float, most_held_bytes: int, fetcher: Fetcher) -> None:
        """A file may last at most `most_s` seconds. Once requests hold `most_held_bytes` of decoded samples together, no more files are
        decoded."""
        self.held = HeldBytes(most_held_bytes, names="audio", setting="max_held_audio_bytes", refused=AUDIO_NOT_DECODED)
        self._fetcher = fetcher
        self._calls = FileCalls(Decoding(most_s), Outcome, PATIENCE_S, invalid=INVALID_AUDIO, not_decoded=AUDIO_NOT_DECODED)

    async def decode(self, given: str, listening: Listening, param: str, *, is_url: bool) -> HeardRecording:
        """Return the recording at the URL `given`, or in the file that `given` contains in base64, and count its samples. Raise ApiError if
        the recording cannot be fetched or decoded, or if requests hold too many samples. `param` is the request's field with the URL or the
        file."""
        self.held.require_room(param)
        found = await self._fetcher.given(given, param) if is_url else given
        file = File(text=found, listening=listening) if isinstance(found, str) else File(found, listening=listening)
        outcome = await self._calls.decode(file, param)
        self.held.hold(outcome.clips, param)
        return HeardRecording(outcome.clips)
