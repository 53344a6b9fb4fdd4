"""Captured regions: launches with no host work between them, which the device replays in one call."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from runtime.device.base import Bases, Launch
from runtime.executable import DTYPES, Base, NativeLaunch, Region, Slot, TensorSpec
from runtime.vm.machine import Frame, Loader, Step


def region_step(loader: Loader, region: Region) -> Step:
    """Return a step that runs a region. The addresses of constants are set once, and the addresses of weights whenever weights are bound.
    The addresses of the arena and of other registers are set at each run."""
    numbers = _Numbers(loader)
    launches = [phase for launch in region.launches for phase in _phases(loader, numbers, launch)]
    machine = loader.machine
    if not launches:
        return lambda frame: None
    captured = machine.device.region(machine.code_for(launches[0].body), launches, numbers.bases, loader.source.name)
    numbers.place(captured)
    loader.function.regions.append(captured)
    run = captured.run

    def step(frame: Frame) -> None:
        if machine.profile is None:
            run(frame.heap_handle, frame.arena, frame.registers)
        else:
            run(frame.heap_handle, frame.arena, frame.registers, machine.profile.add)

    def in_parts(frame: Frame) -> Iterator[None]:
        if machine.profile is None:
            yield from captured.in_parts(frame.heap_handle, frame.arena, frame.registers)
        else:
            step(frame)

    loader.function.divided[step] = in_parts
    return step


def _phases(loader: Loader, numbers: _Numbers, launch: NativeLaunch) -> list[Launch]:
    """Return the launches of a kernel's phases, in the form that devices take. Raise InvalidProgram if there is no such kernel, or if the
    launch does not match the kernel's declaration."""
    kernels = loader.machine.executable.meta.kernels
    if not 0 <= launch.kernel < len(kernels):
        raise loader.invalid(f"kernel {launch.kernel} does not exist, there are {len(kernels)} kernels")
    kernel = kernels[launch.kernel]
    if (len(launch.operands), len(launch.dims)) != (kernel.num_buffers, kernel.num_dims):
        raise loader.invalid(
            f"kernel {kernel.name} takes {kernel.num_buffers} buffers and {kernel.num_dims} integers, "
            f"the launch has {len(launch.operands)} and {len(launch.dims)}"
        )
    buffers = tuple((numbers.number(o.base, o.index), loader.slot(o.offset)) for o in launch.operands)
    dims = tuple(loader.slot(d) for d in launch.dims)
    if kernel.ranks and len(kernel.ranks) != kernel.num_buffers:
        raise loader.invalid(f"kernel {kernel.name} names the ranks of {len(kernel.ranks)} of its {kernel.num_buffers} buffers")
    return [
        Launch(kernel.name, p.body, p.grid, buffers, dims, p.threads, p.num_counters, p.shared_bytes, kernel.ranks, launch.overlaps)
        for p in kernel.phases
    ]


class _Numbers:
    """Assigns numbers to the bases of a region, in the order in which they appear."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._numbers: dict[tuple[Base, int], int] = {}

    def number(self, base: Base, index: int) -> int:
        """Return the number of a base, or a new number if the base has none yet. `index` is the number of its register or constant."""
        if base is Base.REGISTER:
            self._loader.register(index)
        elif base is Base.CONSTANT:
            self._loader.constant(index)
        return self._numbers.setdefault((base, 0 if base is Base.ARENA else index), len(self._numbers))

    @property
    def bases(self) -> Bases:
        varying = tuple((n, i) for (b, i), n in self._numbers.items() if b is Base.REGISTER and i not in self._loader.weights)
        sizes = {n: size for (b, i), n in self._numbers.items() if (size := self._size(b, i))}
        return Bases(len(self._numbers), varying, self._numbers.get((Base.ARENA, 0)), sizes)

    def _size(self, base: Base, index: int) -> int | None:
        """Return the number of bytes of a constant or a weight. Return None for other bases, and for a weight of unknown size."""
        if base is Base.CONSTANT:
            return self._loader.machine.executable.constants[index].nbytes
        spec = self._loader.source.params[index].spec if base is Base.REGISTER and index in self._loader.weights else None
        if not isinstance(spec, TensorSpec) or spec.dtype is None or spec.shape is None or any(isinstance(d, Slot) for d in spec.shape):
            return None
        return prod(d for d in spec.shape if isinstance(d, int)) * DTYPES[spec.dtype].itemsize

    def place(self, captured: Any) -> None:
        """Set the tensors of bases that do not change between runs: constants now, weights whenever they are bound."""
        for (base, index), number in self._numbers.items():
            if base is Base.CONSTANT:
                captured.place(number, self._loader.constant(index))
        bound = [
            (n, i - self._loader.weights.start) for (b, i), n in self._numbers.items() if b is Base.REGISTER and i in self._loader.weights
        ]

        def on_bind(values: list[Any]) -> None:
            for number, weight in bound:
                captured.place(number, values[weight])

        if bound:
            self._loader.function.on_bind.append(on_bind)
