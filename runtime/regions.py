"""Captured regions: launches without anything between them that needs the host, run by one native call."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from runtime.device.cpu.memory import address_of
from runtime.device.cpu.team import LaunchList, Record
from runtime.executable import Base, NativeLaunch, Region
from runtime.vm import Frame, Loader, Step


def region_step(loader: Loader, region: Region) -> Step:
    """Addresses of constants and weights are entered once, those of the arena and of other registers at each run."""
    bases = _Bases(loader)
    records: list[Record] = []
    names: list[str] = []
    for launch in region.launches:
        for record, name in _records(loader, bases, launch):
            records.append(record)
            names.append(name)
    launches = LaunchList(records, bases.count)
    bases.attach(launches)
    machine = loader.machine
    registers = bases.registers
    words = launches.bases
    arena = bases.arena

    def step(frame: Frame) -> None:
        for base, register in registers:
            words[base] = _address(loader, register, frame.registers[register])
        if arena is not None:
            words[arena] = frame.arena_address
        launches.set_heap(frame.heap_address)
        if machine.profile is None:
            machine.team.run(launches)
            return
        for name, single in zip(names, launches.singles(), strict=True):
            start = time.perf_counter()
            machine.team.run(single)
            machine.profile.add(name, time.perf_counter() - start)

    return step


def _address(loader: Loader, register: int, value: Any) -> int:
    if not isinstance(value, np.ndarray):
        raise loader.invalid(f"register {register} of a launch holds a {type(value).__name__}, not an array")
    return address_of(value)


def _records(loader: Loader, bases: _Bases, launch: NativeLaunch) -> list[tuple[Record, str]]:
    kernels = loader.machine.executable.meta.kernels
    if not 0 <= launch.kernel < len(kernels):
        raise loader.invalid(f"kernel {launch.kernel} does not exist, there are {len(kernels)}")
    kernel = kernels[launch.kernel]
    if (len(launch.operands), len(launch.dims)) != (kernel.num_buffers, kernel.num_dims):
        raise loader.invalid(
            f"kernel {kernel.name} takes {kernel.num_buffers} buffers and {kernel.num_dims} integers, "
            f"the launch has {len(launch.operands)} and {len(launch.dims)}"
        )
    buffers = tuple((bases.number(o.base, o.index), loader.slot(o.offset)) for o in launch.operands)
    dims = tuple(loader.slot(d) for d in launch.dims)
    symbol = loader.machine.symbol
    return [(Record(symbol(p.body), symbol(p.grid), buffers, dims), kernel.name) for p in kernel.phases]


class _Bases:
    """Numbers the bases of a region in order of appearance."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._numbers: dict[tuple[Base, int], int] = {}

    def number(self, base: Base, index: int) -> int:
        if base is Base.REGISTER:
            self._loader.register(index)
        elif base is Base.CONSTANT:
            self._loader.constant(index)
        return self._numbers.setdefault((base, 0 if base is Base.ARENA else index), len(self._numbers))

    @property
    def count(self) -> int:
        return len(self._numbers)

    @property
    def arena(self) -> int | None:
        return self._numbers.get((Base.ARENA, 0))

    @property
    def registers(self) -> list[tuple[int, int]]:
        """(base, register) of those whose address may differ at each run."""
        weights = self._weights()
        return [(n, i) for (b, i), n in self._numbers.items() if b is Base.REGISTER and i not in weights]

    def _weights(self) -> range:
        source = self._loader.source
        return range(len(source.inputs), len(source.params))

    def attach(self, launches: LaunchList) -> None:
        """Fill in what does not change."""
        for (base, index), number in self._numbers.items():
            if base is Base.CONSTANT:
                launches.bases[number] = address_of(self._loader.constant(index))
        weights = self._weights()
        bound = [(n, i - weights.start) for (b, i), n in self._numbers.items() if b is Base.REGISTER and i in weights]

        def on_bind(values: list[Any]) -> None:
            for number, weight in bound:
                launches.bases[number] = address_of(values[weight])

        if bound:
            self._loader.function.on_bind.append(on_bind)
