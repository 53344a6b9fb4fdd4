"""PyTorch without a compiler, on the CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from tests.lab.peer import Run, Subject
from tests.lab.peers.torch_llama import TorchLlama, tensor_of

CPU = "cpu"


def open_model(subject: Subject) -> Torch:
    torch = import_module("torch")
    torch.set_num_threads(subject.threads)
    return Torch(torch, subject)


class Torch:
    def __init__(self, torch: Any, subject: Subject) -> None:
        self._weights = {name: tensor_of(torch, subject.weights.read(name), CPU) for name in subject.weights.tensors}
        self._llama = TorchLlama(torch, subject.config, self._weights, CPU)

    def step(self, tokens: int, sequences: int, context: int) -> Run:
        run = self._llama.step(tokens, sequences, context)

        def to_host() -> NDArray[Any]:
            return run().float().numpy()

        return to_host

    def close(self) -> None:
        self._weights.clear()
