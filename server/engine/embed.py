"""The engine of an encoder: embed whole texts in batches of a limited number of tokens, and images in parts. Texts are embedded between two
parts of images. API keys take turns, as in the engine that generates text.

Texts for a decoder go through the generating engine instead (`requests.Requests.embed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from runtime.parts import InParts
from server.engine.intake import stray_of
from server.engine.scheduling.fair_queue import FairQueue, is_live
from server.engine.scheduling.pace import ALONE_S, UNKNOWN_S
from server.engine.step_model import EmbedModel
from server.messages import IDLE, Abort, Crop, Embed, Embedding, ErrorCode, Failed, FromWorker, Step, Submit


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text to embed, or an image."""

    embed: Embed
    rank: tuple[int, int, int]
    num_tokens: int  # for an image: the number of text tokens whose embedding takes about as long

    @property
    def fairness_key(self) -> str:
        return self.embed.fairness_key

    @property
    def had_turn(self) -> bool:
        return False  # no text or image returns to its queue, so each of them is fresh


class Embedder:
    """Embeds the texts and images of requests. Has the methods of `loop.Engine` that the worker calls."""

    def __init__(self, model: EmbedModel, publish: Callable[[FromWorker], None], clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` measures how long images are encoded."""
        assert model.limits.max_tokens >= model.limits.max_context, model.limits
        self._model = model
        self._publish = publish
        self._clock = clock
        self._queue: FairQueue[Text] = FairQueue()
        self._images: FairQueue[Text] = FairQueue()
        self._texts: dict[str, Text] = {}  # texts and images that wait, by request id
        self._seen: list[Embed | None] = []  # images that are encoded together in `_parts`; None: aborted
        self._parts: InParts[NDArray[np.float32]] | None = None
        self._num_arrived = 0
        self._paused = False
        self._has_announced = False

    @property
    def has_work(self) -> bool:
        """Whether a text or an image waits, or images are being encoded."""
        return bool(self._texts) or self._parts is not None

    def submit(self, submit: Submit) -> None:
        """Refuse a request to generate text."""
        self._publish(Failed(submit.request_id, ErrorCode.NOT_A_GENERATIVE_MODEL, "this model gives embeddings and generates no text"))

    def embed(self, embed: Embed) -> None:
        """Queue a text or an image. Publish a failure instead if the request asks for one vector per token, if the model cannot read its
        image, or if its text is empty or longer than the model's context."""
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
        elif stray := stray_of(embed.prompt_ids, self._model.limits.vocab_size):
            self._publish(Failed(embed.request_id, ErrorCode.INVALID_VALUE, f"the text has {stray}"))
            return
        text = Text(embed, (embed.priority, self._num_arrived, 0), num_tokens)
        self._num_arrived += 1
        self._texts[embed.request_id] = text
        self._queue_of(text).push(text)

    def abort(self, abort: Abort) -> None:
        """Remove a text or an image that waits. Stop encoding images once all of those that are encoded together are aborted."""
        self._remove(abort.request_id)
        self._seen = [None if embed is None or embed.request_id == abort.request_id else embed for embed in self._seen]
        if self._parts is not None and not any(self._seen):
            self._parts.close()
            self._parts = None

    def pause(self, paused: bool) -> None:
        """Run no steps while `paused`."""
        self._paused = paused

    def step(self) -> bool:
        """Embed a batch of texts, and encode parts of images until ALONE_S have passed, at least one part. While other requests have
        images, a text of a batch job runs only as the last of a batch with texts of other requests. Images of batch jobs wait while other
        requests have texts and no images. Return False if nothing was embedded or encoded, because nothing waits, the deadlines of all that
        waited have passed, or the engine is paused."""
        if self._paused:
            return False
        are_live = any(embed is not None and embed.priority < IDLE for embed in self._seen) or is_live(self._images.first_priority)
        texts = self._take(self._queue) if is_live(self._queue.first_priority) or not are_live else []
        if texts:
            self._announce()
            self._answer(texts, self._model.run([embed.prompt_ids for embed in texts], [embed.second for embed in texts]))
            if not are_live and texts[0].priority < IDLE:
                return True
        return self._see() or bool(texts)

    def _see(self) -> bool:
        """Encode parts of images for ALONE_S, at least one part. Begin with the next images if none are being encoded. Publish the vectors
        after the last part. Return False if there are no images."""
        if self._parts is None:
            images = self._take(self._images)
            if not images:
                return False
            self._seen = [*images]
            self._parts = self._model.see([embed.crop for embed in images if embed.crop is not None])
        self._announce()
        began = self._clock()
        while self._parts is not None:
            try:
                next(self._parts)
            except StopIteration as end:
                self._answer(self._seen, end.value)
                self._seen, self._parts = [], None
            if self._clock() - began >= ALONE_S:
                break
        return True

    def _announce(self) -> None:
        """Tell the front once that the duration of steps is unknown, so that it waits long before it calls a step stalled."""
        if not self._has_announced:  # this engine never measures the costs of its steps
            self._has_announced = True
            self._publish(Step(UNKNOWN_S))

    def close(self) -> None:
        """Do nothing: this engine holds no resources."""

    def _answer(self, asked: Sequence[Embed | None], vectors: NDArray[np.float32]) -> None:
        """Publish the vectors of texts or images; vector i belongs to `asked[i]`. None stands for an aborted image."""
        for embed, vector in zip(asked, vectors, strict=True):
            if embed is not None:
                self._publish(embedding_of(embed, [vector]))

    def _fault(self, crop: Crop) -> str:
        """Return why an image cannot be embedded, or ""."""
        seeing = self._model.limits.seeing
        return "this model embeds only texts" if seeing is None else seeing.fault(crop)

    def _queue_of(self, text: Text) -> FairQueue[Text]:
        return self._queue if text.embed.crop is None else self._images

    def _remove(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._queue_of(text).remove(text)

    def _take(self, queue: FairQueue[Text]) -> list[Embed]:
        """Remove the texts or images of the next step from their queue, and return them. Stop after `max_seqs` of them, before an item for
        which the step has no room, and after an item of a batch job. The first item is taken even if it has more tokens than the step has
        room for. Items whose deadline has passed fail and are left out."""
        limits, now = self._model.limits, time.monotonic()
        taken: list[Embed] = []
        room = limits.max_tokens
        while len(taken) < limits.max_seqs and (text := queue.head()) is not None:
            embed, num_tokens = text.embed, text.num_tokens
            expired = embed.deadline is not None and embed.deadline <= now
            if not expired and num_tokens > room and taken:
                break
            self._remove(embed.request_id)
            if expired:
                self._publish(Failed(embed.request_id, ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the text was embedded"))
                continue
            queue.charge(embed.fairness_key, num_tokens)
            room -= num_tokens
            taken.append(embed)
            if embed.priority == IDLE:
                break  # a text or image of a batch job runs alone or last, so the next request waits for one of them at most
        return taken


def embedding_of(embed: Embed, vectors: Iterable[NDArray[np.float32]]) -> Embedding:
    """Return an Embedding with the vector of a text or an image, or with one vector per token of a text. Scale each vector to length 1 if
    the request has `normalize`."""
    written = [(_unit(vector) if embed.normalize else vector).astype("<f4").tobytes() for vector in vectors]
    return Embedding(embed.request_id, b"".join(written), len(embed.prompt_ids))


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector scaled to length 1. A vector of zeros stays as it is."""
    return vector / max(float(np.sqrt(np.square(vector, dtype=np.float64).sum())), 1e-12)
