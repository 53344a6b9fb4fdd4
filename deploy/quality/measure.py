"""Measure the quality label of a form (a format of the weights, keys and values): compare the program that is served with the exact weights
in f32, on the built-in text.

The predictions of the exact weights are computed once for each model and stored. For each token of the text, they hold the probabilities of
the MOST most probable next tokens. All other tokens count as a single token, so the measured divergence is at most that of the whole
distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from compiler.bind import bind_weights
from deploy.cache import keep_sections
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.files import Opened
from deploy.model_loading.fingerprint import fingerprint_of
from deploy.model_loading.known import Progress, begin, carried, refusals, silent
from deploy.model_loading.plan import Planned
from deploy.model_loading.serving import CompiledModel, Served, serve
from deploy.model_loading.stages import advance
from deploy.model_loading.weights import Bound
from deploy.quality.label import TEXT, keep_label, kept_label, key_of
from deploy.quality.observe import chunk_of, log_softmax, windows_of
from deploy.quality.text import tokens_of
from runtime.sealed import key_of as seal_key_of
from runtime.sections import SectionFile, read_kept
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, QualityLabel

EXACT = "f32"
WINDOW = 512  # the text is cut into windows of this number of tokens; each window is read without the text before it
CHUNK = 64  # tokens of a step, and rows of its logits
LEAST_CONTEXT = 3  # tokens: a prompt, and two that are generated, between which time passes when the speed is measured
MOST = 1024  # most probable next tokens whose probabilities are stored

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Exact:
    """The predictions of the exact weights after each token of the text."""

    ids: NDArray[np.int32]  # [tokens, MOST], the most probable first; all tokens of a vocabulary that has fewer than MOST
    logprobs: Floats  # of these ids
    losses: Floats  # [tokens], -log(probability) of the token that follows; 0 after the last token of a window

    @classmethod
    def of(cls, chunks: Sequence[Exact]) -> Self:
        return cls(*(np.concatenate([getattr(one, name) for one in chunks]) for name in cls.__slots__))

    def rows(self, start: int, stop: int) -> Exact:
        return Exact(self.ids[start:stop], self.logprobs[start:stop], self.losses[start:stop])


@refusals()
def label_of(load: Load, progress: Progress = silent) -> QualityLabel:
    """Return the label of a form, measured now or before. Raise LoadError if the model or its exact weights cannot be loaded."""
    return label_for(measurable(load, progress), load)


def label_for(known: Compiled, load: Load) -> QualityLabel:
    """Return the label of a compiled form, measured now or before. A label that is measured now is stored. `load` is the load of the form,
    from which the load of the exact weights is derived."""
    fingerprint = fingerprint_of(known)
    label = kept_label(known.cache, fingerprint)
    if label is None:
        exact = exact_of(load, known.progress)  # before the form takes memory
        with _served(known) as model:
            label = _measured(known, model, exact)
        keep_label(known.cache, fingerprint, label)
    return label


def measurable(load: Load, progress: Progress) -> Compiled:
    """Compile a form, with the bounds of a measurement (`_opened`). Raise LoadError if its quality cannot be measured."""
    known = advance(_opened(load, progress), Compiled)
    config = known.files.config
    if not known.mode.generates or config.hearing is not None or config.classes is not None:
        raise LoadError(ErrorCode.NOT_A_GENERATIVE_MODEL, f"{load.source} generates no text, so it has no quality label")
    if config.max_context < LEAST_CONTEXT:
        found = f"the context of {load.source} is {config.max_context}, expected at least {LEAST_CONTEXT} tokens to measure its quality"
        raise LoadError(ErrorCode.INVALID_VALUE, found)
    return known


@contextmanager
def _served(known: Compiled) -> Generator[CompiledModel]:
    """Load the model, and unload it at the end of the `with`."""
    served = advance(known, Served)
    try:
        assert isinstance(served.step_model, CompiledModel)
        yield served.step_model
    finally:
        served.session.close()


def _opened(load: Load, progress: Progress) -> Opened:
    """Open the files for a load with the bounds of a measurement. The program of a model that is served with the default bounds, or with
    larger ones, covers these bounds, so the measurement reuses it."""
    opened = advance(begin(load, progress), Opened)
    window = min(WINDOW, opened.files.config.max_context)
    bounded = msgspec.structs.replace(load, max_context=window, max_batch=CHUNK, kv_cache_bytes=None)
    return replace(opened, load=bounded)


def _measured(known: Compiled, model: CompiledModel, exact: Exact) -> QualityLabel:
    """Run the model over the text, and compare its predictions with those of the exact weights."""
    num_tokens = num_equal = num_scored = 0
    divergence = loss = 0.0
    for logits, followers in _predictions(model, text_windows(known)):
        stop = num_tokens + len(logits)
        expected, found = exact.rows(num_tokens, stop), log_softmax(logits)
        divergence += float(divergences(expected, found).sum(dtype=np.float64))
        num_equal += int((found.argmax(-1) == expected.ids[:, 0]).sum())
        loss += float(_losses(found, followers).sum(dtype=np.float64))
        num_tokens, num_scored = stop, num_scored + len(followers)
        known.progress("measure", num_tokens / len(exact.losses))
    perplexity, exact_perplexity = (math.exp(total / num_scored) for total in (loss, float(exact.losses.sum(dtype=np.float64))))
    return QualityLabel(divergence / num_tokens, num_equal / num_tokens, perplexity, exact_perplexity, num_tokens)


def divergences(expected: Exact, found: Floats) -> Floats:
    """Return the KL divergence of each row. `found` has log-probabilities of all tokens."""
    q = np.take_along_axis(found, expected.ids, -1)
    kept = (np.exp(expected.logprobs) * (expected.logprobs - q)).sum(-1)
    p_rest, q_rest = (np.maximum(1.0 - np.exp(x).sum(-1, dtype=np.float64), 1e-12) for x in (expected.logprobs, q))
    return kept + p_rest * np.log(p_rest / q_rest)


# --- the exact predictions ---------------------------------------------------------------------------------------------


def exact_of(load: Load, progress: Progress = silent) -> Exact:
    """Return the predictions of the exact weights, computed now or before. They are stored if they are computed now."""
    exact_load = msgspec.structs.replace(load, quantize=EXACT, kv_dtype="auto", calibrate="")
    known = advance(_opened(exact_load, progress), Compiled)
    place = None if known.cache is None else known.cache.reference_of(key_of(fingerprint_of(known)))
    found = None if place is None else read_kept(place, partial(_read, place))
    if found is None:
        found = _computed(known)
        if place is not None:
            _keep(place, found)
    return found


def _computed(known: Compiled) -> Exact:
    """Compute the predictions of the exact weights on the text."""
    windows = text_windows(known)
    chunks, num_tokens = list[Exact](), sum(map(len, windows))
    with _without_storing(known) as model:
        for logits, followers in _predictions(model, windows):
            logprobs = log_softmax(logits)
            count = min(MOST, logprobs.shape[-1])
            ids = np.argpartition(-logprobs, count - 1, -1)[:, :count]
            order = np.argsort(-np.take_along_axis(logprobs, ids, -1), -1, kind="stable")
            ids = np.take_along_axis(ids, order, -1).astype(np.int32)
            losses = np.zeros(len(logits), np.float32)
            losses[: len(followers)] = _losses(logprobs, followers)
            chunks.append(Exact(ids, np.take_along_axis(logprobs, ids, -1), losses))
            known.progress("measure the exact weights", sum(len(one.losses) for one in chunks) / num_tokens)
    return Exact.of(chunks)


@contextmanager
def _without_storing(known: Compiled) -> Generator[CompiledModel]:
    """Load the model without storing its packed weights in the cache, and unload it at the end of the `with`."""
    planned = advance(known, Planned)
    try:
        bind_weights(planned.session, planned.program.executable, planned.mode.entry, planned.mode.weights)
        model = serve(Bound(**carried(planned, Planned), packed=())).step_model
        assert isinstance(model, CompiledModel)
        yield model
    finally:
        planned.session.close()


def _keep(place: Path, exact: Exact) -> None:
    sections = {name: getattr(exact, name).reshape(-1).view(np.uint8).data for name in exact.__slots__}
    keep_sections(place, sections, "predictions of exact weights")


def _read(place: Path) -> Exact:
    """Return the predictions that `_keep` has stored, after a check of their checksums."""
    file = SectionFile(place, seal_key_of(place.parent))
    read: Callable[[str], memoryview] = partial(file.read, verify=True)
    losses = np.frombuffer(read("losses"), np.float32)
    ids, logprobs = np.frombuffer(read("ids"), np.int32), np.frombuffer(read("logprobs"), np.float32)
    return Exact(ids.reshape(len(losses), -1), logprobs.reshape(len(losses), -1), losses)


# --- running a model over the text -------------------------------------------------------------------------------------


def text_windows(known: Opened) -> list[Sequence[int]]:
    """Cut the built-in text into windows of the model's tokens. Raise LoadError if the model's tokenizer makes too few tokens of it."""
    return windows_of(tokens_of(known.tokenizer_source, TEXT), min(WINDOW, known.files.config.max_context))


def _predictions(model: CompiledModel, windows: Sequence[Sequence[int]]) -> Iterator[tuple[Floats, Sequence[int]]]:
    """Yield the logits after some tokens of a window, and the tokens that follow these; after the last token of a window none follows."""
    for window in windows:
        for start in range(0, len(window), CHUNK):
            stop = min(start + CHUNK, len(window))
            yield model.download(model.run(chunk_of(model.limits, window, start, stop))), window[start + 1 : stop + 1]


def _losses(logprobs: Floats, followers: Sequence[int]) -> Floats:
    """Return -log(probability) of each token that follows; a row without a follower has none."""
    return -np.take_along_axis(logprobs[: len(followers)], np.array(followers, np.int64).reshape(-1, 1), -1)[:, 0]
