"""A thread that makes one call at a time for its owner. The owner passes calls, and the thread passes results, through queues written in C.
Passing a call in this way takes a third of the time that an executor takes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

Calls = SimpleQueue[Callable[[], T] | None]
Results = SimpleQueue[T | BaseException]


class Helper(Generic[T]):
    """Makes the calls of its owner on a thread. The thread ends with `close`, or when the Helper is freed."""

    def __init__(self, name: str) -> None:
        self._calls: Calls[T] = SimpleQueue()  # None ends the thread
        self._results: Results[T] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls, self._results), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)

    def begin(self, call: Callable[[], T]) -> None:
        """Begin a call. The owner must call `result` before it begins the next call."""
        self._calls.put(call)

    def result(self) -> T:
        """Wait until the call has ended. Return its result, or raise its error."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End the thread after the calls that have begun."""
        self._end()
        self._thread.join()


def _serve(calls: Calls[T], results: Results[T]) -> None:
    """Make the calls one after the other, until a call is None."""
    while (call := calls.get()) is not None:
        try:
            result: T | BaseException = call()
        except BaseException as error:
            result = error
        # A call and its result may refer to the owner of the Helper. If this thread kept them while it waits for the next call, the owner
        # and its Helper would never be freed, so the thread would never end.
        del call
        results.put(result)
        del result
