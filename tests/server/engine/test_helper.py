"""The engine's helper thread."""

from __future__ import annotations

import gc
import threading

import pytest

from server.engine.helper import Helper


def test_calls_run_beside_the_owner_one_after_the_other() -> None:
    helper, go = Helper[int]("helper"), threading.Event()
    helper.begin(lambda: (go.wait(), threading.get_ident())[1])
    go.set()  # the call waits for its owner, which continues
    first = helper.result()
    helper.begin(threading.get_ident)
    assert helper.result() == first != threading.get_ident()
    helper.close()


def test_the_owner_raises_the_error_of_a_call_and_may_go_on() -> None:
    helper = Helper[float]("helper")
    helper.begin(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        helper.result()
    helper.begin(lambda: 2.0)
    assert helper.result() == 2.0
    helper.close()
    helper.close()


def test_the_thread_ends_with_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.helper = Helper[int]("helper")

        def work(self) -> int:
            return 3

    owner = Owner()
    thread = owner.helper._thread
    owner.helper.begin(owner.work)
    assert owner.helper.result() == 3
    del owner
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
