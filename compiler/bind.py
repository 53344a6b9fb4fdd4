"""A checkpoint's tensors become the weights of a session: prepared where the program says so, bound.

What was prepared is kept in a file, if one is named: the next start maps it and computes nothing. Here only its header is verified: to
verify the weights would read every byte before the first token. That is done while the model serves (deploy/verification.py), and before
it does if the last process that used the file did not end in order (deploy/use.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import WeightSource
from runtime.device.base import Device, Tensor
from runtime.errors import DamagedFile
from runtime.executable import DTYPES, Executable, ParamSpec, TensorSpec, VMFunction
from runtime.sections import SectionFile, align, writing
from runtime.session import Session

log = logging.getLogger(__name__)

Array = NDArray[Any]
Group = Sequence[tuple[str, Array | Tensor]]  # what one function prepared
Progress = Callable[[float], None]  # told how much is done, from 0 to 1


def bind_weights(
    session: Session,
    executable: Executable,
    entry: str,
    source: WeightSource,
    kept_in: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Array | Tensor]:
    """What is bound, by name. The source has what the program takes: `require_weights` of the frontend has seen to that."""
    step, preparations = executable.meta.functions[entry], executable.preparations(entry)
    num_plain = len(step.weights) - step.num_prepared
    plain, computed = step.weights[:num_plain], step.weights[num_plain:]
    bound: dict[str, Array | Tensor] = {p.name: np.ascontiguousarray(source.read(p.name)) for p in plain}
    if computed:
        with _preparing(session, executable) as host:
            bound |= _prepared(session.device, host, preparations, computed, source, kept_in, progress)
    session.bind(entry, bound)
    progress(1.0)
    return bound


def bind_values(session: Session, executable: Executable, entry: str, weights: Mapping[str, Any]) -> None:
    """The same of values of any type that are at hand, as a program of one's own has them."""
    wanted = [p.name for p in executable.meta.functions[entry].weights]
    with _preparing(session, executable) as host:
        made = [v for f in executable.preparations(entry) for v in host.call(f.name, *(weights[p.name] for p in f.params))]
    known = {**weights, **dict(zip(wanted[len(wanted) - len(made) :], made, strict=True))}
    if wanted:
        session.bind(entry, {name: known[name] for name in wanted})


def prepared_weights(executable: Executable, entry: str, source: WeightSource) -> Generator[tuple[str, Array]]:
    """The weights of a program for any machine, in the order in which it takes them, prepared on this one. An array is valid until the
    next is asked for."""
    step, preparations = executable.meta.functions[entry], executable.preparations(entry)
    for param in step.weights[: len(step.weights) - step.num_prepared]:
        yield param.name, np.ascontiguousarray(source.read(param.name))
    if not preparations:
        return
    names = iter([p.name for p in step.weights[len(step.weights) - step.num_prepared :]])
    host = Session(executable.preparing or executable)
    try:
        for results in _results(host, preparations, source):
            for name, value in zip(islice(names, len(results)), results, strict=True):
                yield name, host.download(value)
    finally:
        host.close()


@contextmanager
def _preparing(session: Session, executable: Executable) -> Generator[Session]:
    """Where preparations run."""
    if executable.preparing is None:
        yield session
        return
    host = Session(executable.preparing)
    try:
        yield host
    finally:
        host.close()


def _prepared(
    device: Device,
    host: Session,
    preparations: Sequence[VMFunction],
    computed: Sequence[ParamSpec],
    source: WeightSource,
    kept_in: Path | None,
    progress: Progress,
) -> Mapping[str, Array | Tensor]:
    if kept_in is not None and (found := _found(kept_in, computed)) is not None:
        return _resident(device, found)
    names = iter([p.name for p in computed])
    made = ([*zip(islice(names, len(results)), results, strict=True)] for results in _results(host, preparations, source))
    made = _counted(made, sum(map(_num_bytes, computed)), progress)
    if kept_in is None:
        return _side_by_side(device, made, sum(align(_num_bytes(p)) for p in computed))
    with writing(kept_in, {p.name: _num_bytes(p) for p in computed}) as put:
        for group in made:
            for name, value in group:
                put(name, host.download(value).reshape(-1).view(np.uint8).data)
    return _resident(device, _mapped(kept_in, computed))


def _found(path: Path, computed: Sequence[ParamSpec]) -> Mapping[str, Array] | None:
    """What an earlier start left, if it is whole."""
    try:
        arrays = _mapped(path, computed)
    except FileNotFoundError:
        return None
    except DamagedFile as fault:
        log.warning("%s; it is removed and built again", fault)
        path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # of a folder that may only be read
        os.utime(path)  # its age is the time since the last use
    return arrays


def _side_by_side(device: Device, made: Iterable[Group], num_bytes: int) -> Mapping[str, Tensor]:
    """In one block, which is large enough for huge pages where a single array is not."""
    block, begin, arrays = device.allocate(num_bytes), 0, dict[str, Tensor]()
    for group in made:
        for name, value in group:
            arrays[name] = device.tensor(block, begin, value.shape, value.dtype)
            device.copy_weight(arrays[name], value)
            begin += align(value.nbytes)
    return arrays


def _resident(device: Device, mapped: Mapping[str, Array]) -> Mapping[str, Array | Tensor]:
    """The arrays of a file, or copies of them where kernels read memory of the device faster."""
    if device.limits.reads_host_arrays:
        return mapped
    return _side_by_side(device, [[*mapped.items()]], sum(align(value.nbytes) for value in mapped.values()))


def _counted(made: Iterable[Group], num_bytes: int, progress: Progress) -> Generator[Group]:
    """The same groups; the progress is that of those taken."""
    done = 0
    for group in made:
        yield group
        done += sum(value.nbytes for _, value in group)
        progress(done / num_bytes)


def _results(host: Session, preparations: Sequence[VMFunction], source: WeightSource) -> Generator[tuple[Tensor, ...]]:
    """One group after another, so that memory holds only one, and of the files what that reads."""
    for prepare in preparations:
        yield host.call(prepare.name, *(np.ascontiguousarray(source.read(p.name)) for p in prepare.params), views=True)
        for param in prepare.params:
            source.release(param.name)


def _mapped(path: Path, computed: Sequence[ParamSpec]) -> Mapping[str, Array]:
    file = SectionFile(path)
    arrays: dict[str, Array] = {}
    for param in computed:
        shape, dtype = _spec(param)
        data = file.read(param.name, verify=False)
        if data.nbytes != _num_bytes(param):
            raise DamagedFile(path, param.name, f"{data.nbytes} bytes are no {dtype} array of shape {shape}")
        arrays[param.name] = np.frombuffer(data, dtype).reshape(shape)
    return arrays


def _spec(param: ParamSpec) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Weights are tensors of constant shape."""
    spec = param.spec
    assert isinstance(spec, TensorSpec) and spec.shape is not None and spec.dtype is not None, param.name
    return tuple(d for d in spec.shape if isinstance(d, int)), DTYPES[spec.dtype]


def _num_bytes(param: ParamSpec) -> int:
    shape, dtype = _spec(param)
    return prod(shape) * dtype.itemsize
