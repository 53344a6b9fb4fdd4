"""Check that a source has exactly the tensors that a model needs."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from compiler.frontend.errors import WeightMismatch, listed
from compiler.frontend.weights import WeightSource
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType


def require_weights(module: IRModule, source: WeightSource, unused: Iterable[str]) -> None:
    """Raise WeightMismatch unless the source has all weights of the program, in their shapes, and no other tensors. `unused` are shell
    patterns of the names of further tensors that the source may have. A matrix of integers without scales also raises WeightMismatch."""
    accounting = Accounting(source)
    for func in module.graph_functions.values():
        for weight in func.weights:
            assert isinstance(weight.type, TensorType) and weight.type.shape is not None, weight
            accounting.take(weight.name, tuple(dim.const for dim in weight.type.shape))
    accounting.ignore(*unused)
    accounting.check()


class Accounting:
    """Compares the tensors that a model needs with the tensors of a source, and reports all differences at once."""

    def __init__(self, source: WeightSource) -> None:
        self._tensors = source.tensors
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._unscaled: list[str] = []

    def take(self, name: str, shape: tuple[int, ...]) -> None:
        """Record that the model needs this tensor in this shape. `check` reports the tensor if the source lacks it or has it in another
        shape, or if it is a matrix of integers without scales."""
        self._taken.add(name)
        if (info := self._tensors.get(name)) is None:
            self._missing.append(f"{name} {list(shape)}")
        elif info.shape != shape:
            self._misshaped.append(f"{name} is {list(info.shape)}, expected {list(shape)}")
        elif info.dtype.kind in "iub" and len(shape) > 1 and name.endswith(".weight"):  # names of matrices with scales end differently
            self._unscaled.append(f"{name} ({info.dtype})")

    def ignore(self, *patterns: str) -> None:
        """Ignore tensors whose names match these shell patterns, such as tables that are recomputed and heads for other tasks."""
        self._taken.update(name for name in self._tensors if any(fnmatchcase(name, pattern) for pattern in patterns))

    def check(self) -> None:
        """Raise WeightMismatch if needed tensors are missing or unfit, or if the source has tensors that were neither taken nor ignored."""
        surplus = sorted(self._tensors.keys() - self._taken)
        kinds = (
            ("missing", self._missing),
            ("of another shape", self._misshaped),
            ("of integers, which need scales and a quantization_config", self._unscaled),
            ("not part of the model", surplus),
        )
        if problems := [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds if names]:
            raise WeightMismatch("the weights do not fit the configuration. Tensors " + "; ".join(problems))
