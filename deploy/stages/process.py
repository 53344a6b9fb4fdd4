"""The process of an early stage of a model: `python -m deploy.stages.process FD`, where FD is its connection to the worker of the model. It
loads the layers that the worker names, and computes them for each step."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from compiler.frontend.decoder import PART
from deploy.computing import begin_process
from deploy.logs import configure
from deploy.machine import free_memory
from deploy.model_loading.fingerprint import fingerprint_of
from deploy.model_loading.graphs import prepare
from deploy.model_loading.known import begin
from deploy.model_loading.modes import EarlyStage
from deploy.model_loading.plan import Planned as PlannedLoad
from deploy.model_loading.stages import advance
from deploy.model_loading.weights import Bound, damage
from runtime import generated_code
from runtime.kv_pool import KVPool
from runtime.session import Session
from runtime.step_arguments import step_arguments
from server.free_memory import return_free_memory
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, LoadFailed, Progress, Working
from server.pauses import collect_in_small_portions
from server.settling import REST_S, Settling
from server.stages.link import Link, StageLost
from server.stages.messages import CopyPage, Greeting, Loaded, Planned, Reserve, Run, StageMessage, Stream

ENDS_S = 1.0  # seconds for the step that runs when the worker is gone
WORKING_S = 0.5  # seconds between two reports of CPU time

log = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[tuple[StageMessage, list[Any]] | None]  # None: the worker is gone


def main() -> None:
    """Load the layers that the worker names, and tell the worker why if that fails. Then compute them until the worker is gone."""
    begin_process()
    link = Link(socket.socket(fileno=int(sys.argv[1])), "the worker")
    is_busy = threading.Event()  # set while the stage loads, and during each step
    is_busy.set()
    threading.Thread(target=_report, args=(link, is_busy), name="report", daemon=True).start()
    try:
        link.send(Greeting(version("relaxserve"), free_memory()))
        load, _ = link.receive()
        if not isinstance(load, Load):
            raise TypeError(f"the first message is {type(load).__name__}, expected Load")
        configure(load.log_level, load.log_format)
        stage = _loaded(load, link, is_busy)
    except StageLost:
        return
    except LoadError as error:
        link.send(LoadFailed(error.code, error.message, error.required_bytes, error.free_bytes))
        return
    except Exception as error:
        log.exception("loading a stage failed")
        link.send(LoadFailed(ErrorCode.LOAD_FAILED, f"{type(error).__name__}: {error}"))
        return
    generated_code.keep()
    collect_in_small_portions()
    return_free_memory()
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, inbox), name="read", daemon=True).start()
    threading.Thread(target=stage.verify, name="verify", daemon=True).start()
    with suppress(StageLost):
        stage.serve(inbox)


def _read(link: Link, inbox: Inbox) -> None:
    """Read all messages as they come, so that the worker never waits for this process while this one waits for the worker. When the worker
    is gone, the main thread ends the process after the running step, and removes the marks of the files in use (deploy/use.py): otherwise
    the next start would verify the files. If the step takes longer than ENDS_S, end the process here."""
    try:
        while True:
            inbox.put(link.receive())
    except StageLost:
        inbox.put(None)
        time.sleep(ENDS_S)
        os._exit(0)


def _report(link: Link, is_busy: threading.Event) -> None:
    """Report this process's CPU time while it loads or computes, so that the worker knows that it goes on."""
    with suppress(StageLost):
        while True:
            is_busy.wait()
            time.sleep(WORKING_S)
            if is_busy.is_set():
                link.send(Working(time.process_time()))


def _loaded(load: Load, link: Link, is_busy: threading.Event) -> Stage:
    """Load the layers that the worker names. Report the memory plan to the worker, and wait for the number of pages that all stages get."""
    known = advance(begin(load, lambda part, fraction: link.send(Progress(part, fraction))), PlannedLoad)
    mode, plan = known.mode, known.plan
    assert isinstance(mode, EarlyStage) and mode.layers is not None, "the worker itself is the last stage"
    link.send(Planned(fingerprint_of(known), mode.max_context, tuple(group.num_pages for group in plan.groups)))
    reserve, _ = link.receive()
    if not isinstance(reserve, Reserve):
        raise TypeError(f"{type(reserve).__name__} has arrived; expected Reserve")
    bound = advance(replace(known, plan=plan.with_pages(reserve.num_pages)), Bound)
    plan, session = bound.plan, bound.session
    pool = KVPool(mode.groups, reserve.num_pages, session.memory, session.device)
    prepare(session, bound.program.executable)
    is_busy.clear()
    link.send(Loaded(plan.weights_bytes, plan.arena_bytes, plan.kv_cache_bytes, tuple(group.page_bytes for group in plan.groups)))
    return Stage(link, session, pool, is_busy, begins=mode.layers.start == 0, packed=bound.packed)


class Stage:
    """The layers of an early stage, with their pages."""

    def __init__(
        self, link: Link, session: Session, pool: KVPool, is_busy: threading.Event, *, begins: bool, packed: Sequence[Path]
    ) -> None:
        """`begins`: the stage has the first layer, so it computes from tokens. `packed`: the files in which its prepared weights are
        stored; empty if they are not stored."""
        self._link = link
        self._session = session
        self._pool = pool
        self._begins = begins
        self._packed = packed
        self._is_busy = is_busy
        self._settling = Settling(session.device.settle)

    def serve(self, inbox: Inbox) -> None:
        """Compute what the worker asks for, in the order in which it asks, until it is gone. A run of later layers waits for its residual
        stream."""
        waiting: list[Any] = []  # arrays of a run whose stream has not arrived
        while True:
            try:
                received = inbox.get(timeout=REST_S if self._settling.is_due else None)
            except queue.Empty:
                self._settling.rest()
                continue
            if received is None:
                return
            message, arrays = received
            match message:
                case CopyPage():
                    self._pool.copy_page(message.group, message.source, message.target)
                case Run() if self._begins:
                    self._run(arrays, arrays[0])
                case Run():
                    waiting.append(arrays)
                case Stream():
                    self._run(waiting.pop(0), arrays[0])
                case _:
                    raise TypeError(f"{type(message).__name__} has arrived while serving")

    def verify(self) -> None:
        """Verify the packed weights. If they are damaged, end as if killed from outside, because no request is to blame. The process that
        replaces this one packs the weights anew."""
        if fault := damage(self._packed):
            log.error("%s; this stage used the damaged files and is replaced", fault)
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)

    def _run(self, arrays: list[Any], first: Any) -> None:
        """Compute the layers of one step, and send the residual stream after them. `first`: the tokens, or the residual stream before the
        layers."""
        self._is_busy.set()
        _, positions, starts, seq_ids, *places = arrays
        slots, tables = places[: len(places) // 2], places[len(places) // 2 :]
        arguments = step_arguments(self._pool.groups, first, positions, starts, seq_ids, slots, tables)
        stream = self._session.call(PART, *arguments, *self._pool.arguments, views=True)
        self._is_busy.clear()
        self._link.send(Stream(), [np.asarray(self._session.download(stream))])
        self._settling.note_step()


if __name__ == "__main__":
    main()
