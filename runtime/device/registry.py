"""Find the device of an executable. Each subfolder of this folder implements a kind of device, and needs no registration. The subfolder's
`ARCHITECTURES` name the code that the device runs, and the function `open_device` of its module `device` opens the device."""

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


NAME = rf"({'|'.join(folder.rpartition('.')[2] for folder in _FOLDERS)})(:\d{{1,3}})?"  # pattern of the names of devices: cpu, cuda, cuda:1
CPU = "cpu"


def number_of(name: str) -> int:
    """Return the number of a device among the devices of its kind, given its name: 1 for `cuda:1`, and 0 if the name has no number."""
    return int(name.partition(":")[2] or 0)


def open_device(
    meta: ExecutableMeta,
    *,
    num_threads: int | None = None,
    pinned: bool = False,
    number: int = 0,
    num_ranks: int = 1,
    assembled: Path | None = None,
) -> Device:
    """Open the device for the architecture of an executable. The device's module is imported only now, so the libraries of a device that is
    never opened need not exist. `num_threads` counts threads of the host and defaults to RELAXSERVE_THREADS, or else to all usable cores.
    With `pinned`, each thread, including one that calls `Device.use_thread`, is pinned to a separate core if there are enough cores.
    `number` chooses among several devices of a kind.
    If `num_ranks` is more than 1, that many devices from `number` on run the program together, each as a rank: see `Kernel.ranks`.
    `assembled` is the path, without suffix, of a file in which a device may store code that it assembled.
    Raise IncompatibleExecutable if no device of this runtime has the architecture."""
    arch = meta.target.partition(":")[0]
    if arch not in DEVICES:
        raise IncompatibleExecutable(f"the executable is for {arch or 'no machine'}; this runtime has devices for {', '.join(DEVICES)}")
    opener = import_module(DEVICES[arch]).open_device
    threads = num_threads or flags.current().threads
    device = {"number": number, "num_ranks": num_ranks, "assembled": assembled}
    return opener(num_threads=threads, pinned=pinned, stack_bytes=meta.stack_bytes, **device)
