"""Fill the table through which the software driver's C library calls Python functions of this process."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.gpu.driver import devices, graphs, links, memory, modules, streams
from tests.gpu.driver.calls import C_TYPES, FUNCTIONS, guarded
from tests.gpu.ptx import native

GROUPS = (devices, graphs, links, memory, modules, streams)  # importing these modules fills FUNCTIONS
_kept: list[Any] = []  # keeps the callbacks alive, because the C library may call them until the process ends


def attach(library: str) -> None:
    loaded = ctypes.CDLL(library)
    native.use(library)
    table = (ctypes.c_void_p * len(FUNCTIONS)).in_dll(loaded, "software_gpu_functions")
    pointers = []
    for name, (signature, answer) in sorted(FUNCTIONS.items()):
        callback = ctypes.CFUNCTYPE(ctypes.c_int, *(C_TYPES[letter][0] for letter in signature))(guarded(name, answer))
        _kept.append(callback)
        pointers.append(ctypes.cast(callback, ctypes.c_void_p).value)
    # set pointer 0 last: the C library considers the table complete if pointer 0 is not null
    for number in reversed(range(len(pointers))):
        table[number] = pointers[number]
