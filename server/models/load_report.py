"""Report a load: write its lines into the log, and summarise the model in a few words.

The lines have a logger of their own, so that a terminal, which shows progress bars and a summary, can leave them out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from runtime.units import in_units
from server.models.model import Loaded, Model
from server.models.quality import in_words
from server.models.state import ModelSpec

LOADS = __name__  # the name of the logger
MUCH_LARGER = 1.25  # a note is logged if the weights take more than this many times the bytes that they would take with `auto`

log = logging.getLogger(LOADS)


def tell_loading(spec: ModelSpec) -> None:
    """Log that a load begins."""
    log.info("loading %s from %s", spec.name, spec.source)


def tell_loaded(model: Model, loaded: Loaded, load_s: float, least_bytes: int) -> None:
    """Log that a model is ready, and what its users should know. `load_s`: seconds of the load. `least_bytes`: bytes of the weights with
    `auto`; 0: unknown."""
    name, ready = model.spec.name, loaded.ready
    names = {"kv_cache": "KV cache up to" if model.cache_grows else "KV cache"}
    parts = ", ".join(f"{names.get(part, part)} {in_units(num_bytes)}" for part, num_bytes in model.bytes_by_part.items())
    compiled = "from the cache" if ready.cache_hit else "compiled"
    log.info("%s is ready after %.1f s, %s: %s, context %d tokens", name, load_s, compiled, parts, ready.max_context)
    for note in _notes(model, loaded, least_bytes):
        log.info("%s", note)
    if ready.device_note:
        log.warning("%s: %s", name, ready.device_note)


def _notes(model: Model, loaded: Loaded, least_bytes: int) -> Iterator[str]:
    """Yield what the users of a model should know, one line each."""
    name, ready, quantize = model.spec.name, loaded.ready, model.spec.quantize
    if ready.generates and not loaded.chats:
        yield f"{name} has no chat template: it answers /v1/completions and refuses conversations"
    if ready.left_out:
        yield f"{name}: {' and '.join(ready.left_out)} of its checkpoint are left out: answers are text only"
    for note in loaded.dialect.notes if loaded.chats else ():
        yield f"{name}: {note}"
    if ready.label is not None:
        yield f"{name} has a quality of {in_words(ready.label)}"
    if ready.generates:
        yield f"{name} samples by default with {loaded.sampling_note}"
    if loaded.defaults.given:
        yield f"{name} has defaults for requests: {loaded.defaults.note}"
    if quantize != "auto" and ready.weights_bytes > MUCH_LARGER * least_bytes > 0:
        taken, least = in_units(ready.weights_bytes), in_units(least_bytes)
        yield f"{name}: its weights take {taken} as {quantize}; auto keeps the numbers of its files, about {least}"
    for note in filter(None, (ready.context_note, ready.embedding_note)):
        yield f"{name}: {note}"


def summary(model: Model) -> str:
    """Return the name of a model, what it answers if it does not answer conversations, its memory and its context. The model must be
    loaded."""
    assert model.loaded is not None
    loaded, ready = model.loaded, model.loaded.ready
    if loaded.speech is not None:
        answers = ["speech"]
    elif not ready.generates:
        answers = ["classes" if ready.classes else "embeddings"]
    else:
        answers = [] if loaded.chats else ["no chat template: completions only"]
    size = f"{in_units(model.memory['resident_bytes'])} in memory"
    return f"{model.spec.name} ({', '.join([*answers, size, f'context {ready.max_context:,}'])})"
