"""Memory nodes (NUMA): find the node of each core, and copy arrays into memory near the cores that read them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SYSTEM = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Placement:
    """The core of each thread, and the memory node of each core. Nodes are numbered in the order in which they first appear. Both tuples
    are empty if threads are not placed on cores."""

    cores: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    @staticmethod
    def of(cores: Sequence[int], system: Path = SYSTEM) -> Placement:
        """Return the placement of these cores. If the system lists no nodes, all cores are on one node."""
        known = {core: path.name for path in sorted(system.glob("node[0-9]*")) for core in _cores((path / "cpulist").read_text())}
        names = [known.get(core, "") for core in cores]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Placement(tuple(cores), tuple(numbers[name] for name in names))

    @property
    def has_several_nodes(self) -> bool:
        return any(self.nodes)

    def limits(self, *, pinned: bool) -> list[set[int]]:
        """Return the cores on which each thread may run: with `pinned`, only its own core. Otherwise, with several nodes, all cores of its
        node: the thread then stays near the memory that it reads, and can move when another program takes its core. The list is empty if
        no thread is limited."""
        if pinned:
            return [{core} for core in self.cores]
        return [self._cores_of(node) for node in self.nodes] if self.has_several_nodes else []

    def copy(self, target: NDArray[Any], array: NDArray[Any]) -> None:
        """Copy into memory of the same shape and type that has not been written yet. The cores of each node write a part whose size is
        proportional to the node's number of threads. The system places a page on the node that first writes it, and the team divides its
        work among nodes in the same proportions."""
        copy, source = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (target, array))
        numbers = range(1 + max(self.nodes))
        spans = [slice(*(source.nbytes * sum(n < at for n in self.nodes) // len(self.nodes) for at in (k, k + 1))) for k in numbers]
        with ThreadPoolExecutor(len(numbers)) as threads:
            list(threads.map(_copy_from, map(self._cores_of, numbers), [copy[span] for span in spans], [source[span] for span in spans]))

    def _cores_of(self, node: int) -> set[int]:
        return {core for core, at in zip(self.cores, self.nodes, strict=True) if at == node}


def _copy_from(cores: set[int], to: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Limit the calling thread to these cores, and copy the bytes."""
    limit_thread(cores)
    to[...] = source


def limit_thread(cores: set[int]) -> None:
    """Limit the calling thread to these cores. If the process may no longer use any of them, the thread stays unlimited."""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


def _cores(text: str) -> list[int]:
    """Parse a list of cores in Linux's notation, such as "0-3,8"."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)]
