"""Bind a checkpoint's tensors as the weights of a session, after the preparations of the program have run.

If the caller names a file, the prepared weights are written to it. The next start maps the file and runs no preparation. This module
verifies only the header of the file, because verifying the weights would read every byte before the first token. The weights are verified
while the model serves (deploy/verification.py), or before it serves if the last process that used the file crashed (deploy/use.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.finite import Checked
from compiler.frontend.weights import WeightSource
from runtime.device.base import Device, Tensor
from runtime.errors import DamagedFile
from runtime.executable import DTYPES, Executable, ParamSpec, TensorSpec, VMFunction
from runtime.sealed import key_of
from runtime.sections import SectionFile, align, read_kept, writing
from runtime.session import Session

log = logging.getLogger(__name__)

Array = NDArray[Any]
Group = Sequence[tuple[str, Array | Tensor]]  # the named results of one preparation
Progress = Callable[[float], None]  # called with the fraction done, from 0 to 1


def bind_weights(
    session: Session,
    executable: Executable,
    entry: str,
    source: WeightSource,
    kept_in: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Array | Tensor]:
    """Bind all weights of an entry point, and return them by name. The caller has checked that the source has all of them
    (`require_weights` of the front end). `kept_in` is the file for prepared weights; None: prepared weights are not written to a file."""
    return bind_ranks(session, executable, entry, [source], [kept_in], progress)


def bind_ranks(
    session: Session,
    executable: Executable,
    entry: str,
    sources: Sequence[WeightSource],
    kept_in: Sequence[Path | None],
    progress: Progress = lambda _: None,
    *,
    synced: bool = True,
) -> dict[str, Array | Tensor]:
    """Bind all weights of an entry point on each rank of the session's device, and return them by name. Each rank has a source of its own,
    and a file of its own for prepared weights (None: prepared weights are not written to a file). With `synced=False`, this function does
    not wait until new files are on the disk. So the caller must have marked the files as in use (deploy/use.py): after a crash, the next
    process verifies such files."""
    device, found = session.device, list[dict[str, Array | Tensor]]()
    for number, (rank, source, path) in enumerate(zip(device.ranks, sources, kept_in, strict=True)):

        def report(fraction: float, number: int = number) -> None:
            progress((number + fraction) / len(sources))

        found.append(_weights_on(rank, session, executable, entry, source, path, report, synced))
    if len(found) == 1:
        bound = found[0]
    else:
        parts = {name: [own[name] for own in found] for name in found[0]}
        bound = {name: device.of_ranks([_on(*pair) for pair in zip(device.ranks, own, strict=True)]) for name, own in parts.items()}
    session.bind(entry, bound)
    progress(1.0)
    return bound


def _weights_on(
    device: Device,
    session: Session,
    executable: Executable,
    entry: str,
    source: WeightSource,
    kept_in: Path | None,
    progress: Progress,
    synced: bool,
) -> dict[str, Array | Tensor]:
    """Return all weights of an entry point by name. Weights without a preparation are arrays of the source. Prepared weights are tensors of
    the device, or arrays of the mapped file if kernels read host arrays as fast as device memory."""
    step, preparations = executable.meta.functions[entry], executable.preparations(entry)
    num_plain = len(step.weights) - step.num_prepared
    plain, computed = step.weights[:num_plain], step.weights[num_plain:]
    # If there is a file of prepared weights, skip the check that all matrices are finite: it would read every value before the first token.
    if kept_in is None or not kept_in.exists():
        source = Checked(source)
    bound: dict[str, Array | Tensor] = {p.name: _row_major(source.read(p.name)) for p in plain}
    if computed:
        with _preparing(session, executable) as host:
            bound |= _prepared(device, host, preparations, computed, source, kept_in, progress, synced)
    return bound


def _on(device: Device, weight: Array | Tensor) -> Tensor:
    return device.upload(weight) if isinstance(weight, np.ndarray) and not isinstance(weight, device.tensor_type) else weight


class Rebinding:
    """Binds the weights of an entry point several times, and repeats only the preparations that read a changed tensor."""

    def __init__(self, session: Session, executable: Executable, entry: str) -> None:
        self._session, self._executable, self._entry = session, executable, entry
        self._plain: dict[str, Array] = {}
        self._prepared: dict[str, Sequence[Array]] = {}  # name of a preparation -> its results

    def bind(self, source: WeightSource, changed: Container[str] | None = None) -> None:
        """Bind the tensors of a source. `changed` has the names of the tensors that differ from those of the last call's source; None: all
        tensors may differ. The first call must pass None."""
        step, preparations = self._executable.meta.functions[self._entry], self._executable.preparations(self._entry)
        num_plain = len(step.weights) - step.num_prepared
        plain, computed = ([p.name for p in params] for params in (step.weights[:num_plain], step.weights[num_plain:]))
        self._plain |= {name: _row_major(source.read(name)) for name in plain if changed is None or name in changed}
        with _preparing(self._session, self._executable) as host:
            for prepare in preparations:
                if changed is None or any(p.name in changed for p in prepare.params):
                    self._prepared[prepare.name] = host.call(prepare.name, *(_row_major(source.read(p.name)) for p in prepare.params))
        made = (value for prepare in preparations for value in self._prepared[prepare.name])
        self._session.bind(self._entry, self._plain | dict(zip(computed, made, strict=True)))


def bind_values(session: Session, executable: Executable, entry: str, weights: Mapping[str, Any]) -> None:
    """Bind arrays or tensors of the caller as weights of an entry point. `weights` has them by name, before any preparation; this function
    runs the preparations."""
    wanted = [p.name for p in executable.meta.functions[entry].weights]
    with _preparing(session, executable) as host:
        made = [v for f in executable.preparations(entry) for v in host.call(f.name, *(weights[p.name] for p in f.params))]
    known = {**weights, **dict(zip(wanted[len(wanted) - len(made) :], made, strict=True))}
    if wanted:
        session.bind(entry, {name: known[name] for name in wanted})


def prepared_weights(executable: Executable, entry: str, source: WeightSource) -> Generator[tuple[str, Array]]:
    """Yield the name and array of each weight of an entry point, in the order of its parameters. The preparations run on this machine's
    CPU, even if the program is for another machine. An array is valid until the next array is requested."""
    step, preparations = executable.meta.functions[entry], executable.preparations(entry)
    for param in step.weights[: len(step.weights) - step.num_prepared]:
        yield param.name, _row_major(source.read(param.name))
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
    """Yield the session that runs preparations: the given one, or a temporary one on the host if the executable has preparations for the
    host."""
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
    synced: bool,
) -> Mapping[str, Array | Tensor]:
    """Return the prepared weights of an entry point by name: those in the file, if it can be read. Otherwise compute them, write them to
    the file, and map it. If `kept_in` is None or the file cannot be written, the weights are only in the device's memory."""
    if kept_in is not None and (stored := read_kept(kept_in, partial(_mapped, kept_in, computed))) is not None:
        return _resident(device, stored)

    def made() -> Generator[Group]:
        names = iter([p.name for p in computed])
        groups = ([*zip(islice(names, len(results)), results, strict=True)] for results in _results(host, preparations, source))
        return _counted(groups, sum(map(_num_bytes, computed)), progress)

    if kept_in is not None:
        try:
            sizes = {p.name: _num_bytes(p) for p in computed}
            with writing(kept_in, sizes, key_of(kept_in.parent), synced=synced) as put:
                for group in made():
                    for name, value in group:
                        put(name, host.download(value).reshape(-1).view(np.uint8).data)
            return _resident(device, _mapped(kept_in, computed))
        except OSError as error:  # the disk is full or read-only; an error of reading the checkpoint is raised again below
            log.warning("packed weights cannot be stored as %s: %s; they stay in memory", kept_in, error.strerror or error)
    return _side_by_side(device, made(), sum(align(_num_bytes(p)) for p in computed))


def _side_by_side(device: Device, made: Iterable[Group], num_bytes: int) -> Mapping[str, Tensor]:
    """Copy all arrays to one block of the device's memory, and return them by name. The block can use huge pages of memory even if a single
    array is too small for them."""
    block, begin, arrays = device.allocate(num_bytes), 0, dict[str, Tensor]()
    for group in made:
        for name, value in group:
            arrays[name] = device.tensor(block, begin, value.shape, value.dtype)
            device.copy_weight(arrays[name], value)
            begin += align(value.nbytes)
    return arrays


def _resident(device: Device, mapped: Mapping[str, Array]) -> Mapping[str, Array | Tensor]:
    """Return the mapped arrays of a file. If kernels read device memory faster than host memory, return copies in device memory."""
    if device.limits.reads_host_arrays:
        return mapped
    return _side_by_side(device, [[*mapped.items()]], sum(align(value.nbytes) for value in mapped.values()))


def _counted(made: Iterable[Group], num_bytes: int, progress: Progress) -> Generator[Group]:
    """Yield the groups. After each group, report the fraction of all bytes that has been yielded."""
    done = 0
    for group in made:
        yield group
        done += sum(value.nbytes for _, value in group)
        progress(done / num_bytes)


def _results(host: Session, preparations: Sequence[VMFunction], source: WeightSource) -> Generator[tuple[Tensor, ...]]:
    """Yield the results of one preparation after another. Results are valid until the next ones are requested. So memory has the results of
    only one preparation at a time, and only those tensors of the source that this preparation reads."""
    for prepare in preparations:
        yield host.call(prepare.name, *(_row_major(source.read(p.name)) for p in prepare.params), views=True)
        for param in prepare.params:
            source.release(param.name)


def _row_major(array: Any) -> Array:
    """Return the array in row-major order. A scalar array keeps its shape `()`; `numpy.ascontiguousarray` would add an axis."""
    return np.asarray(array, order="C")


def _mapped(path: Path, computed: Sequence[ParamSpec]) -> Mapping[str, Array]:
    """Map the file of prepared weights, and return the weights by name. Raise DamagedFile if the seal of the header does not match, or if a
    weight is missing or has another size."""
    file = SectionFile(path, key_of(path.parent))
    arrays: dict[str, Array] = {}
    for param in computed:
        shape, dtype = _spec(param)
        data = file.read(param.name, verify=False)
        if data.nbytes != _num_bytes(param):
            raise DamagedFile(path, param.name, f"its size is {data.nbytes} bytes, expected a {dtype} array of shape {shape}")
        arrays[param.name] = np.frombuffer(data, dtype).reshape(shape)
    return arrays


def _spec(param: ParamSpec) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and element type of a weight. Weights are tensors of constant shape."""
    spec = param.spec
    assert isinstance(spec, TensorSpec) and spec.shape is not None and spec.dtype is not None, param.name
    return tuple(d for d in spec.shape if isinstance(d, int)), DTYPES[spec.dtype]


def _num_bytes(param: ParamSpec) -> int:
    shape, dtype = _spec(param)
    return prod(shape) * dtype.itemsize
