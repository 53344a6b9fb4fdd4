"""Runs programs with false annotations between guard pages: `python -m tests.compiler.random_programs.guarded FIRST LAST`.

Arguments, weights, constants, the planned arena and each single allocation lie between pages without access. In one run they end where the
upper guard begins, in another they begin where the lower guard ends. An access outside of them ends the process with SIGSEGV. The number of
each program is printed before it runs, and its outcome afterwards. `--trusting` leaves out the checks that the compiler inserts.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

import runtime.device.cpu.device
from compiler.backends import pipeline
from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.errors import CompileError
from compiler.ir.module import IRModule
from runtime.errors import OutOfMemory, RuntimeFault
from runtime.executable import Arg, Executable
from runtime.session import Session
from runtime.vm.builtins import BUILTINS
from runtime.vm.machine import Frame, Loader, Step
from tests.compiler.random_programs import recipes
from tests.compiler.random_programs.false_facts import BOUNDARIES, falsified
from tests.compiler.random_programs.programs import Program, Unfit, draw

assert recipes  # the import registers all recipes

GUARD = 16 << 20  # bytes of each guard; no false annotation here leads to an access beyond it
PAGE = mmap.PAGESIZE
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Walls:
    """Allocates blocks between guard pages. With `at_end`, a block ends where the upper guard begins; otherwise a block begins where the
    lower guard ends."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end

    def block(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate a block between guard pages. If `num_bytes` is a multiple of 64, so is the block's address."""
        inside = max(PAGE, -(-num_bytes // PAGE) * PAGE)
        try:
            mapping = mmap.mmap(-1, inside + 2 * GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:  # the campaign limits the address space, and an attribute may ask for more
            raise OutOfMemory("guarded block", required=inside) from error
        whole = np.frombuffer(mapping, np.uint8)
        for begin in (0, GUARD + inside):
            if _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + begin), ctypes.c_size_t(GUARD), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = GUARD + (inside - num_bytes if self.at_end else 0)
        return whole[start : start + num_bytes]

    def around(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        block = self.block(value.nbytes)
        block[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return block.view(value.dtype).reshape(value.shape)

    def build(self) -> None:
        """Make the runtime allocate all memory between guard pages from now on."""
        runtime.device.cpu.device.host_buffer = self.block  # type: ignore[assignment]
        allocate = ALLOCATE

        def alloc(loader: Loader, args: tuple[Arg, ...], dst: int | None) -> Step:
            step = allocate(loader, args, dst)

            def guarded(frame: Frame) -> int | None:
                target = step(frame)
                if dst is not None:
                    frame.registers[dst] = self.around(frame.registers[dst])
                return target

            return guarded

        BUILTINS["alloc"] = alloc


ALLOCATE = BUILTINS["alloc"]


def outcome(executable: Executable, program: Program, inputs: tuple[Any, ...], walls: Walls) -> str:
    """Run a program in a new session, whose arena then has exactly the size that the call needs, and return the outcome as text."""
    walls.build()
    inside = Executable(executable.meta, executable.object_code, [walls.around(c) for c in executable.constants])
    session = Session(inside, device_threads=1)
    try:
        bind_values(session, inside, "main", {name: walls.around(w) for name, w in program.weights.items()})
        session.call("main", *map(walls.around, inputs))
    except RuntimeFault:
        return "refused"
    finally:
        session.close()
    return "computed"


def meaning(module: IRModule, program: Program, inputs: tuple[Any, ...]) -> str:
    try:
        with np.errstate(all="ignore"):
            Interpreter(module).call("main", *(np.array(a) if isinstance(a, np.ndarray) else a for a in inputs), *program.weights.values())
    except (CompileError, ValueError, IndexError):  # NumPy raises ValueError or IndexError if it refuses the operands of an operator
        return "refused"
    return "computed"


def run(seed: int) -> dict[str, Any]:
    random = Random(seed)
    boundary = BOUNDARIES[seed % len(BOUNDARIES)]
    program = draw(seed, recipes=4)
    compiled = next(_compiled(program, boundary, random), None)
    if compiled is None:
        return {"boundary": boundary, "calls": []}
    module, executable = compiled
    calls: list[tuple[str, str]] = []
    for number in range(len(program.calls)):
        inputs = program.inputs(number)
        if boundary == "entry":
            inputs = tuple(_cut(a, random) for a in inputs)
        expected = meaning(module, program, inputs)
        calls += [(expected, outcome(executable, program, inputs, Walls(at_end))) for at_end in (True, False)]
    return {"boundary": boundary, "calls": calls}


def _compiled(program: Program, boundary: str, random: Random) -> Iterator[tuple[IRModule, Executable]]:
    """Yield up to 12 programs with a false annotation, each with its executable. Skip a program if the compiler proves that the annotation
    is false."""
    for _ in range(12):
        with suppress(Unfit, CompileError):
            module = program.module if boundary == "entry" else falsified(program, boundary, random)
            yield module, compile_module(module)


def _cut(value: Any, random: Random) -> Any:
    """Return the argument unchanged or, in half of the cases, a copy with another extent on one axis."""
    if not isinstance(value, np.ndarray) or not value.ndim or random.random() < 0.5:
        return value
    shape = list(value.shape)
    axis = random.randrange(len(shape))
    shape[axis] = max(0, shape[axis] + random.choice([-1, 1, 8]))
    return np.resize(value, shape) if value.size else np.zeros(shape, value.dtype)


def main(argv: list[str]) -> None:
    faulthandler.enable()
    first, last = int(argv[0]), int(argv[1])
    trusting = "--trusting" in argv
    if trusting:
        pipeline.check_facts = lambda module: module  # type: ignore[assignment]
    for seed in range(first, last):
        print(f"program {seed}", flush=True)
        # Without the checks, NumPy may refuse a negative extent before a program accesses memory.
        with suppress(ValueError) if trusting else nullcontext():
            print(json.dumps(run(seed)), flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(sys.argv[1:])
