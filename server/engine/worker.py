"""The worker process: load one model, then serve its requests until the front (the process that serves HTTP) stops it."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from runtime.device.base import CardUsage
from server.constraints.compiler import ConstraintCompiler
from server.engine.channel import WorkerChannel
from server.engine.embed import Embedder
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.page_exchange import PageExchange
from server.engine.scheduling.pace import Pace
from server.engine.step_model import EmbedModel, StepModel
from server.interfaces import LoadError
from server.messages import (
    Abort,
    Card,
    Damaged,
    Drain,
    Embed,
    ErrorCode,
    Failed,
    FromFront,
    FromWorker,
    GivePages,
    Load,
    LoadFailed,
    MorePages,
    PagesGiven,
    Peering,
    Progress,
    Ready,
    Shutdown,
    Submit,
    Working,
)
from server.settling import REST_S, Settling
from server.stages.link import StageLost
from server.stages.relay import Relay

log = logging.getLogger(__name__)

ProgressFn = Callable[[str, float], None]
RECEIVE_S = 0.005  # longest time for handling messages between two steps, so that a burst of new requests does not delay running ones
CARD_S = 2.0  # seconds between two reports about the GPU
STALL_S = 0.002  # seconds between polls while no sequence can run: all wait for a constraint or for pages, or the front does not read


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model that a builder returns: a decoder (it generates, embeds or both) or an encoder."""

    ready: Ready
    step_model: StepModel | None = None
    embed_model: EmbedModel | None = None
    eos_ids: tuple[int, ...] = ()
    # returns the content of tokenizer.json, once a constraint needs it; None: there is no tokenizer, so constraints on whole answers are
    # refused, and those on tool calls are ignored
    read_tokenizer: Callable[[], bytes] | None = None
    overlap: bool = True  # host work overlaps with the device's work: see `OverlappedEngine`
    # limits prefill by the measured costs of steps and the longest allowed gap between tokens; None: costs are measured while serving
    pace: Pace | None = None
    card_usage: Callable[[], CardUsage | None] | None = None  # returns the present usage of the model's GPU
    relay: Relay | None = None  # the stages of the model before this process; None: it computes all layers
    # does work that makes later requests faster, but would delay the first one; `Settling` calls it on another thread; None: no such work
    settle: Callable[[], None] | None = None
    damage: Callable[[], str] | None = None  # blocks while it verifies the files that the model uses; returns a message about damage, or ""


Build = Callable[[Load, ProgressFn], LoadedModel]


def serve_worker(socket_fd: int, build: Build) -> None:
    """Load a model, and serve the front through an inherited socket until the front stops or drains this worker. If the load fails, tell
    the front and return. If the front is gone, or serving fails, end the process at once. Raise TypeError if the first message is no
    Load."""
    connection = socket.socket(fileno=socket_fd)
    connection.set_inheritable(False)  # if a child inherited it, the front would not notice the end of this process
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
    except StageLost as error:
        channel.send(LoadFailed(ErrorCode.LOAD_FAILED, f"{error}, while the last stage was loading; see the log of that stage"))
        channel.close()
        return
    except Exception as error:
        log.exception("loading %s failed", load.name)
        channel.send(LoadFailed(ErrorCode.LOAD_FAILED, f"{type(error).__name__}: {error}"))
        channel.close()
        return
    if model.relay is not None:
        model.relay.on_working = lambda cpu_s: channel.send(Working(cpu_s))
        model.relay.watch(lambda error: _end_without(load.name, error))
    channel.send(model.ready)
    if model.damage is not None:
        threading.Thread(target=_verify, args=(model.damage, channel), name="verify", daemon=True).start()
    try:
        Worker(model, channel, logs_cache=load.logs_cache, peering=load.peers).run()
    except StageLost as error:
        _end_without(load.name, error)
    except BaseException:
        log.critical("the worker of %s ends after an error", load.name, exc_info=True)
        logging.shutdown()
        os._exit(1)  # threads of the device or of a constraint may hang, so do not wait for them
    if model.relay is not None:
        model.relay.close()
    channel.close()


def _end_without(name: str, lost: StageLost) -> None:
    """End this process because a stage is lost. If no request can be the cause, end by SIGKILL, which the front counts only a little
    against the running requests (`ledger.KILLED`). Otherwise end with an error, which the front counts against these requests like a
    crash."""
    log.critical("the worker of %s ends, because it cannot go on without a stage: %s", name, lost)
    logging.shutdown()
    if lost.from_outside:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _verify(damage: Callable[[], str], channel: WorkerChannel) -> None:
    """Verify the model's files. If they are damaged, report that to the front. This runs on a thread of its own."""
    if fault := damage():
        channel.send(Damaged(fault))


class Worker:
    """Runs the engine of a loaded model, and handles the messages of the front between its steps."""

    def __init__(
        self,
        model: LoadedModel,
        channel: WorkerChannel,
        clock: Callable[[], float] = time.monotonic,
        *,
        logs_cache: bool = False,
        peering: Peering | None = None,
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._constraints = _constraints_of(model)
        self._settling = None if model.settle is None else Settling(model.settle, clock)
        self._engine = engine_of(model, channel.send, self._constraints, logs_cache=logs_cache, peering=peering)
        self._card_usage = None if model.ready.card is None else model.card_usage
        self._next_report_s = clock() + CARD_S
        self._draining = False
        self._stopping = False
        self._is_cold = True  # there has been no moment without work yet

    def run(self) -> None:
        """Serve until the front stops this worker, or until its last request has ended after the front has asked it to drain."""
        while not self._stopping:
            self._receive()
            self._report_card()
            if not self._engine.has_work:
                if self._draining:
                    break
                continue  # `_receive` waits for the next message
            self._engine.pause(not self._channel.has_room)
            if self._engine.step():
                if self._settling is not None:
                    self._settling.note_step()
            elif self._engine.has_work:
                time.sleep(STALL_S)
        self._engine.close()

    def _receive(self) -> None:
        """Handle messages for at most RECEIVE_S. If the engine has no work and the worker is not draining, first wait for a message: REST_S
        if `_rest` has something to do, otherwise CARD_S if the worker reports the usage of a GPU, otherwise without limit. If no message
        comes within this time, call `_rest` and return."""
        if not self._engine.has_work and not self._draining:
            will_rest = self._is_cold or (self._settling is not None and self._settling.is_due)
            timeout_s = REST_S if will_rest else None if self._card_usage is None else CARD_S
            try:
                self._handle(self._channel.inbox.get(timeout=timeout_s))
            except queue.Empty:
                self._rest()
                return
        end_s = self._clock() + RECEIVE_S
        with suppress(queue.Empty):
            while self._clock() < end_s:
                self._handle(self._channel.inbox.get_nowait())

    def _report_card(self) -> None:
        """Send the usage of the GPU if the last report was CARD_S seconds ago. Do nothing if the model runs on no GPU, or the usage is not
        known."""
        if self._card_usage is not None and self._clock() >= self._next_report_s:
            self._next_report_s = self._clock() + CARD_S
            if (usage := self._card_usage()) is not None:
                self._channel.send(Card(usage))

    def _rest(self) -> None:
        """Use a moment without work: settle the model if steps have run (`server/settling.py`), and at the first such moment start the
        zygote, from which the processes of constraints are forked. The zygote does not start with the worker, because right after a
        restart, resubmitted requests come first."""
        if self._settling is not None:
            self._settling.rest()
        if self._is_cold and self._constraints is not None:
            self._constraints.warm()
        self._is_cold = False

    def _handle(self, message: FromFront) -> None:
        """Do what a message of the front asks for. Refuse new requests while the worker drains. Raise TypeError for a second Load."""
        match message:
            case Submit() | Embed() if self._draining:
                text = "the model is being unloaded and accepts no new requests"
                self._channel.send(Failed(message.request_id, ErrorCode.SHUTTING_DOWN, text))
            case Submit():
                self._engine.submit(message)
            case Embed():
                self._engine.embed(message)
            case Abort():
                self._engine.abort(message)
            case GivePages() | MorePages():
                self._give(message)
            case Drain():
                self._draining = True
            case Shutdown():
                self._stopping = True
            case Load():
                raise TypeError("a second Load has arrived; expected one per process")

    def _give(self, message: GivePages | MorePages) -> None:
        """Begin to give pages to another server, or allow one more message with pages. If the engine exchanges no pages, tell the front
        that there are none."""
        exchange = None if isinstance(self._engine, Embedder) else self._engine.exchange
        if exchange is None:
            self._channel.send(PagesGiven(message.request_id))
        elif isinstance(message, GivePages):
            exchange.give(message)
        else:
            exchange.more(message.request_id)


def _constraints_of(model: LoadedModel) -> ConstraintCompiler | None:
    """Return the compiler of the requests' constraints, or None if the model generates no text or has no tokenizer."""
    if model.read_tokenizer is None or model.step_model is None or not model.step_model.limits.generates:
        return None
    return ConstraintCompiler(model.read_tokenizer, eos_ids=model.eos_ids, vocab_size=model.step_model.limits.vocab_size)


def engine_of(
    model: LoadedModel,
    publish: Callable[[FromWorker], None],
    constraints: ConstraintCompiler | None,
    *,
    logs_cache: bool = False,
    peering: Peering | None = None,
) -> Engine | Embedder:
    """Return the engine for a model: an Embedder for an encoder, otherwise an Engine. `publish` sends a message to the front. With
    `logs_cache`, the engine also publishes the changes of its prefix cache. `peering` says how pages are exchanged with other servers;
    None: no pages are exchanged. A model that is divided, into stages or over GPUs, never exchanges pages: the `page_bytes` of its groups
    are 0."""
    if model.step_model is None:
        assert model.embed_model is not None, "a model that does nothing"
        return Embedder(model.embed_model, publish)
    exchange = None
    if peering is not None and all(group.page_bytes for group in model.step_model.limits.groups):
        exchange = partial(PageExchange, peering=peering, fingerprint=model.ready.fingerprint)
    elif peering is not None:
        log.info("this model is divided, and so exchanges no pages with other servers (peer_secret_file)")
    engine_class = OverlappedEngine if model.overlap else Engine
    return engine_class(
        model.step_model,
        publish,
        eos_ids=model.eos_ids,
        constraints=constraints,
        pace=model.pace,
        relay=model.relay,
        logs_cache=logs_cache,
        exchange=exchange,
    )
