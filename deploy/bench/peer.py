"""What a peer of `relaxserve bench model` is, and which ones there are: other engines with the same weights, shapes and threads.

Each is a file of deploy/bench/peers with a function `open_model(Subject) -> Peer`, imported when it is asked for. The wheel has none of
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.weights import WeightSource
from runtime.device.cpu.cores import available_cores
from server.settings import SettingsError

FOLDER = "deploy.bench.peers"

Run = Callable[[], NDArray[Any]]
Steps = Callable[[int, int, int], Run]


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that all of them run."""

    config: ModelConfig
    weights: WeightSource
    held: str  # how the weights of products are: bf16, int8, int4
    threads: int


class Peer(Protocol):
    def step(self, tokens: int, sequences: int, context: int) -> Run:
        """A step in which each sequence has so many new tokens and so much context at the end, to be run any number of times. It returns
        the logits behind the last token of each. The tokens are 0, 1, 2...; those before them may be anything. It takes the place of the
        step before it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Package:
    file: str  # of deploy/bench/peers
    module: str
    install: str
    formats: Mapping[str, str]  # what it calls the ways in which weights are held


PEERS = {
    "torch": Package("torch", "torch", "torch", {"bf16": "bfloat16"}),
    "llama-cpp-python": Package("llama_cpp", "llama_cpp", "llama-cpp-python", {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}),
    "openvino": Package("openvino", "openvino", "openvino", {"bf16": "f16", "int8": "i8", "int4": "i4"}),
}


def check(name: str, held: str) -> None:
    """Before anything is measured: whether the peer is there, and has weights of this kind."""
    peer = PEERS[name]
    if held not in peer.formats:
        raise SettingsError(f"peer {name!r} holds weights as {', '.join(peer.formats)}, not as {held}")
    if find_spec(FOLDER) is None:
        raise SettingsError(f"peer {name!r} is measured from a source tree, which the installed package is not; clone the repository")
    installed(peer.module, name, peer.install)


def installed(module: str, peer: str, package: str) -> ModuleType:
    """By name: the packages of peers are optional, and type checkers know nothing of them either way."""
    try:
        return import_module(module)
    except ImportError as error:
        raise SettingsError(f"peer {peer!r} cannot be imported ({error}); install it with: pip install {package}") from error


@contextmanager
def at_work(name: str, subject: Subject) -> Generator[Steps]:
    """The steps of a peer that lives on a thread of its own: ours are pinned, and what a pinned thread starts would share its core."""
    open_model: Callable[[Subject], Peer] = import_module(f"{FOLDER}.{PEERS[name].file}").open_model
    with ThreadPoolExecutor(1, initializer=_unpinned) as thread:
        peer = thread.submit(open_model, subject).result()

        def step(tokens: int, sequences: int, context: int) -> Run:
            run = thread.submit(peer.step, tokens, sequences, context).result()
            return lambda: thread.submit(run).result()

        try:
            yield step
        finally:
            thread.submit(peer.close).result()


def _unpinned() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, available_cores())
