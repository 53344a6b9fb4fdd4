"""Find where speech begins and ends in audio that arrives piece by piece, by its loudness above the noise around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FRAME_MS = 20
ONSET_FRAMES, ONSET_OF = 3, 5  # speech begins where 3 of 5 successive frames are loud
QUIETEST_DB = -55.0  # quieter frames are not speech, except early ones (`_step`); 0 dB is the level of the largest sample value
LEAST_ABOVE_DB, MOST_ABOVE_DB = 4.0, 20.0  # how far speech must lie above the noise, at threshold 0 and at threshold 1
CLEAR_DB = 6.0  # the quietest frame is noise if the loudest one exceeds it by this much more than speech must exceed noise
MOST_EARLY_FRAMES = 100  # largest number of frames that wait until the level of the noise is known
FLOOR_RISE_DB = 0.02  # rise of the estimated noise level per frame; the estimate falls to the level of a quieter frame at once


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """How a session detects where speech begins and ends."""

    threshold: float = 0.5  # 0 to 1: how far speech must lie above the noise
    prefix_ms: int = 300  # audio before the first loud frames that counts as part of the speech
    silence_ms: int = 500  # silence that ends speech


@dataclass(frozen=True, slots=True)
class Began:
    """Speech has begun."""

    at_ms: int  # time from the beginning of all audio to the beginning of the speech, including its prefix (`prefix_ms`)


@dataclass(frozen=True, slots=True)
class Ended:
    """Speech has ended, `at_ms` after the beginning of all audio."""

    at_ms: int


class VoiceDetector:
    """Follows one stream of 16-bit samples.

    A stream may begin inside speech, when the level of the noise is unknown. So the first frames wait until one is much quieter than
    another, as happens within the first words, or until there are MOST_EARLY_FRAMES. Then all of them are judged by the level of the
    quietest one.
    """

    def __init__(self, turns: TurnDetection, rate: int, noise_db: float | None = None) -> None:
        """`noise_db` is the level of the noise before the stream, if an earlier detector has found it."""
        self._turns = turns
        self._frame_bytes = 2 * rate * FRAME_MS // 1000
        self._above_db = LEAST_ABOVE_DB + turns.threshold * (MOST_ABOVE_DB - LEAST_ABOVE_DB)
        self._rest = b""
        self._floor_db = 0.0 if noise_db is None else noise_db
        self._early: list[float] | None = [] if noise_db is None else None  # levels of the frames that wait
        self._recent = deque[bool](maxlen=ONSET_OF)
        self._num_frames = 0
        self._num_quiet = 0
        self.is_speaking = False

    @property
    def noise_db(self) -> float | None:
        """The level of the noise; None while it is unknown."""
        return self._floor_db if self._early is None else None

    @property
    def kept_ms(self) -> int:
        """How much of the last audio may belong to speech that is found later, in milliseconds."""
        num_frames = ONSET_OF + len(self._early or ()) + 1  # the last frame is incomplete
        return self._turns.prefix_ms + num_frames * FRAME_MS

    def feed(self, data: bytes) -> Iterator[Began | Ended]:
        """Yield where speech begins and ends in the next samples. Samples of an incomplete frame wait for the next call."""
        data = self._rest + data
        whole = len(data) // self._frame_bytes * self._frame_bytes
        self._rest = data[whole:]
        frames = np.frombuffer(data[:whole], "<i2").reshape(-1, self._frame_bytes // 2).astype(np.float32) / 32768
        for level_db in 10 * np.log10(np.maximum(np.mean(np.square(frames), axis=1), 1e-10)):
            yield from self._step(float(level_db))

    def _step(self, level_db: float) -> Iterator[Began | Ended]:
        """Judge a frame with this level, or let it wait until the noise is known. Yield where speech begins or ends."""
        self._floor_db = min(self._floor_db + FLOOR_RISE_DB, max(level_db, QUIETEST_DB - self._above_db))
        if self._early is None:
            yield from self._judged(level_db, self._above_db)
            return
        self._early.append(level_db)
        is_known = max(self._early) > self._floor_db + self._above_db + CLEAR_DB
        if is_known or len(self._early) == MOST_EARLY_FRAMES:
            # the quietest frame may be a weak part of speech, so half the distance above it suffices for the frames that waited
            above_db = self._above_db / 2 if is_known else self._above_db
            early, self._early = self._early, None
            for level_db in early:
                yield from self._judged(level_db, above_db)

    def _judged(self, level_db: float, above_db: float) -> Iterator[Began | Ended]:
        """Judge a frame: it is loud if its level lies `above_db` above the noise. Yield where speech begins or ends."""
        self._num_frames += 1
        now_ms = self._num_frames * FRAME_MS
        is_loud = level_db > self._floor_db + above_db
        self._recent.append(is_loud)
        self._num_quiet = 0 if is_loud else self._num_quiet + 1
        if not self.is_speaking and sum(self._recent) >= ONSET_FRAMES:
            self.is_speaking = True
            yield Began(max(0, now_ms - ONSET_OF * FRAME_MS - self._turns.prefix_ms))
        elif self.is_speaking and self._num_quiet * FRAME_MS >= max(self._turns.silence_ms, FRAME_MS):
            self.is_speaking = False
            self._recent.clear()
            yield Ended(now_ms)
