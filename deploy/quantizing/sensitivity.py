"""Measure how much the predictions change if matrices of one kind, in one part of the depth, are quantised and all others are exact."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import Derived, Tensor, WeightSource
from deploy.quality.observe import Bound, divergence, rows_of

DEPTHS = 3  # number of parts into which the layers are divided, from the first to the last
LEAST = 1e-6  # smallest divergence, so that none is 0

Floats = NDArray[np.float32]
Kind = tuple[str, int]  # names without the layer's number, and the part of the depth


class Replaced(Derived):
    """A weight source that returns `values(name)` for the tensors `names`, and the tensors of `source` for all others."""

    def __init__(self, source: WeightSource, names: Sequence[str], values: Callable[[str], Floats]) -> None:
        super().__init__(source, source.tensors)
        self._names, self._values = frozenset(names), values

    def read(self, name: str) -> Tensor:
        if name not in self._names:
            return self.source.read(name)
        return self._values(name).astype(self.tensors[name].dtype)


def kind_of(names: Sequence[str], num_layers: int) -> Kind:
    """Return the kind of a group of matrices, given their names. Matrices that belong to no layer count as the first part of the depth."""
    number = re.search(r"\.(\d+)\.", names[0])
    plain = ",".join(re.sub(r"\.\d+\.", ".", name) for name in names)
    return plain, 0 if number is None else int(number[1]) * DEPTHS // max(num_layers, 1)


def divergences(
    bound: Bound,
    weights: WeightSource,
    quantised: Callable[[str], Floats],
    kinds: Mapping[Kind, Sequence[str]],
    window: Sequence[int],
    num_rows: int,
    progress: Callable[[float], None],
) -> dict[Kind, float]:
    """Return the divergence that each kind causes. `kinds` has the names of the matrices of each kind. The caller has bound the weights of
    the checkpoint; afterwards, the matrices of the last kind are still quantised."""
    found: dict[Kind, float] = {}
    rows = rows_of(len(window), num_rows)
    exact = bound.run(window, rows).logits
    before: list[str] = []
    for done, (kind, names) in enumerate(kinds.items()):
        bound.binding.bind(Replaced(weights, names, quantised), {*before, *names})
        logits = bound.run(window, rows).logits
        found[kind] = max(LEAST, divergence(exact, logits))
        before = list(names)
        progress((done + 1) / len(kinds))
    return found
