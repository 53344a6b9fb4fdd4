"""A model settles after steps: when its process is idle, and also when it never is."""

from __future__ import annotations

import threading

import pytest

from server.settling import STEADY_S, Settling


class Model:
    def __init__(self) -> None:
        self.num_settled = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def settle(self) -> None:
        self.num_settled += 1
        assert self.may_end.wait(60)


@pytest.fixture
def model() -> Model:
    return Model()


def ended(settling: Settling) -> None:
    if settling._thread is not None:
        settling._thread.join(60)


def test_an_idle_process_settles_once_after_its_steps(model: Model) -> None:
    settling = Settling(model.settle, lambda: 0.0)
    settling.rest()
    assert not settling.is_due and model.num_settled == 0, "there was no step"
    for expected in (1, 2):
        settling.note_step()
        assert settling.is_due
        for _ in range(2):
            settling.rest()
            ended(settling)
        assert not settling.is_due and model.num_settled == expected


def test_a_process_that_is_never_idle_settles_now_and_then(model: Model) -> None:
    now_s = 0.0
    settling = Settling(model.settle, lambda: now_s)
    while now_s < 10 * STEADY_S:
        settling.note_step()
        ended(settling)
        now_s += STEADY_S / 8
    assert 8 <= model.num_settled <= 10


def test_a_model_does_not_settle_twice_at_once(model: Model) -> None:
    settling = Settling(model.settle, lambda: 0.0)
    model.may_end.clear()
    for _ in range(2):
        settling.note_step()
        settling.rest()
    model.may_end.set()
    ended(settling)
    assert model.num_settled == 1


def test_a_model_settles_later_if_no_thread_is_left(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker serves its requests, as before it settles."""
    settling = Settling(model.settle, lambda: 0.0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    settling.note_step()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        settling.rest()
    ended(settling)
    assert not settling.is_due and model.num_settled == 0
    settling.note_step()
    settling.rest()
    ended(settling)
    assert model.num_settled == 1
