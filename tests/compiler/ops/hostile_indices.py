"""Run operators on hostile indices, between guard pages: `python -m tests.compiler.ops.hostile_indices DRAWS [--trusting]`.

Each draw overwrites some elements of the index operands with numbers outside their ranges. The compiled program must refuse what the
interpreter refuses, and must otherwise compute the same. An access outside of the operands ends the process with SIGSEGV. The operator and
the number of the draw are printed before each draw that does not succeed. `--trusting` leaves out what makes indices safe ahead of nests.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.types import ScalarType
from compiler.ops.indices import Treatment
from compiler.ops.tables import INDICES, OPERANDS
from compiler.passes import legalize
from runtime.errors import RuntimeFault
from runtime.executable import Executable
from runtime.sampling import SHARE_ONE, Number, Setting
from runtime.session import Session
from tests.compiler.ops.conftest import close, operand, program
from tests.compiler.ops.test_compiled import CASES as COMPILED
from tests.compiler.random_programs.guarded import Walls

Case = tuple[str, tuple[Any, ...], str | None, dict[str, Any]]
CASES: dict[str, tuple[tuple[Any, ...], str | None, dict[str, Any]]] = {**COMPILED}  # type: ignore[dict-item]
RNG = np.random.default_rng(5)
ROWS, VOCAB = 4, 130
PAGED = "t 4 {0}, 2 2 p 2 {1}, s m, t, t"


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


def ints(*values: Any) -> Any:
    return np.array(values, np.int32)


def sampling() -> Iterator[Case]:
    numbers, settings = np.zeros((ROWS, len(Number)), np.float32), np.zeros((ROWS, len(Setting)), np.int64)
    numbers[:] = [1.0, np.inf, 1.1, 0.1, 0.2]
    settings[:] = [7, 3, 0, 0, SHARE_ONE, SHARE_ONE, 1, 3, 0]
    lists = [ints(0, 1, 2, 4, 4), ints(5, 9, 0, 129), floats(4)]
    seen = [ints(0, 2, 2, 3, 4), ints(5, 9, 0, 129), ints(0, 1, 2, 3)]
    masks = RNG.integers(-(2**31), 2**31, (2, 5), dtype=np.int64).astype(np.int32)
    yield "sample", (floats(ROWS, VOCAB), ints(3, 0, 1, 2), numbers, settings, *lists, *seen, masks), None, {}
    yield "token_logprobs", (floats(ROWS, VOCAB), ints(3, 0, 1, 2), ints(0, 129, 7, 8), ints(0, 20, 3, 1)), None, {}


def attention() -> Iterator[Case]:
    tokens, ids, starts = 19, np.repeat(ints(0, 1, 2), [5, 2, 12]), ints(0, 5, 7, 19)
    q = floats(tokens, 3, 8)
    yield "ragged_attention", (q, q, q, ids, starts), "t 3 8, t 3 8, t 3 8, t, n", {"scale": 0.4}
    for name in ("ragged_mean", "ragged_max"):
        yield name, (floats(tokens, 6), starts), "t 6, n", {}
    conv = floats(tokens, 5), floats(3, 5), floats(3, 2, 5), ids, starts
    yield "causal_conv", conv, "t 5, 3 5, s 2 5, t, u", {}
    yield "input_tails", (conv[0], *conv[2:], ints(4, 6, 18)), "t 5, s 2 5, t, u, m", {}
    tables, seq_ids = RNG.permutation(12).reshape(2, 6).astype(np.int32), np.repeat(ints(0, 1), [1, 18])
    positions = np.concatenate([ints(90), np.arange(60, 78, dtype=np.int32)])
    for dtype in (np.float32, ml_dtypes.bfloat16):
        of = floats(19, 4, 64, dtype=dtype), floats(2, 2, 12, 2, 1024, dtype=dtype), tables, seq_ids, positions, 1
        yield "paged_attention", of, PAGED.format(64, 1024), {"scale": 0.1, "window": 40}
    bytes_ = RNG.integers(-127, 128, (2, 2, 12, 2, 1024)).astype(np.int8)
    scales = np.abs(floats(2, 2, 12, 2, 16)) / 100
    of = floats(19, 4, 64), bytes_, tables, seq_ids, positions, 1, scales
    yield "paged_attention", of, PAGED.format(64, 1024) + ", 2 2 p 2 16", {"scale": 0.1}
    new = floats(3, 2, 64), floats(3, 2, 64)
    yield "kv_append", (bytes_, *new, ints(3, 190, 16), 1, scales), "2 2 p 2 1024, t 2 64, t 2 64, t, 2 2 p 2 16", {}


def cases() -> list[Case]:
    return [*sampling(), *attention(), *((name, *CASES[name]) for name in CASES if name in INDICES)]


# --- one case ----------------------------------------------------------------------------------------------------------


def module_of(name: str, values: tuple[Any, ...], shapes: str | None, attrs: dict[str, Any]) -> IRModule:
    """Return a program of one call. An index that is a number becomes a parameter of the program."""
    given, dims, atoms = [s.strip() for s in shapes.split(",")] if shapes else [], dict[str, DimVar](), list[Atom]()
    for operand_name, value in zip(OPERANDS[name], values, strict=False):
        shape = given.pop(0) if isinstance(value, np.ndarray) and given else None
        is_index = isinstance(value, int) and operand_name in INDICES.get(name, {})
        atoms.append(Var(operand_name, ScalarType(DType.I64)) if is_index else operand(value, shape, dims, operand_name))
    return program(OPS[name], atoms, attrs)


def hostile(name: str, values: tuple[Any, ...], attrs: dict[str, Any], rng: np.random.Generator) -> tuple[Any, ...]:
    """Return the operands with some indices replaced."""
    found = dict(zip(OPERANDS[name], values, strict=False))
    shapes = {operand_name: np.shape(value) for operand_name, value in found.items()}
    for operand_name, declared in INDICES[name].items():
        if operand_name not in found:
            continue
        bound = declared.bound_of(shapes, {**OPS[name].attributes, **attrs})
        if declared.treatment is Treatment.CHECKED:
            if rng.random() < 0.1:
                found[operand_name] = int(rng.choice([-1, bound, bound + 1, 2**63 - 1, -(2**63)]))
            continue
        array = found[operand_name].copy()
        for column, most in bound.items() if isinstance(bound, dict) else [(None, bound)]:
            _overwrite(array if column is None else array[:, column], most, rng)
        found[operand_name] = array
    return tuple(found.values())


def _overwrite(array: Any, bound: int, rng: np.random.Generator) -> None:
    limits = np.iinfo(array.dtype)
    pool = [limits.min, limits.max, limits.min + 1, -1, -16, bound, bound + 1, bound - 1, 0]
    fits = [n for n in pool if limits.min <= n <= limits.max]
    for at in np.ndindex(array.shape):
        kind = rng.random()
        if kind < 0.3:
            array[at] = fits[rng.integers(len(fits))]
        elif kind < 0.5:
            array[at] = rng.integers(limits.min, limits.max, dtype=array.dtype)


def check(case: Case, draws: range) -> int:
    """Return the number of refused draws."""
    name, values, _, attrs = case
    module, refused = module_of(*case), 0
    executable = compile_module(module)
    for at_end in (True, False):
        walls = Walls(at_end)
        walls.build()
        inside = Executable(executable.meta, executable.object_code, [walls.around(c) for c in executable.constants])
        session = Session(inside, device_threads=1)
        for draw in draws:
            if draw % 2 == at_end:
                given = hostile(name, values, attrs, np.random.default_rng([draw, crc32(name.encode())]))
                print(f"{name} {draw}", file=sys.stderr, flush=True)
                arrays = [v for v in given if isinstance(v, np.ndarray | int)]
                refused += _agrees(module, session, arrays, walls, rounds=name == "paged_attention" and values[1].dtype == np.int8)
        session.close()
    return refused


def _agrees(module: IRModule, session: Session, given: list[Any], walls: Walls, *, rounds: bool) -> bool:
    """Require that the interpreter and the compiled program agree. Return whether they refuse. If the program `rounds` queries and weights
    to integers, its results may differ by a thousandth of the largest."""
    try:
        expected = Interpreter(module).call("main", *given)
    except CompileError as error:
        expected = error
    try:
        found = session.call("main", *map(walls.around, given))
    except RuntimeFault as error:
        assert isinstance(expected, CompileError), f"refused: {error}"
        return True
    assert not isinstance(expected, CompileError), f"computed, but the interpreter: {expected}"
    if rounds:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    else:
        close(found, expected)
    return False


def main(argv: list[str]) -> None:
    faulthandler.enable()
    if "--trusting" in argv:
        legalize.with_safe_indices = lambda builder, outliner, var, call: call  # type: ignore[assignment]
    for case in cases():
        refused = check(case, range(int(argv[0])))
        print(f"{case[0]}: {argv[0]} draws, {refused} refused", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
