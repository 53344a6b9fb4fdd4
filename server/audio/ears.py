"""Write the audio tokens of recordings into the prompt of a model that hears them in conversations (`server/text/media.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from server.audio.clip_decoder import ClipDecoder, HeardRecording
from server.interfaces import Tokenizer
from server.messages import Listening
from server.text.media import Markers


@dataclass(frozen=True, slots=True)
class Ears:
    """How a model hears recordings, and how they are written into its prompt."""

    reads: ClassVar = HeardRecording  # class of a decoded recording
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
        """The text that stands for a recording until the prompt is rendered."""
        return self.markers.marker

    def written(self, recording: HeardRecording) -> str:
        """Return the text of a recording in the prompt: the marker once per token."""
        return self.marker * recording.num_tokens
