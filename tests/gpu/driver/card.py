"""The software cards of this process, their memory, and the context in which calls run. Environment variables describe the cards (defaults
in brackets):

SOFTWARE_GPU_CARDS     number of cards (1)
SOFTWARE_GPU_ARCH      compute capability, as in 9.0 (9.0)
SOFTWARE_GPU_MEMORY    bytes of each card (1 GiB)
SOFTWARE_GPU_DRIVER    CUDA version of the driver, as in 12080 (13000)
SOFTWARE_GPU_SHARED    folder where processes record how much of each card they use (none: no other process uses the cards)
SOFTWARE_GPU_PEERS     0: no card can access the memory of another one (1)
SOFTWARE_GPU_WILD      file: once it exists, the next kernel gets an invalid pointer and the file is deleted (none)
SOFTWARE_GPU_UNEVEN    a wgmma whose n is at least this number adds like an older generation, so that bits depend on n (none)
SOFTWARE_GPU_STEP_S    seconds that loads take for the time of any step (none: loads measure their steps, which takes seconds)
SOFTWARE_GPU_SEED      0 does asynchronous work as late as the rules allow; any other seed draws random orders (0)
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

# compute capability -> largest shared memory of a block, in bytes
SHARED_LIMITS = {(7, 5): 65536, (8, 0): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448}
PINNED_BYTES = 1 << 32  # bytes of pinned host memory that can be allocated


@dataclass(slots=True, eq=False)
class Context:
    card: int
    fault: Result = Result.SUCCESS  # the error of a failed kernel, which every later call in this context returns
    retained: int = 0
    peers: set[int] = field(default_factory=set[int])  # other cards whose memory kernels of this context may access


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
    uneven: int | None = None
    reaches_peers: bool = True
    contexts: dict[int, Context] = field(default_factory=dict)  # keys are handles
    primary: dict[int, int] = field(default_factory=dict)  # card -> handle of its primary context
    owners: dict[int, tuple[int, int]] = field(default_factory=dict)  # device allocation -> (card, bytes)
    homes: dict[int, Context] = field(default_factory=dict)  # module -> the context that has loaded it
    pinned: dict[int, int] = field(default_factory=dict)  # pinned host allocation -> bytes
    objects: dict[int, Any] = field(default_factory=dict)  # streams, events, modules, functions, graphs by handle
    faults: list[str] = field(default_factory=list)  # for each kernel that failed, or could not be loaded: what is wrong with it
    initialized: bool = False
    next_handle: int = 0x1000
    launches: int = 0
    assembled: int = 0  # number of PTX texts that the driver has assembled

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

    def hidden_from(self, context: Context) -> list[int]:
        """Return the allocations that kernels of a context must not access, because they are on other cards without peer access."""
        seen = {context.card, *context.peers}
        return [address for address, (card, _) in self.owners.items() if address > 0 and card not in seen]

    def used(self, card: int) -> int:
        """Return how many bytes of a card are used by all processes together."""
        return self._own(card) + sum(_read(file) for file in self._told(card) if file.suffix != f".{os.getpid()}")

    def tell(self, card: int) -> None:
        """Record for other processes how many bytes of a card this process uses."""
        if self.shared is not None:
            (self.shared / f"{card}.{os.getpid()}").write_text(str(self._own(card)))

    def _own(self, card: int) -> int:
        return sum(size for owner, size in self.owners.values() if owner == card)

    def _told(self, card: int) -> list[Path]:
        """Return the files in which running processes record how many bytes of a card they use. The memory of a process that has ended is
        free again."""
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
    room = Memory(cards * memory * 5 // 4 + PINNED_BYTES)  # a quarter more than the memory of the cards, for the gaps between allocations
    generation, uneven, reaches_peers = (int(major), int(minor)), number("UNEVEN", 0) or None, bool(number("PEERS", 1))
    return Machine(cards, generation, memory, number("DRIVER", 13000), number("SEED", 0), room, shared, wild, uneven, reaches_peers)


def _take_steps_for(seconds: float) -> None:
    """Let loads of this process take `seconds` for the time of each step."""
    from deploy.model_loading import costs
    from server.engine.scheduling.pace import Measured

    costs.measured = lambda model: Measured({1: seconds})


machine = _machine()
if step_s := os.environ.get("SOFTWARE_GPU_STEP_S"):
    _take_steps_for(float(step_s))


def stack() -> list[int]:
    """Return the handles of the contexts pushed in this thread."""
    if not hasattr(_threads, "stack"):
        _threads.stack = []
    return _threads.stack


def current() -> Context:
    """Return this thread's current context. If a kernel failed in the context, raise that error."""
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
