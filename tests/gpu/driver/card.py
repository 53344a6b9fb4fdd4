"""The cards of this process: what they are, their memory, and the context in which calls run. Environment variables describe them:

SOFTWARE_GPU_CARDS     how many there are (1)
SOFTWARE_GPU_ARCH      compute capability, as in 9.0 (9.0)
SOFTWARE_GPU_MEMORY    bytes of each card (1 GiB)
SOFTWARE_GPU_DRIVER    CUDA version of the driver, as in 12080 (13000)
SOFTWARE_GPU_SHARED    a folder where processes tell each other what they took of the cards (none: each has the cards for itself)
SOFTWARE_GPU_WILD      a file: once it is there, the next kernel gets a wild pointer, and the file goes (none)
SOFTWARE_GPU_SEED      0 does asynchronous work as late as it may be done; any other draws orders at random (0)
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.driver.calls import DriverError, Result
from tests.gpu.ptx.memory import Memory

SHARED_LIMITS = {(8, 0): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448}  # bytes that a block may have
PINNED_BYTES = 1 << 32  # of the host


@dataclass(slots=True, eq=False)
class Context:
    card: int
    fault: Result = Result.SUCCESS  # once a kernel has failed, all calls answer this
    retained: int = 0


@dataclass(eq=False)
class Machine:
    cards: int
    arch: tuple[int, int]
    card_bytes: int
    driver_version: int
    seed: int
    memory: Memory
    shared: Path | None = None
    wild: Path | None = None
    contexts: dict[int, Context] = field(default_factory=dict)  # by handle
    primary: dict[int, int] = field(default_factory=dict)  # handle of a card's primary context
    owners: dict[int, tuple[int, int]] = field(default_factory=dict)  # device allocation -> (card, bytes)
    pinned: dict[int, int] = field(default_factory=dict)  # allocation of the host -> bytes
    objects: dict[int, Any] = field(default_factory=dict)  # streams, events, modules, functions, graphs by handle
    faults: list[str] = field(default_factory=list)  # what kernels did wrong, in words
    initialized: bool = False
    next_handle: int = 0x1000
    launches: int = 0
    assembled: int = 0  # texts of PTX

    @cached_property
    def random(self) -> np.random.Generator | None:
        return np.random.default_rng(self.seed) if self.seed else None

    def handle(self, thing: Any) -> int:
        self.next_handle += 16
        self.objects[self.next_handle] = thing
        return self.next_handle

    def find(self, handle: int | None, kind: type) -> Any:
        thing = self.objects.get(handle or 0)
        if not isinstance(thing, kind):
            raise DriverError(Result.INVALID_HANDLE)
        return thing

    def used(self, card: int) -> int:
        """Bytes of a card, of all processes."""
        return self._own(card) + sum(_read(file) for file in self._told(card) if file.suffix != f".{os.getpid()}")

    def tell(self, card: int) -> None:
        """The other processes what this one has."""
        if self.shared is not None:
            (self.shared / f"{card}.{os.getpid()}").write_text(str(self._own(card)))

    def _own(self, card: int) -> int:
        return sum(size for owner, size in self.owners.values() if owner == card)

    def _told(self, card: int) -> list[Path]:
        """By processes that live: a card takes back what one had that ended."""
        if self.shared is None:
            return []
        return [file for file in self.shared.glob(f"{card}.*") if Path("/proc", file.suffix[1:]).exists()]


def _read(file: Path) -> int:
    try:
        return int(file.read_text() or 0)
    except FileNotFoundError:
        return 0


_threads = threading.local()


def _machine() -> Machine:
    def number(name: str, default: int) -> int:
        return int(os.environ.get(f"SOFTWARE_GPU_{name}", default))

    cards, memory = number("CARDS", 1), number("MEMORY", 1 << 30)
    major, minor = os.environ.get("SOFTWARE_GPU_ARCH", "9.0").split(".")
    paths = (os.environ.get(f"SOFTWARE_GPU_{name}") for name in ("SHARED", "WILD"))
    shared, wild = (Path(path) if path else None for path in paths)
    room = Memory(cards * memory * 5 // 4 + PINNED_BYTES)  # gaps between allocations take room, too
    return Machine(cards, (int(major), int(minor)), memory, number("DRIVER", 13000), number("SEED", 0), room, shared, wild)


machine = _machine()


def stack() -> list[int]:
    """The contexts that are pushed in this thread, by handle."""
    if not hasattr(_threads, "stack"):
        _threads.stack = []
    return _threads.stack


def current() -> Context:
    """The context of a call. A kernel that failed in it fails all calls after it."""
    if not machine.initialized:
        raise DriverError(Result.NOT_INITIALIZED)
    if not stack() or stack()[-1] not in machine.contexts:
        raise DriverError(Result.INVALID_CONTEXT)
    context = machine.contexts[stack()[-1]]
    if context.fault:
        raise DriverError(context.fault)
    return context


def note_fault(context: Context, result: Result, text: str) -> None:
    context.fault = result
    machine.faults.append(text)
    print(f"software GPU: {text}", file=sys.stderr, flush=True)
