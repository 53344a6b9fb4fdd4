"""Define the segments of a transcript, and write them as text or as subtitles (SRT, WebVTT)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from server.speech.words import Word


@dataclass(frozen=True, slots=True)
class Segment:
    """The text between two time stamps of a transcript."""

    seek: int  # where the segment's window begins, in hundredths of a second
    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    temperature: float
    mean_logprob: float
    compression: float  # the factor by which zlib shrinks the text of the segment's window: high for repetitions
    silence: float  # probability that the segment's window has no speech
    words: tuple[Word, ...] = ()  # empty unless the request asks for their times
    logprobs: tuple[float, ...] = ()  # log-probabilities of its tokens


def compression_of(text: str) -> float:
    """Return the factor by which zlib shrinks a text; 0 for an empty one."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def text_of(segments: Sequence[Segment]) -> str:
    """Return the text of segments, without white space around it."""
    return "".join(segment.text for segment in segments).strip()


def srt(segments: Sequence[Segment]) -> str:
    """Return segments as subtitles in SRT."""
    blocks = (
        f"{number}\n{_clock(segment.start_s, ',')} --> {_clock(segment.end_s, ',')}\n{_line(segment)}\n"
        for number, segment in enumerate(segments, 1)
    )
    return "\n".join(blocks)


def vtt(segments: Sequence[Segment]) -> str:
    """Return segments as subtitles in WebVTT."""
    blocks = (f"{_clock(segment.start_s, '.')} --> {_clock(segment.end_s, '.')}\n{_line(segment)}\n" for segment in segments)
    return "WEBVTT\n\n" + "\n".join(blocks)


def _line(segment: Segment) -> str:
    """Return the text of a segment on lines of a subtitle, with `->` for `-->`, which may stand only between the times of a subtitle."""
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, mark: str) -> str:
    """Return a time as subtitles have it. `mark` separates the seconds from the thousandths."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
