"""Launch a kernel: parse its PTX, compile it for the software GPU, and run the blocks of its grid, wave by wave."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.instructions import arithmetic, barriers, clusters, copies, matrices, mbarriers, memory, moves, warpgroups, warps
from tests.gpu.ptx.memory import Memory
from tests.gpu.ptx.program import Assembler, Program
from tests.gpu.ptx.text import Module, parse
from tests.gpu.ptx.wave import PATIENCE, Launch, Wave

# importing these modules registers all instructions
TABLES = (arithmetic, barriers, clusters, copies, matrices, mbarriers, memory, moves, warpgroups, warps)

THREADS_PER_WAVE = 1 << 15
SHARED_PER_WAVE = 1 << 26
Size = tuple[int, int, int]


@dataclass(slots=True)
class LoadedModule:
    """A module of PTX that is loaded into device memory. A kernel is compiled at its first launch."""

    module: Module
    memory: Memory
    globals: dict[str, int] = field(default_factory=dict)  # name of a global variable -> its address
    programs: dict[str, Program] = field(default_factory=dict)

    def program(self, name: str) -> Program:
        if name not in self.programs:
            self.programs[name] = Assembler(self.module, self.module.kernels[name], self.globals).program()
        return self.programs[name]


def arch_of(target: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", target)
    return int(digits[:-1]), int(digits[-1])


@lru_cache(maxsize=4)  # sessions of a test load one text again and again, and each card of several loads it
def _read(ptx: str) -> tuple[Module, dict[str, Program]]:
    """Return the parsed text, and a dictionary for its kernels, which are the same in each load if they know no address of a global
    variable."""
    return parse(ptx), {}


def load(ptx: str, memory: Memory) -> LoadedModule:
    module, programs = _read(ptx)
    has_globals = any(variable.space in ("global", "const") for variable in module.variables)
    loaded = LoadedModule(module, memory, programs={} if has_globals else programs)
    for variable in loaded.module.variables:
        if variable.space in ("global", "const"):
            address = memory.allocate(variable.num_bytes)
            if address is None:
                raise Fault(f"no memory is left for the {variable.num_bytes} bytes of the variable {variable.name}")
            loaded.globals[variable.name] = address
            memory.span(address, variable.num_bytes)[:] = np.frombuffer(variable.initial or bytes(variable.num_bytes), np.uint8)
    return loaded


def launch(
    loaded: LoadedModule,
    name: str,
    grid: Size,
    block: Size,
    parameters: bytes,
    *,
    dynamic_bytes: int = 0,
    seed: int = 0,
    arch: tuple[int, int] | None = None,
    patience: int = PATIENCE,
    uneven: int | None = None,
    number: int = 1,
    since: int | None = None,
) -> None:
    """Run all blocks of a grid to their end. `Launch` describes the options. With seed 0, blocks run in order and asynchronous work runs
    late; other seeds draw random orders."""
    program = loaded.program(name)
    card = arch or arch_of(loaded.module.target)
    history = loaded.memory.history
    what = Launch(program, grid, block, parameters, dynamic_bytes, loaded.memory, card, patience, uneven, number, since, history.time)
    random = np.random.default_rng(seed) if seed else None
    count, cluster = grid[0] * grid[1] * grid[2], program.cluster
    if grid[0] % cluster:
        raise Fault(f"{name}: {grid[0]} blocks do not form clusters of {cluster}")
    order = np.arange(count // cluster) if random is None else random.permutation(count // cluster)
    order = (order[:, None] * cluster + np.arange(cluster)).reshape(-1)
    shared = program.static_bytes + dynamic_bytes
    at_once = max(1, min(THREADS_PER_WAVE // what.threads_per_block, SHARED_PER_WAVE // max(shared, 1)) // cluster) * cluster
    with np.errstate(all="ignore"):
        for start in range(0, count, at_once):
            wave = Wave(what, np.sort(order[start : start + at_once]), random)
            try:
                wave.run()
            except Fault as fault:
                raise Fault(f"{name}: {fault}") from fault
            finally:
                history.time = wave.shadow.next_time()
