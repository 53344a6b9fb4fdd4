"""Write the audio tokens of recordings into the prompt of a model that hears them in conversations (`server/text/media.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.audio.clip_decoder import ClipDecoder, HeardRecording
from server.interfaces import Tokenizer
from server.messages import Listening
from server.text.media import Markers


@dataclass(frozen=True, slots=True)
class Ears:
    listening: Listening
    decoder: ClipDecoder
    markers: Markers

    @staticmethod
    def of(listening: Listening, tokenizer: Tokenizer, decoder: ClipDecoder) -> Ears | None:
        """Return the Ears of a model, or None if its vocabulary lacks the audio token."""
        marker = tokenizer.special_texts.get(listening.audio_token, b"").decode(errors="replace")
        return Ears(listening, decoder, Markers(marker, "audio", "recordings")) if marker else None

    @property
    def marker(self) -> str:
        return self.markers.marker

    def expanded(self, prompt: str, recordings: Sequence[HeardRecording]) -> str:
        """Return a prompt with the tokens of each recording in place of its marker."""
        return self.markers.filled(prompt, [self.marker * recording.num_tokens for recording in recordings])

    def in_parts(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        return self.markers.in_parts(messages)
