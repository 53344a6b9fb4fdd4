"""The worker's end of the socket distinguishes two cases: the worker closes the socket, or the connection to the front is lost."""

from __future__ import annotations

import socket
import threading

from server.engine.channel import WorkerChannel


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
