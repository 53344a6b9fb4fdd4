"""A checkpoint's tensors become the weights of a session: checked against what the program takes, prepared where it says so, bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import Accounting, WeightSource
from compiler.passes.lift_weights import SUFFIX
from runtime.device.cpu import host_buffer
from runtime.executable import Executable
from runtime.session import Session


def bind_weights(session: Session, executable: Executable, entry: str, source: WeightSource, unused: Iterable[str] = ()) -> int:
    """The bytes that stay in memory. `unused` are patterns of tensors that checkpoints carry and the program does not need."""
    functions = executable.meta.functions
    step, prepare = functions[entry], functions.get(entry + SUFFIX)
    accounting = Accounting(source)
    taken: dict[str, NDArray[Any]] = {}
    wanted = {p.name: p.spec for p in (prepare.params if prepare else ())}
    computed = [p.name for p in step.weights if p.name not in source.tensors]
    wanted |= {p.name: p.spec for p in step.weights if p.name in source.tensors}
    for name, spec in wanted.items():
        accounting.take(name, tuple(spec.shape))  # type: ignore[union-attr,arg-type]  # weights are tensors of constant shape
    accounting.ignore(*unused)
    accounting.check()
    for name in wanted:
        taken[name] = np.ascontiguousarray(source.read(name))
    bound = {p.name: taken[p.name] for p in step.weights if p.name in taken}
    if prepare is not None:
        results = session.call(entry + SUFFIX, *(taken[p.name] for p in prepare.params), views=True)
        bound |= {name: _own(value) for name, value in zip(computed, results, strict=True)}
    session.bind(entry, bound)
    return sum(a.nbytes for a in bound.values())


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """A copy at a cache line's boundary, in huge pages where the system grants them."""
    copy = host_buffer(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
