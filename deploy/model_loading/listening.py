"""Encode clips of recordings for the steps of a model that hears audio in conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.audio import Listening
from compiler.frontend.config import ModelConfig
from compiler.frontend.listening import ENTRY, NEXT
from deploy.model_loading.excerpts import ExcerptEncoder, Rows
from runtime.parts import InParts
from runtime.session import Session
from runtime.spectrogram import AROUND, HOP
from server.engine.step_model import ListeningLimits
from server.messages import Clip


def listening_limits(listening: Listening, config: ModelConfig) -> ListeningLimits:
    """Return the limits of a model that listens. The cost of a clip, in tokens of a prompt, is estimated by the weights that its frames
    multiply."""
    limits = ListeningLimits(listening.num_hops, listening.merge, listening.audio_token, 1, listening.ends, listening.piece_hops)
    own = listening.num_layers * listening.hidden_size * (4 * listening.hidden_size + 2 * listening.intermediate_size)
    decoder = config.num_layers * config.hidden_size * (4 * config.hidden_size + 3 * config.intermediate_size)
    return replace(limits, cost=-(-listening.num_frames * own // decoder))


class Listener(ExcerptEncoder):
    """Runs the program `listen`."""

    def __init__(self, session: Session, listening: Listening, row_size: int) -> None:
        super().__init__(row_size)
        self._session = session
        self._listening = listening

    def rows_of(self, excerpts: Sequence[Clip]) -> InParts[list[Rows]]:
        found: list[Rows] = []
        for clip in excerpts:
            rows = yield from self._session.in_parts(ENTRY, *inputs_of(self._listening, clip))
            found.append(rows_of_clip(clip, rows, self._row_size))
        return found


def heard(listening: Listening, clip: Clip, call: Callable[..., Rows], row_size: int = 0) -> Rows:
    """Return the rows of a clip. `call(name, *inputs)` runs the program of this name."""
    return rows_of_clip(clip, call(ENTRY, *inputs_of(listening, clip)), row_size)


def rows_of_clip(clip: Clip, rows: Rows, row_size: int) -> Rows:
    """Return the rows of the clip's tokens, the first of the program's `rows`. If `row_size` is larger than these rows, because rows of
    images are longer, zeros follow the numbers of each row."""
    rows = rows[: clip.num_tokens]
    found = np.zeros((len(rows), max(row_size, rows.shape[1])), np.float32)
    found[:, : rows.shape[1]] = rows
    return found


def inputs_of(listening: Listening, clip: Clip) -> tuple[NDArray[Any], ...]:
    """Return the inputs of the program `listen` for a clip. A clip that does not fill its last row or piece is followed by silence. The ids
    and ends of frames keep the clip's frames from attending to frames of this silence."""
    if listening.piece_hops:
        num_frames, each = clip.num_tokens, listening.num_positions
        pieces = -(-clip.num_hops // listening.piece_hops)
        frames, num_hops = pieces * each, pieces * listening.piece_hops
    else:
        num_frames, each = listening.frames_of(clip.num_hops), listening.merge
        frames = -(-num_frames // each) * each
        num_hops = 2 * frames + NEXT
    samples = np.zeros(HOP * num_hops + AROUND, np.float32)
    given = np.frombuffer(clip.samples, "<f4")[: len(samples)]
    samples[: len(given)] = given
    sounding = (np.arange(num_hops) < listening.sounding_of(clip.num_hops)).astype(np.float32)[:, None]
    frame_ids = (np.arange(frames) >= num_frames).astype(np.int32).reshape(-1, each)
    ends = np.array([num_frames, frames] if num_frames < frames else [frames], np.int32)
    return frame_ids, ends, samples, np.array([[clip.loudest]], np.float32), sounding
