"""What all exports need of a model: its program, the shapes of its caches, and the texts of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np

from compiler.frontend.vision import Vision
from deploy.model_loading.files import Opened
from deploy.model_loading.known import Asked, carried
from deploy.model_loading.modes import Embedder, Generator, Transcriber
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from runtime.cache_groups import CacheGroup, HeardGroup
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096  # tokens; a browser or a board allocates the memory for a whole context at once
NOTHING_SHOWN: Final[Mapping[int, bytes]] = MappingProxyType({})


def _sees_nothing(vision: Vision) -> bool:
    return False


def servable(asked: Asked, sees: Callable[[Vision], bool] = _sees_nothing) -> Servable:
    """Open a model and choose its program. A decoder gets a context of at most DEFAULT_CONTEXT tokens unless the load names another. A
    decoder reads images only if `sees` returns True for its image encoder, which then takes one crop at a time. No decoder reads audio in
    conversations. Raise LoadError for a model that embeds both texts and images, or that cannot be loaded."""
    known = advance(asked, Opened)
    if (config := known.files.config).reads_rows:
        if not config.is_causal:
            text = f"{known.load.name} embeds texts and images, which exports cannot do; use `relaxserve serve`"
            raise LoadError(ErrorCode.LOAD_REFUSED, text)
        vision = None if config.vision is None or not sees(config.vision) else replace(config.vision, at_once=1)
        known = Opened(**carried(known, Opened, files=replace(known.files, config=replace(config, vision=vision, listening=None))))
    if known.load.max_context is None and known.files.config.is_causal:
        load = msgspec.structs.replace(known.load, max_context=min(known.files.config.max_context, DEFAULT_CONTEXT))
        known = Opened(**carried(known, Opened, load=load))
    return advance(known, Servable)


def require_generator(model: Servable, name: str) -> Generator:
    """Return the mode of a model that generates text. Raise LoadError for other models."""
    if not isinstance(model.mode, Generator):
        raise LoadError(ErrorCode.NOT_A_GENERATIVE_MODEL, f"{name} generates no text; expected a model that answers texts")
    return model.mode


def cache_shapes(mode: Generator | Embedder | Transcriber) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the step's inputs that hold keys and values, or states, for one sequence, by the names of the inputs."""
    return {
        name: shape
        for number, group in enumerate(mode.groups)
        for name, (shape, _) in zip(_names(group, f"{number or ''}"), group.arrays(num_pages(mode, group)), strict=False)
    }


def _names(group: CacheGroup, number: str) -> tuple[str, ...]:
    """Return the names of the inputs of a cache group: its data, and its scales, which only some formats have."""
    if isinstance(group, HeardGroup):
        return "heard", "heard_scales"
    return (f"states{number}",) if group.keeps_states else (f"cache{number}", f"scales{number}")


def num_pages(mode: Generator | Embedder | Transcriber, group: CacheGroup) -> int:
    """Return the number of pages of a group: one of padding and those of a full context. The keys and values of the audio that a speech
    model hears take one page."""
    return 1 + (1 if isinstance(group, HeardGroup) else mode.bounds.max_pages)


def pieces(tokenizer: Tokenizer, vocab_size: int, shown: Mapping[int, bytes] = NOTHING_SHOWN) -> bytes:
    """Encode the bytes of each token's text: first their lengths as 16-bit integers, then all bytes. `shown` has the bytes of those special
    tokens that an answer shows."""
    known = [tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b"" for token_id in range(vocab_size)]
    found = [shown.get(token_id, piece) for token_id, piece in enumerate(known)]
    return np.array([len(piece) for piece in found], "<u2").tobytes() + b"".join(found)
