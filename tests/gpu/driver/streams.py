"""Driver functions for streams and events. With seed 0, a stream's work runs only when a call waits for this work or asks whether it is
done, so a host that reads a result too early finds the old contents. With other seeds, work may also run when it is submitted.

Each piece of work has a list of predecessors, which must run before it. A call that waits for a piece of work runs this piece and its
predecessors, and nothing else.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.gpu.driver.calls import DriverError, Result, function, put
from tests.gpu.driver.card import Context, current, machine, note_fault
from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.memory import AddressFault

NON_BLOCKING = 1
DISABLE_TIMING = 2
GLOBAL, OF_THREAD = 0, 1  # modes of a capture: which threads must not make calls that wait for the card, all or its own


@dataclass(slots=True, eq=False)
class Work:
    context: Context
    run: Callable[[Work], None] | None
    after: list[Work]
    done: bool = False
    overlaps: bool = False  # whether it is a kernel that may begin before the kernel before it has ended
    number: int = 0  # the number of its launch, if it is a kernel that has run
    since: int | None = None  # the number of the earliest launch that may still run when it begins


@dataclass(slots=True, eq=False)
class Capture:
    """The work of a stream that is being captured. This work is recorded in order and does not run."""

    origin: Stream
    before: dict[int, list[Work]]  # by id of each stream in the capture: its tail before, which is restored after the capture
    mode: int
    thread: int  # the thread that began it
    recorded: list[Work] = field(default_factory=list)
    invalid: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    context: Context
    blocking: bool = True  # whether the stream and the default stream wait for each other
    priority: int = 0
    tail: list[Work] = field(default_factory=list)  # the last work of the stream, for which the next submission waits
    capture: Capture | None = None


@dataclass(slots=True, eq=False)
class Event:
    context: Context
    timed: bool
    recorded: list[Work] | None = None
    capture: Capture | None = None


@dataclass(slots=True, eq=False)
class _Default:
    """Maps the id of each context to the context's default stream."""

    streams: dict[int, Stream] = field(default_factory=dict)


_default = _Default()
_all: list[Stream] = []


def default_stream(context: Context) -> Stream:
    if id(context) not in _default.streams:
        _default.streams[id(context)] = Stream(context)
        _all.append(_default.streams[id(context)])
    return _default.streams[id(context)]


def stream_of(handle: int | None) -> Stream:
    context = current()
    if not handle or handle in (1, 2):
        return default_stream(context)
    return machine.find(handle, Stream)


def submit(stream: Stream, run: Callable[[Work], None] | None, *, overlaps: bool = False) -> Work:
    """Add work to the end of a stream. If the stream is being captured, record the work instead."""
    default = default_stream(stream.context)
    if stream.capture is not None:
        if stream.capture.invalid:
            raise DriverError(Result.STREAM_CAPTURE_INVALIDATED)
        work = Work(stream.context, run, stream.tail, overlaps=overlaps)
        stream.capture.recorded.append(work)
        stream.tail = [work]
        return work
    after = list(stream.tail)
    if stream is default:
        others = [s for s in _all if s.context is stream.context and s.blocking and s is not default]
        _invalidate([s.capture for s in others if s.capture is not None], Result.STREAM_CAPTURE_IMPLICIT)
        after += [work for s in others for work in s.tail]
    elif stream.blocking:
        after += default.tail
    work = Work(stream.context, run, [w for w in after if not w.done], overlaps=overlaps)
    stream.tail = [work]
    if machine.random is not None and machine.random.random() < 0.5:  # on a real card the work may already be done when the call returns
        finish(work)
    return work


def finish(work: Work) -> None:
    """Run all work that must be done before this piece of work, and then the piece."""
    pending = [work]
    while pending:
        last = pending[-1]
        if last.done:
            pending.pop()
            continue
        first = [w for w in last.after if not w.done]
        if first:
            if machine.random is not None:
                machine.random.shuffle(first)  # pyright: ignore[reportArgumentType]
            pending += first
            continue
        before, last.done, last.after = last.after, True, []
        pending.pop()
        if last.run is not None and not last.context.fault:
            _do(last, last.run, before)


def _do(work: Work, run: Callable[[Work], None], before: list[Work]) -> None:
    try:
        work.since = _since(before) if work.overlaps else None
        run(work)
    except AddressFault as fault:
        note_fault(work.context, Result.ILLEGAL_ADDRESS, str(fault))
    except Fault as fault:
        cause = fault.__cause__
        while isinstance(cause, Fault) and not isinstance(cause, AddressFault) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, AddressFault):
            result = Result.MISALIGNED_ADDRESS if "multiple of" in str(cause) else Result.ILLEGAL_ADDRESS
        else:
            result = Result.LAUNCH_TIMEOUT if "hang" in str(fault) else Result.LAUNCH_FAILED
        note_fault(work.context, result, str(fault))


def _since(before: list[Work]) -> int:
    """Return the number of the earliest launch that may still run when a kernel that overlaps begins. `before` is the work that the kernel
    follows. If this is anything but one kernel, a real card need not overlap them. Here it is a fault, so that no launch overlaps such
    work."""
    if len(before) != 1 or not before[0].number:
        raise Fault("a launch overlaps, and what is before it is not one kernel")
    return before[0].since or before[0].number


def finish_stream(stream: Stream) -> None:
    if stream.capture is not None:
        stream.capture.invalid = True
        raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED)
    if stream is default_stream(stream.context):
        submit(stream, None)
    for work in stream.tail:
        finish(work)
    stream.tail = []
    _report(stream.context)


def _invalidate(captures: list[Capture], result: Result) -> None:
    """Make captures invalid, if there are any, and raise the error of the call that did so."""
    for capture in captures:
        capture.invalid = True
    if captures:
        raise DriverError(result)


def refuse_in_capture() -> None:
    """Refuse a call that may wait for the card, such as one that allocates memory, while a capture forbids such calls to this thread."""
    captures = [s.capture for s in _all if s.capture is not None]
    mine = threading.get_ident()
    refused = [c for c in captures if c.mode == GLOBAL or (c.mode == OF_THREAD and c.thread == mine)]
    _invalidate(refused, Result.STREAM_CAPTURE_UNSUPPORTED)


def finish_all(context: Context) -> None:
    """Run all work in all streams of a context, as a call that synchronises the whole device does."""
    streams = [s for s in _all if s.context is context]
    _invalidate([s.capture for s in streams if s.capture is not None], Result.STREAM_CAPTURE_UNSUPPORTED)
    for stream in streams:
        for work in stream.tail:
            finish(work)
        stream.tail = []
    _report(context)


def drop_work() -> None:
    """Drop the work that was submitted to contexts in which a kernel has failed. It never runs."""
    for stream in _all:
        if stream.context.fault:
            stream.tail = []


def _report(context: Context) -> None:
    if context.fault:
        raise DriverError(context.fault)


# --- driver functions ----------------------------------------------------------------------------------------------------


@function("cuCtxSynchronize", "")
def context_synchronize() -> None:
    finish_all(current())


@function("cuStreamCreate", "pu")
def stream_create(out: int, flags: int) -> None:
    stream_create_with_priority(out, flags, 0)


@function("cuStreamCreateWithPriority", "pui")
def stream_create_with_priority(out: int, flags: int, priority: int) -> None:
    stream = Stream(current(), blocking=not flags & NON_BLOCKING, priority=priority)
    _all.append(stream)
    put(out, ctypes.c_void_p, machine.handle(stream))


@function("cuStreamDestroy_v2", "p")
def stream_destroy(handle: int) -> None:
    stream = machine.find(handle, Stream)
    for work in stream.tail:
        finish(work)
    _all.remove(stream)
    del machine.objects[handle]


@function("cuStreamSynchronize", "p")
def stream_synchronize(handle: int | None) -> None:
    finish_stream(stream_of(handle))


@function("cuStreamQuery", "p")
def stream_query(handle: int | None) -> Result:
    """Return whether the stream has no work left. If the stream has work, run one piece of it, so that a host that polls makes progress."""
    stream = stream_of(handle)
    if stream.capture is not None:
        raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED)
    return _query(stream.context, stream.tail)


def _query(context: Context, tail: list[Work]) -> Result:
    undone = [work for work in tail if not work.done]
    if not undone:
        return Result.SUCCESS
    work = undone[0]
    while first := [w for w in work.after if not w.done]:
        work = first[0]
    finish(work)
    _report(context)
    return Result.NOT_READY


@function("cuStreamGetPriority", "pp")
def stream_priority(handle: int | None, out: int) -> None:
    put(out, ctypes.c_int, stream_of(handle).priority)


@function("cuStreamWaitEvent", "ppu")
def stream_wait_event(handle: int | None, event_handle: int, flags: int) -> None:
    stream, event = stream_of(handle), machine.find(event_handle, Event)
    if event.recorded is None:
        return
    if event.capture is not None:
        if stream.capture not in (None, event.capture):
            raise DriverError(Result.STREAM_CAPTURE_UNMATCHED)
        if stream.capture is None:
            event.capture.before[id(stream)] = stream.tail
            stream.capture, stream.tail = event.capture, []
    stream.tail = [*stream.tail, *(w for w in event.recorded if w not in stream.tail)]


@function("cuLaunchHostFunc", "ppp")
def launch_host_function(handle: int | None, function_: int, data: int | None) -> None:
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function_)
    submit(stream_of(handle), lambda _: call(data))


@function("cuEventCreate", "pu")
def event_create(out: int, flags: int) -> None:
    put(out, ctypes.c_void_p, machine.handle(Event(current(), timed=not flags & DISABLE_TIMING)))


@function("cuEventRecord", "pp")
def event_record(handle: int, stream_handle: int | None) -> None:
    event, stream = machine.find(handle, Event), stream_of(stream_handle)
    if event.context is not stream.context:
        raise DriverError(Result.INVALID_HANDLE)
    event.recorded, event.capture = [submit(stream, None)], stream.capture


@function("cuEventQuery", "p")
def event_query(handle: int) -> Result:
    event = machine.find(handle, Event)
    if event.capture is not None:
        raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED)
    return _query(current(), event.recorded or [])


@function("cuEventSynchronize", "p")
def event_synchronize(handle: int) -> None:
    event = machine.find(handle, Event)
    if event.capture is not None:
        raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED)
    current()
    for work in event.recorded or []:
        finish(work)
    _report(event.context)


@function("cuEventDestroy_v2", "p")
def event_destroy(handle: int) -> None:
    machine.find(handle, Event)
    del machine.objects[handle]


@function("cuEventElapsedTime_v2", "ppp")
@function("cuEventElapsedTime", "ppp")
def event_elapsed(out: int, start: int, end: int) -> Result:
    """Store one millisecond as the time between any two events, because the software card has no clock."""
    first, last = machine.find(start, Event), machine.find(end, Event)
    if not (first.timed and last.timed) or first.recorded is None or last.recorded is None:
        return Result.INVALID_HANDLE
    if not all(w.done for w in (*first.recorded, *last.recorded)):
        return Result.NOT_READY
    put(out, ctypes.c_float, 1.0)
    return Result.SUCCESS
