"""Runs hostile calls between guard pages: `python -m tests.compiler.ops.hostile.run FIRST LAST [TARGET...] [--trusting]`.

A target is a row of `table.py`, which is an operator with random sizes and attributes, or a case of `cases.py`, a valid call whose indices
are overwritten. Draw `seed` attacks the target with the index `seed % number of targets`. Its program is compiled once and called CALLS
times, each time with new indices and, for a row of `table.py`, other sizes. Its line is printed before it runs, and afterwards the counts
of its outcomes, with what is wrong. A signal ends the process, so the last line names the draw that caused it. `--trusting` leaves out the
safe copies of indices.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.module import IRModule
from compiler.ir.text.printer import print_module
from compiler.passes import legalize
from runtime.errors import OutOfMemory, RuntimeFault
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.ops.conftest import close
from tests.compiler.ops.hostile import table
from tests.compiler.ops.hostile.cases import CASES
from tests.compiler.ops.hostile.draws import ROWS, Draw
from tests.compiler.random_programs.guarded import Walls
from tests.compiler.random_programs.programs import Unfit

assert table  # the import registers all rows

CALLS = 3
MOST_BYTES = 8 << 30  # of address space; guards take up 32 MiB per block
MOST_S = 60  # of computation; a draw that takes longer ends the process by SIGVTALRM
TARGETS = [*sorted(ROWS), *CASES]


@dataclass(frozen=True, slots=True)
class Refused:
    message: str


def interpreted(module: IRModule, inputs: tuple[Any, ...]) -> Any:
    try:
        with np.errstate(all="ignore"):
            return Interpreter(module).call("main", *(np.array(a) if isinstance(a, np.ndarray) else a for a in inputs))
    except CompileError as error:
        return Refused(str(error))


def computed(executable: Executable, inputs: tuple[Any, ...], walls: Walls) -> Any:
    walls.build()
    inside = Executable(executable.meta, executable.object_code, [walls.around(c) for c in executable.constants])
    session = Session(inside, device_threads=1)
    try:
        return session.call("main", *map(walls.around, inputs))
    except OutOfMemory as error:  # an attribute asks for more than MOST_BYTES, which the interpreter need not allocate
        raise Unfit from error
    except RuntimeFault as error:
        return Refused(str(error))
    finally:
        session.close()


def difference(expected: Any, actual: Any, *, rounds: bool) -> str:
    """Say how two results differ, or return "". Refusals agree, whatever their messages say."""
    if isinstance(expected, Refused) or isinstance(actual, Refused):
        said = [r.message if isinstance(r, Refused) else "computed" for r in (expected, actual)]
        return f"the interpreter: {said[0]}; compiled code: {said[1]}" if "computed" in said else ""
    try:
        close(actual, expected, rounds=rounds)
    except AssertionError as error:
        return f"compiled code differs from the interpreter: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Attack:
    module: IRModule
    executable: Executable
    inputs: Callable[[int], tuple[Any, ...]]  # the number of a call -> its arguments
    rounds: bool  # whether the executable rounds operands to integers


@cache
def of_case(name: str) -> tuple[IRModule, Executable]:
    module = CASES[name].module()
    return module, compile_module(module)


def attack(seed: int, target: str) -> Attack:
    """Return a call of an operator with random sizes and attributes, or the case with this name. Raise CompileError if the operator refuses
    the call."""
    if target in CASES:
        case = CASES[target]
        return Attack(*of_case(target), lambda call: case.arguments(seed * CALLS + call), case.rounds)
    draw = Draw(Random(seed))
    ROWS[target](draw)
    module = draw.module(target)
    return Attack(module, compile_module(module), draw.inputs, target == "paged_attention" and draw.has(DType.I8))


def run(seed: int, target: str) -> dict[str, Any]:
    """Return the counts of outcomes, and what is wrong."""
    counts = dict[str, Any](computed=0, refused=0, uncompiled=0)
    try:
        made = attack(seed, target)
    except Unfit:
        return counts
    except CompileError:
        return {**counts, "uncompiled": CALLS}
    except Exception as error:
        return {**counts, "wrong": f"compilation: {error!r}"}
    for call in range(CALLS):
        with suppress(Unfit):
            inputs = made.inputs(call)
            outcome, wrong = call_once(made, inputs, Walls(at_end=(seed + call) % 2 == 0))
            if wrong:
                return {**counts, "wrong": f"{wrong}\n{print_module(made.module)}called with {[_text(value) for value in inputs]}"}
            counts[outcome] += 1
    return counts


def call_once(made: Attack, inputs: tuple[Any, ...], walls: Walls) -> tuple[str, str]:
    """Return the outcome of a call, and what is wrong with it, or ""."""
    try:
        expected = interpreted(made.module, inputs)
    except Exception as error:
        return "", f"interpreter: {error!r}"
    try:
        found = computed(made.executable, inputs, walls)
    except Unfit:
        raise
    except Exception as error:
        return "", f"compiled code: {error!r}"
    return "refused" if isinstance(expected, Refused) else "computed", difference(expected, found, rounds=made.rounds)


def _text(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) and value.size < 40 else value


def main(argv: list[str]) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    if "--trusting" in argv:
        legalize.with_safe_indices = lambda builder, outliner, var, call: call  # type: ignore[assignment]
    first, last, *targets = [word for word in argv if word != "--trusting"]
    targets = targets or TARGETS
    for seed in range(int(first), int(last)):
        target = targets[seed % len(targets)]
        print(f"draw {seed} {target}", flush=True)
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
        print(json.dumps(run(seed, target)), flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(sys.argv[1:])
