"""Driver functions for graphs. A graph stores work that was captured from a stream, and each launch of the graph runs this work."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from tests.gpu.driver.calls import DriverError, Result, function, put
from tests.gpu.driver.card import current, machine
from tests.gpu.driver.streams import Capture, Stream, Work, default_stream, stream_of, submit

NODE_BYTES = 8 << 10  # bytes of the card's memory that each node of an executable graph occupies


@dataclass(slots=True, eq=False)
class Graph:
    nodes: list[Work]


@dataclass(slots=True, eq=False)
class Executable:
    nodes: list[Work]


@function("cuStreamBeginCapture_v2", "pi")
def begin_capture(handle: int | None, mode: int) -> Result:
    stream = stream_of(handle)
    if stream is default_stream(stream.context):
        return Result.STREAM_CAPTURE_UNSUPPORTED
    if stream.capture is not None:
        return Result.ILLEGAL_STATE
    stream.capture, stream.tail = Capture(stream, {id(stream): stream.tail}, mode, threading.get_ident()), []
    return Result.SUCCESS


@function("cuStreamEndCapture", "pp")
def end_capture(handle: int | None, out: int) -> Result:
    stream = stream_of(handle)
    capture = stream.capture
    if capture is None:
        return Result.ILLEGAL_STATE
    if capture.origin is not stream:
        return Result.STREAM_CAPTURE_UNMATCHED
    joined = _reached(stream.tail)
    others = [s for s in machine.objects.values() if isinstance(s, Stream) and s.capture is capture and s is not stream]
    unjoined = any(work not in joined for s in others for work in s.tail)
    for each in (stream, *others):
        each.capture, each.tail = None, capture.before[id(each)]
    if capture.invalid:
        put(out, ctypes.c_void_p, None)
        return Result.STREAM_CAPTURE_INVALIDATED
    if unjoined:
        put(out, ctypes.c_void_p, None)
        return Result.STREAM_CAPTURE_UNJOINED
    put(out, ctypes.c_void_p, machine.handle(Graph(capture.recorded)))
    return Result.SUCCESS


def _reached(tail: list[Work]) -> set[Work]:
    """Return the given pieces of work, and all work that must run before them."""
    found: set[Work] = set()
    left = list(tail)
    while left:
        work = left.pop()
        if work not in found:
            found.add(work)
            left += work.after
    return found


@function("cuStreamIsCapturing", "pp")
def is_capturing(handle: int | None, out: int) -> None:
    capture = stream_of(handle).capture
    put(out, ctypes.c_int, 0 if capture is None else 2 if capture.invalid else 1)


@function("cuGraphInstantiateWithFlags", "ppq")
def instantiate(out: int, handle: int, flags: int) -> None:
    nodes, card = list(machine.find(handle, Graph).nodes), current().card
    num_bytes = NODE_BYTES * sum(node.run is not None for node in nodes)
    if machine.used(card) + num_bytes > machine.card_bytes:
        raise DriverError(Result.OUT_OF_MEMORY)
    made = machine.handle(Executable(nodes))
    machine.owners[-made] = card, num_bytes
    machine.tell(card)
    put(out, ctypes.c_void_p, made)


@function("cuGraphUpload", "pp")
def upload(handle: int, stream: int | None) -> None:
    machine.find(handle, Executable)
    stream_of(stream)


@function("cuGraphLaunch", "pp")
def launch_graph(handle: int, stream_handle: int | None) -> None:
    executable, stream = machine.find(handle, Executable), stream_of(stream_handle)
    if stream.capture is not None:
        raise DriverError(Result.NOT_SUPPORTED)
    start = submit(stream, None)
    copies: dict[Work, Work] = {}
    for node in executable.nodes:
        after = [copies[w] for w in node.after if w in copies] or [start]
        copies[node] = Work(node.context, node.run, after, overlaps=node.overlaps)
    stream.tail = list(copies.values()) or [start]
    submit(stream, None)


@function("cuGraphGetNodes", "ppp")
def graph_nodes(handle: int, nodes: int | None, count: int) -> None:
    graph = machine.find(handle, Graph)
    kept = [node for node in graph.nodes if node.run is not None]
    if nodes:
        room = ctypes.c_size_t.from_address(count).value
        for number, node in enumerate(kept[:room]):
            put(nodes + 8 * number, ctypes.c_void_p, machine.handle(node))
    put(count, ctypes.c_size_t, len(kept))


@function("cuGraphDestroy", "p")
def graph_destroy(handle: int) -> None:
    machine.find(handle, Graph)
    del machine.objects[handle]


@function("cuGraphExecDestroy", "p")
def executable_destroy(handle: int) -> None:
    machine.find(handle, Executable)
    card, _ = machine.owners.pop(-handle)
    machine.tell(card)
    del machine.objects[handle]
