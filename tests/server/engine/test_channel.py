"""Messages between front and worker: the excerpts of a request travel ahead of it, none is larger than its reader accepts, and the worker
distinguishes whether it closes the socket itself, or has lost the front."""

from __future__ import annotations

import socket
import threading

import pytest

from server.engine import channel
from server.engine.channel import LENGTH_BYTES, ChannelError, WorkerChannel, decode_from_worker, frame, frames, payload_bytes
from server.messages import Clip, Crop, Damaged, Embedding, ErrorCode, Failed, FromWorker, Load, Part, SamplingParams, Submit

PARAMS = SamplingParams(max_tokens=1)
EXCERPTS = (Crop.of(bytes(range(12)), 2, 2), *(Clip.of(bytes([number]) * 6400, 1.0, 10, 5) for number in range(3)))


def heard(front: socket.socket) -> FromWorker:
    """Return the next message of the worker."""
    num_bytes = payload_bytes(front.recv(LENGTH_BYTES, socket.MSG_WAITALL))
    return decode_from_worker(front.recv(num_bytes, socket.MSG_WAITALL))


def test_a_request_arrives_with_its_excerpts() -> None:
    """Each excerpt has a frame of its own. Excerpts whose request did not follow, because it was too large, reach no other request."""
    ours, its = socket.socketpair()
    worker = WorkerChannel(its, on_lost=lambda: None)
    submit = Submit("a", (1, 2), PARAMS, excerpts=EXCERPTS)
    sent = [*frames(submit)]
    assert len(sent) == 5 and max(map(len, sent)) < 6600
    ours.sendall(frame(Part("lost", EXCERPTS[0])))
    for framed in sent:
        ours.sendall(framed)
    ours.sendall(frame(Part("lost", EXCERPTS[0])))
    ours.sendall(frame(plain := Submit("b", (1,), PARAMS)))
    assert [worker.inbox.get(timeout=60) for _ in range(2)] == [submit, plain]
    worker.close()
    ours.close()


def test_samples_are_decoded_without_a_copy() -> None:
    payload = frame(Part("a", EXCERPTS[1]))[LENGTH_BYTES:]
    part = channel.decode_from_front(payload)
    assert isinstance(part, Part) and isinstance(part.excerpt, Clip) and part.excerpt == EXCERPTS[1]
    assert part.excerpt.samples.obj is payload


def test_a_large_message_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 6000)
    assert frame(Submit("a", (1,), PARAMS))
    with pytest.raises(ChannelError, match="expected at most 6000"):
        frame(Part("a", EXCERPTS[1]))


def test_what_messagepack_cannot_write_is_no_frame() -> None:
    for load in (Load("a", "/m\udcff"), Load("a", "b", kv_cache_bytes=1 << 64)):
        with pytest.raises(ChannelError, match="MessagePack cannot write"):
            frame(load)


def test_an_answer_that_is_too_large_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1000)
    ours, its = socket.socketpair()
    lost = threading.Event()
    worker = WorkerChannel(its, on_lost=lost.set)
    worker.send(Embedding("large", bytes(1001), 1))
    worker.send(small := Embedding("small", bytes(10), 1))
    failed = heard(ours)
    assert isinstance(failed, Failed) and (failed.request_id, failed.code) == ("large", ErrorCode.INVALID_VALUE)
    assert "bytes; expected at most 1000; ask for less in one request" in failed.message
    assert heard(ours) == small and not lost.is_set()
    worker.send(Damaged("x" * 1001))  # about no request, so there is no way to go on
    assert lost.wait(60)
    worker.close()
    ours.close()


def test_closing_the_channel_is_no_loss_of_the_front() -> None:
    """If the worker closes its channel, `on_lost` is not called, because `on_lost` ends the process at once without a clean-up."""
    ours, its = socket.socketpair()
    lost = threading.Event()
    channel = WorkerChannel(its, on_lost=lost.set)
    reader = next(thread for thread in threading.enumerate() if thread.name == "channel-read")
    channel.close()
    reader.join(60)
    assert not reader.is_alive() and not lost.is_set()
    ours.close()


def test_a_front_that_is_gone_is_a_loss() -> None:
    ours, its = socket.socketpair()
    lost = threading.Event()
    channel = WorkerChannel(its, on_lost=lost.set)
    ours.close()
    assert lost.wait(60)
    channel.close()
