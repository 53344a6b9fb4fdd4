"""Fills the function table of the C library in this process."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.gpu.driver import devices, graphs, links, memory, modules, streams
from tests.gpu.driver.calls import C_TYPES, FUNCTIONS, guarded

GROUPS = (devices, graphs, links, memory, modules, streams)  # importing them fills the table
_kept: list[Any] = []  # C calls them as long as the process lives


def attach(library: str) -> None:
    loaded = ctypes.CDLL(library)
    table = (ctypes.c_void_p * len(FUNCTIONS)).in_dll(loaded, "software_gpu_functions")
    pointers = []
    for name, (signature, answer) in FUNCTIONS.items():
        callback = ctypes.CFUNCTYPE(ctypes.c_int, *(C_TYPES[letter][0] for letter in signature))(guarded(name, answer))
        _kept.append(callback)
        pointers.append(ctypes.cast(callback, ctypes.c_void_p).value)
    for number in reversed(range(len(pointers))):  # the first one last: it tells that the table is full
        table[number] = pointers[number]
