"""Whatever signal ends a process, whoever watches the process says so and goes on."""

from __future__ import annotations

import signal
import socket

import pytest

from server.constraints.matcher import ConstraintLost
from server.constraints.process.process_socket import ProcessSocket
from server.constraints.process.wire import Answer, write_answer
from server.signal_names import describe_status

NAMELESS = signal.SIGRTMIN + 1


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (NAMELESS, f"signal {NAMELESS}")])
def test_a_worker_and_a_constraint_may_end_by_any_signal(number: int, name: str) -> None:
    assert describe_status(-number) == f"killed by {name}"
    near, far = socket.socketpair()
    with far:
        write_answer(far, Answer.ENDED, number=number)
        process = ProcessSocket(near)
        assert process.receive(60.0) and process.answer is Answer.ENDED
    error = process.error(None)
    assert isinstance(error, ConstraintLost) and str(error) == f"the process of the constraint was ended by {name}; try again"
