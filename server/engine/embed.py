"""The engine of an encoder: embed whole texts in batches of a limited number of tokens, and images. API keys take turns as in generation.

Texts for a decoder go through the generating engine instead (`requests.Requests.embed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from server.engine.scheduling.fair_queue import FairQueue
from server.engine.scheduling.pace import UNKNOWN_S
from server.engine.step_model import EmbedModel
from server.messages import IDLE, Abort, Crop, Embed, Embedding, ErrorCode, Failed, FromWorker, Step, Submit


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text, or an image, that waits to be embedded."""

    embed: Embed
    rank: tuple[int, int, int]
    num_tokens: int  # for an image, the tokens of a text that take about as long

    @property
    def fairness_key(self) -> str:
        return self.embed.fairness_key

    @property
    def had_turn(self) -> bool:
        return False  # a text runs in one step


class Embedder:
    def __init__(self, model: EmbedModel, publish: Callable[[FromWorker], None]) -> None:
        assert model.limits.max_tokens >= model.limits.max_context, model.limits
        self._model = model
        self._publish = publish
        self._queue: FairQueue[Text] = FairQueue()
        self._texts: dict[str, Text] = {}
        self._num_arrived = 0
        self._paused = False
        self._has_announced = False

    @property
    def has_work(self) -> bool:
        return bool(self._texts)

    def submit(self, submit: Submit) -> None:
        self._publish(Failed(submit.request_id, ErrorCode.NOT_A_GENERATIVE_MODEL, "this model gives embeddings and generates no text"))

    def embed(self, embed: Embed) -> None:
        if embed.per_token:
            message = "this model computes one vector per text, not one per token"
            self._publish(Failed(embed.request_id, ErrorCode.NOT_AN_EMBEDDING_MODEL, message))
            return
        num_tokens, max_context = len(embed.prompt_ids), self._model.limits.max_context
        if embed.crop is not None:
            if fault := self._fault(embed.crop):
                self._publish(Failed(embed.request_id, ErrorCode.INVALID_VALUE, fault))
                return
            seeing = self._model.limits.seeing
            assert seeing is not None
            num_tokens = ceil(seeing.cost * seeing.share(embed.crop.num_tokens))
        elif not 1 <= num_tokens <= max_context:
            message = f"the text has {num_tokens} tokens, expected 1 to {max_context}"
            self._publish(Failed(embed.request_id, ErrorCode.CONTEXT_LENGTH_EXCEEDED, message))
            return
        text = Text(embed, (embed.priority, self._num_arrived, 0), num_tokens)
        self._num_arrived += 1
        self._texts[embed.request_id] = text
        self._queue.push(text)

    def abort(self, abort: Abort) -> None:
        self._remove(abort.request_id)

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def step(self) -> bool:
        texts = [] if self._paused else self._take()
        if not texts:
            return False
        if not self._has_announced:  # the costs of steps are not measured
            self._has_announced = True
            self._publish(Step(UNKNOWN_S))
        words = [text.embed for text in texts if text.embed.crop is None]
        if words:
            self._answer(words, self._model.run([embed.prompt_ids for embed in words], [embed.second for embed in words]))
        images = [(text.embed, crop) for text in texts if (crop := text.embed.crop) is not None]
        if images:
            self._answer([embed for embed, _ in images], self._model.see([crop for _, crop in images]))
        return True

    def close(self) -> None:
        """Do nothing: this engine holds no resources."""

    def _answer(self, asked: Sequence[Embed], vectors: NDArray[np.float32]) -> None:
        for embed, vector in zip(asked, vectors, strict=True):
            self._publish(embedding_of(embed, [vector]))

    def _fault(self, crop: Crop) -> str:
        """Return why an image cannot be embedded, or ""."""
        seeing = self._model.limits.seeing
        return "this model embeds only texts" if seeing is None else seeing.fault(crop)

    def _remove(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._queue.remove(text)

    def _take(self) -> list[Text]:
        limits, now = self._model.limits, time.monotonic()
        texts: list[Text] = []
        room = limits.max_tokens
        while len(texts) < limits.max_seqs and (text := self._queue.head()) is not None:
            embed, num_tokens = text.embed, text.num_tokens
            expired = embed.deadline is not None and embed.deadline <= now
            if not expired and num_tokens > room and texts:
                break
            self._remove(embed.request_id)
            if expired:
                self._publish(Failed(embed.request_id, ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the text was embedded"))
                continue
            self._queue.charge(embed.fairness_key, num_tokens)
            room -= num_tokens
            texts.append(text)
            if embed.priority == IDLE:
                break  # a text of a batch job runs alone or last, so that the next request waits for one text at most
        return texts


def embedding_of(embed: Embed, vectors: Iterable[NDArray[np.float32]]) -> Embedding:
    """Encode the vector of a text, or one vector per token, as an Embedding."""
    written = [(_unit(vector) if embed.normalize else vector).astype("<f4").tobytes() for vector in vectors]
    return Embedding(embed.request_id, b"".join(written), len(embed.prompt_ids))


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector / max(float(np.sqrt(np.square(vector, dtype=np.float64).sum())), 1e-12)
