"""The worker process: load one model, then turn messages into tokens until told to stop."""

from __future__ import annotations

import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from runtime.step import EmbedModel, StepModel
from server.engine.channel import WorkerChannel
from server.engine.constrain import ConstraintCompiler
from server.engine.embed import Embedder
from server.engine.loop import Engine, OverlappedEngine
from server.handle import LoadError
from server.messages import (
    Abort,
    Drain,
    Embed,
    Failed,
    FromFront,
    Load,
    LoadFailed,
    Progress,
    Ready,
    Shutdown,
    Submit,
)

ProgressFn = Callable[[str, float], None]
WARM_AFTER_S = 1.0  # idle: not right after a restart, when requests are about to be resubmitted
STALL_S = 0.002  # between looks, while the engine waits for a constraint or for the front to read


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a builder hands over: a model that generates, one that embeds, or both."""

    ready: Ready
    step_model: StepModel | None = None
    embed_model: EmbedModel | None = None
    eos_ids: tuple[int, ...] = ()
    tokenizer_json: str | None = None  # constraints are refused without it
    overlap: bool = True


Build = Callable[[Load, ProgressFn], LoadedModel]


def serve_worker(socket_path: str, build: Build) -> None:
    """Returns when told to stop or when drained; a front that is gone ends the process at once."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(socket_path)
    channel = WorkerChannel(connection, on_lost=lambda: os._exit(0))
    load = channel.inbox.get()
    if not isinstance(load, Load):
        raise TypeError(f"the first message is {type(load).__name__}, expected Load")
    try:
        model = build(load, lambda stage, fraction: channel.send(Progress(stage, fraction)))
    except LoadError as error:
        channel.send(LoadFailed(error.code, error.message, error.required_bytes, error.free_bytes))
        channel.close()
        return
    except Exception as error:
        traceback.print_exc()
        channel.send(LoadFailed("load_failed", f"{type(error).__name__}: {error}"))
        channel.close()
        return
    channel.send(model.ready)
    try:
        Worker(model, channel).run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads of the device or of a constraint may hang: the end must not wait for them
    channel.close()


class Worker:
    def __init__(self, model: LoadedModel, channel: WorkerChannel) -> None:
        self._channel = channel
        self._engine: Engine | None = None
        self._constraints: ConstraintCompiler | None = None
        self._embedder: Embedder | None = None
        self._draining = False
        self._stopping = False
        self._is_cold = True
        if model.step_model is not None:
            if model.tokenizer_json is not None:
                vocab_size = model.step_model.limits.vocab_size
                self._constraints = ConstraintCompiler(model.tokenizer_json, eos_ids=model.eos_ids, vocab_size=vocab_size)
            engine_class = OverlappedEngine if model.overlap else Engine
            self._engine = engine_class(model.step_model, channel.send, eos_ids=model.eos_ids, constraints=self._constraints)
        if model.embed_model is not None:
            self._embedder = Embedder(model.embed_model, channel.send)

    @property
    def has_work(self) -> bool:
        return any(part is not None and part.has_work for part in (self._engine, self._embedder))

    def run(self) -> None:
        while not self._stopping:
            self._receive()
            if not self.has_work:
                if self._draining:
                    break
                continue  # `_receive` waits for the next message
            if self._engine is not None:
                self._engine.scheduler.paused = not self._channel.has_room
            ran = self._engine is not None and self._engine.step()
            if self._channel.has_room and self._embedder is not None:
                ran = self._embedder.step() or ran
            if not ran:
                time.sleep(STALL_S)
        if self._engine is not None:
            self._engine.close()

    def _receive(self) -> None:
        """All that has arrived; wait for one message if there is nothing else to do."""
        try:
            if not self.has_work and not self._draining:
                self._handle(self._channel.inbox.get(timeout=WARM_AFTER_S if self._is_cold else None))
            while True:
                self._handle(self._channel.inbox.get_nowait())
        except queue.Empty:
            if not self.has_work and self._is_cold:
                self._warm()

    def _warm(self) -> None:
        self._is_cold = False
        if self._constraints is not None:
            self._constraints.warm()

    def _handle(self, message: FromFront) -> None:
        match message:
            case Submit() | Embed() if self._draining:
                self._refuse(message, "shutting_down", "the model is being unloaded and takes no new requests")
            case Submit():
                if self._engine is None:
                    self._refuse(message, "not_a_generative_model", "this model gives embeddings and generates no text")
                else:
                    self._engine.submit(message)
            case Embed():
                if self._embedder is None:
                    self._refuse(message, "not_an_embedding_model", "this model gives no embeddings: its KV cache has no room for texts")
                else:
                    self._embedder.submit(message)
            case Abort():
                if self._engine is not None:
                    self._engine.abort(message)
                if self._embedder is not None:
                    self._embedder.abort(message.request_id)
            case Drain():
                self._draining = True
            case Shutdown():
                self._stopping = True
            case Load():
                raise TypeError("a second Load, expected one per process")

    def _refuse(self, message: Submit | Embed, code: str, text: str) -> None:
        self._channel.send(Failed(message.request_id, code, text))
