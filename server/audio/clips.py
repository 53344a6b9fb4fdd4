"""Cut a recording into the clips that a model hears in a conversation, as the processors of transformers do.

A window is as much audio as the encoder takes at once. A recording is filled up with silence to whole windows or, if a model hears a
limited number of windows, to this number of windows. The result is mirrored at both ends. Qwen2-Audio hears only one window, and its audio
tokens end where the sound ends. Voxtral hears every window to its end. Qwen2.5-Omni hears up to 150 short windows, and its audio tokens end
where the sound ends. Qwen3-Omni gets no silence: the recording is mirrored at its own end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.hops import tokens_of
from runtime.spectrogram import AROUND, BEFORE, HOP, RATE, WINDOW
from server.audio.loudest import loudest_energy
from server.audio.sound import AudioError
from server.messages import Clip, Listening


def clips_of(samples: NDArray[np.float32], listening: Listening) -> tuple[Clip, ...]:
    """Return the clips of a recording, one per window that is long enough for a token. Audio after the last window that the model hears is
    cut off. Raise AudioError if the recording is too short for one token."""
    window = HOP * listening.num_hops
    if listening.most_windows:
        samples = samples[: window * listening.most_windows]
    starts = range(0, len(samples), window)
    hops = [_hops(len(samples) - start, listening) for start in starts]
    tokens = [tokens_of(count, listening.frames_each, listening.piece_hops) for count in hops]
    if not any(tokens):
        raise AudioError(f"it lasts {len(samples) / RATE:.3f} s, which is too short for a token; expected a longer recording")
    size = len(samples) if listening.reflects else len(starts) * window
    around = _mirrored(samples, size, ends=len(starts) == (listening.most_windows or len(starts)))
    heard = sum(hops) * HOP + WINDOW - HOP if listening.reflects else len(samples) + 2 * AROUND
    loudest = loudest_energy(around[:heard], listening.num_mels)
    parts = [np.trim_zeros(around[start : start + window + AROUND], "b").astype("<f4").tobytes() for start in starts]
    return tuple(Clip.of(part, loudest, *counts) for part, *counts in zip(parts, hops, tokens, strict=True) if counts[-1])


def _mirrored(samples: NDArray[np.float32], size: int, *, ends: bool) -> NDArray[np.float32]:
    """Return a recording that silence fills up to `size` samples, with its reflection before it. If `ends`, the reflection of the filled
    recording follows it; otherwise silence follows. The recording is copied only once, because it may last an hour."""
    end, after = BEFORE + size, AROUND - BEFORE
    found = np.zeros(size + AROUND, np.float32)
    found[BEFORE : BEFORE + len(samples)] = samples
    found[:BEFORE] = found[BEFORE + 1 : 2 * BEFORE + 1][::-1]
    if ends:
        found[end:] = found[end - 1 - after : end - 1][::-1]
    return found


def _hops(num_samples: int, listening: Listening) -> int:
    """Return how many hops of a window the encoder hears if the recording has `num_samples` samples from the beginning of the window on."""
    if not listening.ends:
        return listening.num_hops
    return min(num_samples // HOP if listening.reflects else -(-num_samples // HOP), listening.num_hops)
