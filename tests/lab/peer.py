"""The peers of `python -m tests.lab model` on the CPU: other engines that run the same weights and shapes with the same number of threads.

Each peer is a module of tests/lab/peers with a function `open_model(Subject) -> Peer`, imported on demand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Protocol

from compiler.frontend.config import ModelConfig
from compiler.frontend.weights import WeightSource
from deploy.bench.compute.case import Run, Steps
from deploy.bench.gguf_file import Q4_K_M
from runtime.device.cpu.cores import available_cores
from server.settings import SettingsError

FOLDER = "tests.lab.peers"
# format of the weights, or the name of a mixture -> its name in GGUF files
GGUF_FORMATS = {"bf16": "BF16", "int8": "Q8_0", "int4-32": "Q4_0", Q4_K_M.lower(): Q4_K_M}


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that all peers run."""

    config: ModelConfig
    weights: WeightSource
    held: str  # format of the weights in products, such as bf16, int8 or int4-32
    threads: int


class Peer(Protocol):
    def step(self, tokens: int, sequences: int, context: int) -> Run:
        """Return a step that can be run any number of times. The sequences have `tokens` new tokens together, in equal parts, and each has
        `context` tokens after the step. The new tokens are 0, 1, 2, ...; earlier tokens are arbitrary. A run returns the logits after each
        sequence's last token. The next call of `step` makes this step invalid."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Package:
    file: str  # name of a file of tests/lab/peers
    module: str
    install: str
    formats: Mapping[str, str]  # format of the weights -> the peer's name for it


PEERS = {
    "torch": Package("torch", "torch", "torch", {"bf16": "bfloat16"}),
    "llama-cpp-python": Package("llama_cpp", "llama_cpp", "llama-cpp-python", GGUF_FORMATS),
    "openvino": Package("openvino", "openvino", "openvino", {"bf16": "f16", "int8": "i8", "int4-32": "i4"}),
}


def check(name: str, held: str) -> None:
    """Raise SettingsError, before anything is measured, if the peer is not installed or does not support this format of weights."""
    if name not in PEERS:
        raise SettingsError(f"peer {name!r} runs on GPUs; the peers on the CPU are {', '.join(PEERS)}")
    peer = PEERS[name]
    if held not in peer.formats:
        raise SettingsError(f"peer {name!r} supports the weight formats {', '.join(peer.formats)}, not {held}")
    installed(peer.module, name, peer.install)


def installed(module: str, peer: str, package: str) -> ModuleType:
    """Import a peer's package by name. These packages are optional, so they cannot be imported by a statement, and have no types."""
    try:
        return import_module(module)
    except ImportError as error:
        raise SettingsError(f"peer {peer!r} cannot be imported ({error}); install it with: pip install {package}") from error


def version_of(name: str) -> str:
    """Return the version of a peer's package, or "" if it was not installed as a package."""
    try:
        return version(PEERS[name].install)
    except PackageNotFoundError:
        return ""


@contextmanager
def at_work(name: str, subject: Subject) -> Generator[Steps]:
    """Open a peer on a separate thread and yield its steps. A pinned thread passes its core to threads that it starts, so the peer must not
    be opened on one of our pinned threads."""
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
