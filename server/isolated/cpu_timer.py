"""A timer that sends SIGPROF after a given CPU time of this process, also during native code. By default that signal ends the process.

`signal.setitimer` counts ticks of the kernel, which on a busy machine added up to 1.6 times the CPU time of a process. This timer uses the
scheduler's own count, as `time.process_time` does.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLOCK_PROCESS_CPUTIME_ID, SIGEV_SIGNAL = 2, 0
SIGEVENT_BYTES = 64


class _Event(ctypes.Structure):
    """C's `struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * (SIGEVENT_BYTES - ctypes.sizeof(ctypes.c_void_p) - 2 * ctypes.sizeof(ctypes.c_int))),
    )


class _Spec(ctypes.Structure):
    """C's `struct itimerspec`: the period, which stays zero, and the time left."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("period_s", "period_ns", "left_s", "left_ns"))


_libc = ctypes.CDLL(None, use_errno=True)
if not hasattr(_libc, "timer_create"):
    _libc = ctypes.CDLL("librt.so.1", use_errno=True)  # this library has the timer functions before glibc 2.34


class CpuTimer:
    """A CPU timer of the process that creates it. A forked child does not inherit it."""

    def __init__(self) -> None:
        self._id = ctypes.c_void_p()
        event = _Event(signo=signal.SIGPROF, notify=SIGEV_SIGNAL)
        _checked(_libc.timer_create(CLOCK_PROCESS_CPUTIME_ID, ctypes.byref(event), ctypes.byref(self._id)))

    def start(self, seconds: float) -> None:
        """Send the signal after `seconds` of CPU time from now. This replaces an earlier start."""
        whole = int(seconds)
        self._set(_Spec(left_s=whole, left_ns=max(int((seconds - whole) * 1e9), 1)))

    def stop(self) -> None:
        """Stop the timer, so that it sends no signal."""
        self._set(_Spec())

    def _set(self, spec: _Spec) -> None:
        _checked(_libc.timer_settime(self._id, 0, ctypes.byref(spec), None))


def _checked(status: int) -> None:
    """Raise OSError if a function of C has failed."""
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
