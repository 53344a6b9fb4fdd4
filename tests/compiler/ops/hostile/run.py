"""Runs hostile calls between guard pages: `python -m tests.compiler.ops.hostile.run FIRST LAST [OPERATOR]`.

Draw `seed` calls the operator with the index `seed % number of operators`, or the named operator. The program is compiled once and called
CALLS times, each time with new indices and other sizes. Its line is printed before it runs, and its outcome afterwards: what is wrong, or
nothing. A signal ends the process, so the last line names the draw that caused it.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.errors import CompileError
from compiler.ir.module import IRModule
from compiler.ir.text.printer import print_module
from runtime.errors import RuntimeFault
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.ops.hostile import table
from tests.compiler.ops.hostile.draws import ROWS, Draw
from tests.compiler.random_programs.guarded import Walls
from tests.compiler.random_programs.programs import Unfit

assert table  # the import registers all rows

CALLS = 3
MOST_BYTES = 8 << 30  # of address space; guards take up 32 MiB per block
MOST_S = 60  # of computation; a draw that takes longer ends the process by SIGVTALRM
# Largest difference of floats, relative to the largest element. Elements are small, so that most sums are exact.
TOLERANCE = 2e-2


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
    except RuntimeFault as error:
        return Refused(str(error))
    finally:
        session.close()


def difference(expected: Any, actual: Any) -> str:
    """Say how two results differ, or return "". Refusals agree, whatever their messages say."""
    if isinstance(expected, Refused) or isinstance(actual, Refused):
        said = [r.message if isinstance(r, Refused) else "computed" for r in (expected, actual)]
        return f"the interpreter: {said[0]}; compiled code: {said[1]}" if "computed" in said else ""
    if isinstance(expected, tuple):
        return next((d for e, a in zip(expected, actual, strict=True) if (d := difference(e, a))), "")
    if not isinstance(expected, np.ndarray):
        return "" if expected == actual else f"the interpreter: {expected}; compiled code: {actual}"
    e, a = expected, np.asarray(actual)
    if (e.shape, e.dtype) != (a.shape, a.dtype):
        return f"the interpreter: {e.dtype}{e.shape}; compiled code: {a.dtype}{a.shape}"
    e, a = (x.astype(np.float64) if x.dtype.kind in "fV" else x for x in (e, a))
    finite = np.abs(np.where(np.isfinite(e), e, 0)).max(initial=1.0) if e.dtype == np.float64 else 0
    same = np.isclose(a, e, TOLERANCE, TOLERANCE * finite, equal_nan=True) if e.dtype == np.float64 else a == e
    return "" if np.all(same) else f"the interpreter: {e[~same][:4].tolist()}; compiled code: {a[~same][:4].tolist()}"


def run(seed: int, op: str) -> dict[str, Any]:
    """Return the counts of outcomes, and what is wrong."""
    draw, counts = Draw(Random(seed)), dict[str, Any](computed=0, refused=0, uncompiled=0)
    try:
        ROWS[op](draw)
        module = draw.module(op)
        executable = compile_module(module)
    except Unfit:
        return counts
    except CompileError:
        return {**counts, "uncompiled": CALLS}
    except Exception as error:
        return {**counts, "wrong": f"compilation: {error!r}"}
    for call in range(CALLS):
        try:
            inputs = draw.inputs(call)
        except Unfit:
            continue
        text = f"\n{print_module(module)}called with {[a.tolist() if isinstance(a, np.ndarray) and a.size < 40 else a for a in inputs]}"
        try:
            expected = interpreted(module, inputs)
        except Exception as error:
            return {**counts, "wrong": f"interpreter: {error!r}{text}"}
        try:
            found = difference(expected, computed(executable, inputs, Walls(at_end=call % 2 == 0)))
        except Exception as error:
            return {**counts, "wrong": f"compiled code: {error!r}{text}"}
        if found:
            return {**counts, "wrong": found + text}
        counts["refused" if isinstance(expected, Refused) else "computed"] += 1
    return counts


def main(argv: list[str]) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    first, last, operators = int(argv[0]), int(argv[1]), argv[2:] or sorted(ROWS)
    for seed in range(first, last):
        op = operators[seed % len(operators)]
        print(f"draw {seed} {op}", flush=True)
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
        print(json.dumps(run(seed, op)), flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(sys.argv[1:])
