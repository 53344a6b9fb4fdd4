"""A checkpoint's tensors become the weights of a session: checked against what the program takes, prepared where it says so, bound.

What was prepared is kept in a file, if one is named: the next start maps it and computes nothing. Its header is verified, its bulk is not:
that would read every byte before the first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import Accounting, WeightSource
from runtime.device.cpu import host_buffer
from runtime.errors import DamagedFile
from runtime.executable import DTYPES, PREPARATION, Executable, ParamSpec, TensorSpec, VMFunction
from runtime.sections import SectionFile, write
from runtime.session import Session

Array = NDArray[Any]


def bind_weights(
    session: Session,
    executable: Executable,
    entry: str,
    source: WeightSource,
    unused: Iterable[str] = (),
    kept_in: Path | None = None,
) -> int:
    """The bytes that stay in memory. `unused` are patterns of tensors that checkpoints carry and the program does not need."""
    functions = executable.meta.functions
    step, prepare = functions[entry], functions.get(entry + PREPARATION)
    computed = [p for p in step.weights if p.name not in source.tensors]
    plain = [p for p in step.weights if p.name in source.tensors]
    accounting = Accounting(source)
    for param in (*plain, *(prepare.params if prepare else ())):
        accounting.take(param.name, _spec(param)[0])
    accounting.ignore(*unused)
    accounting.check()
    bound: dict[str, Array] = {p.name: np.ascontiguousarray(source.read(p.name)) for p in plain}
    if prepare is not None:
        bound |= _prepared(session, prepare, computed, source, kept_in)
    session.bind(entry, bound)
    return sum(a.nbytes for a in bound.values())


def _prepared(
    session: Session, prepare: VMFunction, computed: list[ParamSpec], source: WeightSource, kept_in: Path | None
) -> Mapping[str, Array]:
    if kept_in is not None and kept_in.exists():
        try:
            return _mapped(kept_in, computed)
        except DamagedFile:
            kept_in.unlink(missing_ok=True)  # prepared again below
    arguments = [np.ascontiguousarray(source.read(p.name)) for p in prepare.params]
    results = session.call(prepare.name, *arguments, views=True)
    for param in prepare.params:
        source.release(param.name)
    if kept_in is None:
        return {p.name: _own(value) for p, value in zip(computed, results, strict=True)}
    contents = {p.name: value.reshape(-1).view(np.uint8).data for p, value in zip(computed, results, strict=True)}
    write(kept_in, contents)
    return _mapped(kept_in, computed)


def _mapped(path: Path, computed: list[ParamSpec]) -> Mapping[str, Array]:
    file = SectionFile(path)
    arrays: dict[str, Array] = {}
    for param in computed:
        shape, dtype = _spec(param)
        data = file.read(param.name, verify=False)
        if data.nbytes != prod(shape) * dtype.itemsize:
            raise DamagedFile(path, param.name, f"{data.nbytes} bytes are no {dtype} array of shape {shape}")
        arrays[param.name] = np.frombuffer(data, dtype).reshape(shape)
    return arrays


def _spec(param: ParamSpec) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Weights are tensors of constant shape."""
    spec = param.spec
    assert isinstance(spec, TensorSpec) and spec.shape is not None and spec.dtype is not None, param.name
    return tuple(d for d in spec.shape if isinstance(d, int)), DTYPES[spec.dtype]


def _own(array: Array) -> Array:
    """A copy at a cache line's boundary, in huge pages where the system grants them."""
    copy = host_buffer(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
