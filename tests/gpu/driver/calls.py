"""The functions of the software driver: their C names, their arguments, and the Python functions that implement them.

A signature has one letter per argument: `p` is a pointer, `q` a device pointer or 64-bit value, `z` a size, `i` an int, `u` an unsigned
int. The C library's source is generated from this table, so each function is declared only here.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any

C_TYPES: dict[str, tuple[Any, str]] = {
    "p": (ctypes.c_void_p, "void *"),
    "q": (ctypes.c_uint64, "unsigned long long"),
    "z": (ctypes.c_size_t, "size_t"),
    "i": (ctypes.c_int, "int"),
    "u": (ctypes.c_uint, "unsigned"),
}


class Result(IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    NO_BINARY_FOR_GPU = 209
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_PTX = 218
    UNSUPPORTED_PTX_VERSION = 222
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    PEER_ACCESS_ALREADY_ENABLED = 704
    MISALIGNED_ADDRESS = 716
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_IMPLICIT = 906
    UNKNOWN = 999


MESSAGES = {
    Result.SUCCESS: "no error",
    Result.INVALID_VALUE: "invalid argument",
    Result.OUT_OF_MEMORY: "out of memory",
    Result.NOT_INITIALIZED: "initialization error",
    Result.NO_DEVICE: "no CUDA-capable device is detected",
    Result.INVALID_DEVICE: "invalid device ordinal",
    Result.INVALID_IMAGE: "device kernel image is invalid",
    Result.INVALID_CONTEXT: "invalid device context",
    Result.NO_BINARY_FOR_GPU: "no kernel image is available for execution on the device",
    Result.PEER_ACCESS_UNSUPPORTED: "peer access is not supported between these two devices",
    Result.INVALID_PTX: "a PTX JIT compilation failed",
    Result.UNSUPPORTED_PTX_VERSION: "the provided PTX was compiled with an unsupported toolchain.",
    Result.INVALID_HANDLE: "invalid resource handle",
    Result.NOT_FOUND: "named symbol not found",
    Result.NOT_READY: "device not ready",
    Result.ILLEGAL_ADDRESS: "an illegal memory access was encountered",
    Result.LAUNCH_OUT_OF_RESOURCES: "too many resources requested for launch",
    Result.LAUNCH_TIMEOUT: "the launch timed out and was terminated",
    Result.PEER_ACCESS_ALREADY_ENABLED: "peer access is already enabled",
    Result.MISALIGNED_ADDRESS: "misaligned address",
    Result.LAUNCH_FAILED: "unspecified launch failure",
    Result.NOT_PERMITTED: "operation not permitted",
    Result.NOT_SUPPORTED: "operation not supported",
    Result.STREAM_CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    Result.STREAM_CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
    Result.STREAM_CAPTURE_IMPLICIT: "operation would make the legacy stream depend on a capturing blocking stream",
}


class DriverError(Exception):
    def __init__(self, result: Result) -> None:
        super().__init__(MESSAGES.get(result, result.name))
        self.result = result


FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {}
_lock = threading.RLock()
_running: list[str] = []  # name of the call that holds the lock, if any


def function(name: str, signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a Python function as the implementation of the driver function `name`."""

    def note(answer: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS[name] = (signature, answer)
        return answer

    return note


def put(address: int | None, kind: Any, value: Any) -> None:
    """Store a result at the address that the caller of a driver function passed."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    kind.from_address(address).value = value


def guarded(name: str, answer: Callable[..., Any]) -> Callable[..., int]:
    """Wrap the implementation of a driver function: only one call runs at a time, and an exception becomes the call's status.

    Garbage collection is off during a call. Otherwise a finalizer of the caller could call the driver, and wait for work that the
    interrupted call has begun and not finished. NVIDIA's driver, too, runs no code of its caller during a call, and forbids calls from host
    functions.
    """

    def call(*arguments: Any) -> int:
        with _lock:
            if _running:
                print(f"software GPU: {name} was called during {_running[0]}", file=sys.stderr)
                return int(Result.NOT_PERMITTED)
            collects = gc.isenabled()
            gc.disable()
            _running.append(name)
            try:
                return int(answer(*arguments) or 0)
            except DriverError as error:
                return int(error.result)
            except Exception:
                print(f"software GPU: {name} failed", file=sys.stderr)
                traceback.print_exc()
                return int(Result.UNKNOWN)
            finally:
                _running.clear()
                if collects:
                    gc.enable()

    return call
