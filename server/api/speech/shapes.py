"""Build the JSON of transcripts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NotRequired, cast

from typing_extensions import TypedDict

from server.api.answer.logprobs import LEAST
from server.interfaces import Tokenizer
from server.speech.languages import name_of
from server.speech.transcript import Segment, text_of
from server.speech.words import Word


class AudioUsage(TypedDict):
    """How much audio was transcribed."""

    type: Literal["duration"]
    seconds: int


class TranscriptLogprob(TypedDict):
    """A token of a transcript and its log-probability."""

    token: str
    bytes: Sequence[int]
    logprob: float


class Transcript(TypedDict):
    """A transcript as its text."""

    text: str
    usage: AudioUsage
    logprobs: NotRequired[Sequence[TranscriptLogprob]]


class TranscriptSegment(TypedDict):
    """A segment of a transcript. `start` and `end` are seconds; `seek` says in hundredths of a second where the segment's window begins.
    The last four fields are about the whole window."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(TypedDict):
    word: str
    start: float
    end: float


class VerboseTranscript(TypedDict):
    """A transcript with its segments or words."""

    task: str
    language: str
    duration: float
    text: str
    segments: NotRequired[Sequence[TranscriptSegment]]
    words: NotRequired[Sequence[TranscriptWord]]
    usage: AudioUsage


class TranscriptDelta(TypedDict):
    """The next text of a stream."""

    type: Literal["transcript.text.delta"]
    delta: str
    logprobs: NotRequired[Sequence[TranscriptLogprob]]


class TranscriptDone(TypedDict):
    """The event at the end of a stream. If the request asks for verbose_json, the event also has the fields of VerboseTranscript."""

    type: Literal["transcript.text.done"]
    text: str
    usage: AudioUsage
    logprobs: NotRequired[Sequence[TranscriptLogprob]]


def short(segments: Sequence[Segment], duration_s: float) -> Transcript:
    """Return a transcript as its text."""
    return {"text": text_of(segments), "usage": _usage(duration_s)}


def verbose(segments: Sequence[Segment], duration_s: float, task: str, language: str, times: Collection[str]) -> VerboseTranscript:
    """Return a transcript with its segments, its words, or both. `times` names what the transcript has: "segment", "word"."""
    answer: VerboseTranscript = {
        "task": task,
        "language": name_of(language),
        "duration": round(duration_s, 2),
        "text": text_of(segments),
        "usage": _usage(duration_s),
    }
    if "segment" in times:
        answer["segments"] = [_segment(number, segment) for number, segment in enumerate(segments)]
    if "word" in times:
        answer["words"] = [_word(word) for segment in segments for word in segment.words]
    return answer


def delta(text: str) -> TranscriptDelta:
    """Return the event for a further piece of the text."""
    return {"type": "transcript.text.delta", "delta": text}


def done(transcript: Transcript | VerboseTranscript) -> TranscriptDone:
    """Return the event at the end of a stream."""
    return cast("TranscriptDone", {"type": "transcript.text.done", **transcript})


def logprobs_of(segments: Sequence[Segment], tokenizer: Tokenizer, end: int) -> list[TranscriptLogprob]:
    """Return the log-probabilities of the tokens that are text. `end` is the lowest token id that is not text."""
    pairs = (pair for segment in segments for pair in zip(segment.token_ids, segment.logprobs, strict=False) if pair[0] < end)
    return [_logprob(tokenizer.token_bytes(token_id), logprob) for token_id, logprob in pairs]


def _logprob(raw: bytes, logprob: float) -> TranscriptLogprob:
    """Return the entry of a token with these bytes."""
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, LEAST)}


def _segment(number: int, segment: Segment) -> TranscriptSegment:
    """Return a segment in OpenAI's shape."""
    return {
        "id": number,
        "seek": segment.seek,
        "start": round(segment.start_s, 2),
        "end": round(segment.end_s, 2),
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": segment.compression,
        "no_speech_prob": segment.silence,
    }


def _word(word: Word) -> TranscriptWord:
    """Return a word in OpenAI's shape."""
    return {"word": word.text.strip(), "start": round(word.start_s, 2), "end": round(word.end_s, 2)}


def _usage(duration_s: float) -> AudioUsage:
    """Return the usage that an answer reports: whole seconds, rounded up."""
    return {"type": "duration", "seconds": math.ceil(duration_s)}
