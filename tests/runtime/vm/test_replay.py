"""A call of a function with one kernel, whose arguments have the layouts of an earlier call, is short. It checks and returns what any other
call checks and returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from runtime.errors import RuntimeFault
from runtime.session import Session

PROGRAM = """
func main(x: f32[n, 4], y: f32[n, 4], weight w: f32[4]) -> f32[n, 4] where n in 0..64 {
  dataflow { a = add(x, y) b = multiply(a, w) } return b
}
func wide(x: f32[m, 4]) -> f32[m, 4] where m in 0..100000 { dataflow { y = exp(x) z = softmax(y) v = softmax(z) } return v }
"""
ONES = np.ones(4, np.float32)


@pytest.fixture(scope="module", params=[1, 2])
def session(request: pytest.FixtureRequest) -> Session:
    session = Session(compile_module(parse(PROGRAM)), device_threads=request.param)
    session.bind("main", {"w": ONES})
    return session


def numbers(n: int = 3) -> np.ndarray:
    return np.arange(4 * n, dtype=np.float32).reshape(n, 4)


def warm(session: Session) -> None:
    """Call `main` until the session repeats calls with three rows."""
    for _ in range(3):
        session.call("main", numbers(), numbers())
    assert session._machine.functions["main"]._replay is not None


def test_a_repeated_call_runs_few_functions(session: Session) -> None:
    """In Python, a repeated call runs `Session.call`, `Machine.function`, `Function.call`, `Replay.call`, `Arena.again`, and one function
    each of the region and the team."""
    called: list[str] = []
    x = numbers()
    warm(session)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        session.call("main", x, x)
    finally:
        sys.setprofile(None)
    assert called == ["call", "function", "call", "call", "again", "again", "run"]


def test_repeated_calls_return_arrays_of_their_own(session: Session) -> None:
    warm(session)
    first, second = (session.call("main", numbers(), np.full((3, 4), k, np.float32)) for k in (1, 2))
    np.testing.assert_array_equal(first, numbers() + 1)
    np.testing.assert_array_equal(second, numbers() + 2)
    view = session.call("main", numbers(), numbers(), views=True)
    kept = session.call("main", numbers(), ONES * np.ones((3, 1), np.float32), views=True, keep_last=True)
    np.testing.assert_array_equal(view, 2 * numbers())
    np.testing.assert_array_equal(kept, numbers() + 1)


def test_other_layouts_weights_and_arenas_between_repeated_calls(session: Session) -> None:
    warm(session)
    for n in (3, 5, 5, 5, 0, 0, 0, 3):
        np.testing.assert_array_equal(session.call("main", numbers(n), numbers(n)), 2 * numbers(n))
    warm(session)
    session.bind("main", {"w": 3 * ONES})
    np.testing.assert_array_equal(session.call("main", numbers(), numbers()), 6 * numbers())
    warm(session)
    session.call("wide", np.zeros((100_000, 4), np.float32))  # the arena grows
    np.testing.assert_array_equal(session.call("main", numbers(), numbers()), 6 * numbers())
    session.bind("main", {"w": ONES})


def test_arrays_need_not_be_writable(session: Session) -> None:
    warm(session)
    x = numbers()
    x.flags.writeable = False
    np.testing.assert_array_equal(session.call("main", x, x), 2 * numbers())


def unaligned() -> np.ndarray:
    raw = np.zeros(49, np.uint8)
    return np.ndarray((3, 4), np.float32, raw, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers().astype(np.float64),
        lambda: numbers().astype(">f4"),
        lambda: numbers(4),
        lambda: numbers().reshape(4, 3),
        lambda: numbers().reshape(3, 2, 2),
        lambda: np.zeros((4, 3), np.float32).T,
        lambda: np.zeros((3, 8), np.float32)[:, ::2],
        unaligned,
        lambda: 1.0,
        lambda: None,
        lambda: (3, 4),
    ],
    ids=["f64", "swapped", "rows", "columns", "rank", "transposed", "strided", "unaligned", "float", "none", "shape"],
)
@pytest.mark.parametrize("position", [0, 1])
def test_repeated_calls_check_what_first_calls_check(session: Session, make: Callable[[], Any], position: int) -> None:
    def message() -> str:
        args: list[Any] = [numbers(), numbers()]
        args[position] = make()
        with pytest.raises(RuntimeFault) as caught:
            session.call("main", *args)
        return str(caught.value)

    session.bind("main", {"w": ONES})  # forget earlier calls
    first = message()
    warm(session)
    assert message() == first
    np.testing.assert_array_equal(session.call("main", numbers(), numbers()), 2 * numbers())


def test_the_number_of_arguments_is_checked(session: Session) -> None:
    warm(session)
    for args in ((), (numbers(),), (numbers(),) * 3):
        with pytest.raises(RuntimeFault, match="expected 2 arguments"):
            session.call("main", *args)


def test_subclasses_of_arrays_take_the_long_way(session: Session) -> None:
    class Named(np.ndarray):
        pass

    warm(session)
    np.testing.assert_array_equal(session.call("main", numbers().view(Named), numbers()), 2 * numbers())


def test_a_profile_sees_repeated_calls(session: Session) -> None:
    warm(session)
    with session.profile() as profile:
        session.call("main", numbers(), numbers())
    assert profile.seconds
