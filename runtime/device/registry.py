"""Find the device of an executable. A device is a folder in here, found by itself: it runs code for its `ARCHITECTURES`, and the
`open_device` of its module `device` opens it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from runtime import device, flags
from runtime.device.base import Device
from runtime.errors import IncompatibleExecutable
from runtime.executable import ExecutableMeta

_FOLDERS = [f"{device.__name__}.{found.name}" for found in iter_modules(device.__path__) if found.ispkg]
DEVICES = {arch: f"{folder}.device" for folder in _FOLDERS for arch in import_module(folder).ARCHITECTURES}


NAME = rf"({'|'.join(folder.rpartition('.')[2] for folder in _FOLDERS)})(:\d{{1,3}})?"  # of a device: cpu, cuda, cuda:1
CPU = "cpu"


def number_of(name: str) -> int:
    """The number of the device among those of its kind."""
    return int(name.partition(":")[2] or 0)


def open_device(
    meta: ExecutableMeta, *, num_threads: int | None = None, pinned: bool = False, number: int = 0, assembled: Path | None = None
) -> Device:
    """Open the device for an architecture. Its module is imported now, so a device that nobody opens needs none of its libraries.
    `num_threads` counts threads of the host: by default RELAXSERVE_THREADS, or the number of usable cores. `pinned`: each thread, the
    caller's too, stays on a core of its own. `number` chooses among several devices of a kind. `assembled` is the path, less its ending,
    at which a device may keep what it makes of the code."""
    arch = meta.target.partition(":")[0]
    if arch not in DEVICES:
        raise IncompatibleExecutable(f"the executable is for {arch or 'no machine'}; this runtime has devices for {', '.join(DEVICES)}")
    opener = import_module(DEVICES[arch]).open_device
    threads = num_threads or flags.current().threads
    return opener(num_threads=threads, pinned=pinned, stack_bytes=meta.stack_bytes, number=number, assembled=assembled)
