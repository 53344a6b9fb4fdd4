"""Random programs over all operators give the same results after each pass, as machine code, after a round trip through text or through a
file, with any number of threads, and for several sizes one after another. Arguments that do not fit are refused with a named error.

These programs cover every operator. The programs of tests/compiler/passes/test_generated_programs.py have more structure: branches, calls,
and writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import Options, build, plan
from compiler.interpret import graph
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.verify.module import verify
from compiler.machine.target import NAMED, Target, host
from compiler.ops.tables import INTERPRET
from runtime.errors import RuntimeFault
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.meaning import MeaningCheck, interpret
from tests.compiler.random_programs import recipes
from tests.compiler.random_programs.programs import EXACT, RECIPES, Program, draw

assert recipes  # importing recipes registers all recipes

# --- tolerances ----------------------------------------------------------------------------------------------------------

# The error that an operator may add, relative to its result or to its operands.
STEP = {DType.F32: 2.0**-21, DType.F16: 2.0**-10, DType.BF16: 2.0**-7, DType.E4M3: 2.0**-3}
HELD = {8: 2.0**-14, 4: 2.0**-6}  # bits of the weights -> error of quantising rows, relative to the row's largest element
SMALLEST = 1e-37  # smaller numbers may be flushed to 0
RUNS = 4


@dataclass(slots=True)
class Noise:
    """The NumPy definitions of all operators, with small random errors added. Repeated runs show by how much rounding may change a result,
    and whether errors cancel or grow."""

    numbers: np.random.Generator
    # weights that some machines multiply as integers, each with its number of bits
    weights: list[tuple[Any, int]] = field(default_factory=list[tuple[Any, int]])

    def __getitem__(self, name: str) -> Callable[..., Any]:
        meaning = INTERPRET[name]

        def off(*args: Any, **attrs: Any) -> Any:
            if name in ("linear", "expert_linear"):
                args = (self.rounded(args[0], self.held(args[1], attrs)), *args[1:])
            result = self.jittered(meaning(*map(self.jittered, args), **attrs))
            if name.startswith("gelu"):  # for negative operands gelu is a small difference of large numbers
                result = (result + self.jittered(args[0]) - args[0]).astype(result.dtype)
            if name == "dequantize":
                self.weights.append((result, attrs["bits"]))
            return result

        return meaning if name in EXACT and name != "cast" else off  # a cast may round either way

    def held(self, weight: Any, attrs: Any) -> float:
        bits = [HELD[bits] for made, bits in self.weights if made is weight]
        return max([*bits, 2.0**-8 if attrs["tolerates"] == "bf16" else 0.0])

    def jittered(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.jittered, value))
        if not isinstance(value, np.ndarray) or not _is_float(value):
            return value
        step = STEP[DType.from_numpy(value.dtype)]
        return np.asarray(value * (1 + step * self.numbers.uniform(-1, 1, value.shape))).astype(value.dtype)

    def rounded(self, x: Any, part: float) -> Any:
        top = np.abs(x.astype(np.float32)).max(-1, keepdims=True, initial=0)
        return np.asarray(x + part * top * self.numbers.uniform(-1, 1, x.shape)).astype(x.dtype)


def _is_float(value: Any) -> bool:
    return value.dtype.kind in "fV"


def tolerances(program: Program, call: int, expected: Any) -> list[Any]:
    """Return for each element of the result by how much it may differ from `expected`. The bound is infinite if rounding decides between a
    finite number, infinity and NaN."""
    allowed: list[Any] = [np.zeros(e.shape) for e in expected]
    for run in range(RUNS):
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(graph, "INTERPRET", Noise(np.random.default_rng(run)))
            noisy = meaning(program.module, program, call)
            allowed = [np.asarray(np.maximum(most, _distance(n, e))) for most, n, e in zip(allowed, noisy, expected, strict=True)]
    for most, e in zip(allowed, expected, strict=True):
        if _is_float(e):
            size = np.nan_to_num(np.abs(e.astype(np.float64)), posinf=0.0)
            widest = np.max(most, initial=0, where=np.isfinite(most))
            most[...] = 6 * most + widest + 2 * STEP[DType.from_numpy(e.dtype)] * size + SMALLEST
    return allowed


def _distance(a: Any, b: Any) -> Any:
    if not _is_float(b):
        return np.zeros(b.shape)  # integers and booleans must be equal: they do not depend on rounding
    if a.shape != b.shape:
        return np.full(b.shape, np.inf)  # rounding decides how many elements are distinct
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf))


def close(actual: Any, expected: Any, allowed: Any) -> None:
    for i, (a, e, most) in enumerate(zip(actual, expected, allowed, strict=True)):
        a = np.asarray(a)
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"result {i} is {a.dtype}{a.shape}, expected {e.dtype}{e.shape}"
        if not _is_float(e):
            np.testing.assert_array_equal(a, e, f"result {i}")
            continue
        with np.errstate(invalid="ignore"):
            wrong = _distance(a, e) > most
        assert not wrong.any(), f"result {i} at {np.argwhere(wrong)[0]}: {a[wrong][0]}, expected {e[wrong][0]} +- {most[wrong][0]}"


# --- running programs and comparing results ------------------------------------------------------------------------------


def meaning(module: IRModule, program: Program, call: int, preparing: IRModule | None = None) -> Any:
    return interpret(module, program.inputs(call), program.weights, preparing)


def started(executable: Executable, program: Program, num_threads: int) -> Session:
    session = Session(executable, device_threads=num_threads)
    bind_values(session, executable, "main", program.weights)
    return session


def bits(results: Any) -> list[bytes]:
    return [np.asarray(r).tobytes() for r in results]


def meaning_check(program: Program, call: int, expected: Any, allowed: Any) -> MeaningCheck:
    def require(module: IRModule, preparing: IRModule) -> None:
        with np.errstate(all="ignore"):
            close(meaning(module, program, call, preparing), expected, allowed)

    return MeaningCheck(require)


def reads_back(module: IRModule) -> None:
    assert_equal(parse(print_module(module)), module)


def check(program: Program, target: Target, folder: Path, checked_calls: tuple[int, ...] = (0,)) -> None:
    """Compile a program for a target and compare all its calls with the interpreter, with 1 and 3 threads. After each pass, the calls
    `checked_calls` are compared, too."""
    verify(program.module)
    reads_back(program.module)
    calls = range(len(program.calls))
    with np.errstate(all="ignore"):
        expected = [meaning(program.module, program, call) for call in calls]
    allowed = [tolerances(program, call, expected[call]) for call in calls]
    options = Options(target, tuple(meaning_check(program, c, expected[c], allowed[c]) for c in checked_calls))
    planned = plan(program.module, options).module
    reads_back(planned)
    executable = build(planned, options, {})
    if not target.can_run_here:
        return
    executable.save(folder / "x.rsx")
    found: list[list[list[bytes]]] = []
    for num_threads, code in ((1, executable), (3, Executable.load(folder / "x.rsx"))):
        session = started(code, program, num_threads)
        rounds = []
        for call in (*calls, *calls):
            arguments = [a.copy() if isinstance(a, np.ndarray) else a for a in program.inputs(call)]
            results = session.call("main", *arguments)
            close(results, expected[call], allowed[call])
            assert bits(arguments) == bits(program.inputs(call)), "an argument was overwritten"
            rounds.append(bits(results))
        assert rounds[: len(calls)] == rounds[len(calls) :], f"{num_threads} threads: repeated calls give other bits"
        found.append(rounds)
        if num_threads == 1:
            refused(session, program)
        session.close()
    assert found[1] == found[0], "the bits depend on the number of threads"


def refused(session: Session, program: Program) -> None:
    """Require that the session refuses arguments of undeclared sizes with a RuntimeFault, if the interpreter refuses them, too."""
    for wrong in wrong_arguments(program):
        try:
            interpreted = Interpreter(program.module).call("main", *wrong, *program.weights.values())
        except Exception:  # a MismatchError on entry, or NumPy's own error if an operator does the check
            with pytest.raises(RuntimeFault):
                session.call("main", *wrong)
        else:
            try:
                session.call("main", *wrong)  # the wrong sizes may be valid by chance
            except RuntimeFault:
                assert interpreted is not None


def wrong_arguments(program: Program) -> Iterator[list[Any]]:
    given = list(program.inputs(1))
    for i, argument in enumerate(given):
        if isinstance(argument, np.ndarray):
            longer = np.concatenate([argument, argument[:1]]) if argument.ndim and len(argument) else argument[None]
            other = np.float32 if argument.dtype != np.float32 else np.int32
            with np.errstate(all="ignore"):
                values = [
                    longer,
                    argument[None],
                    argument.astype(other),
                    argument.tolist(),
                    None,
                    argument[..., :-1].copy() if argument.ndim else 3,
                ]
            for value in values:
                yield [*given[:i], value, *given[i + 1 :]]
    yield given[:-1]


# --- the tests -----------------------------------------------------------------------------------------------------------


def test_every_operator_is_drawn():
    """Every operator has a recipe, except for operators that only passes create and operators whose operands must fit each other. Both
    kinds have their own tests."""
    made = {"panel_integers", "panel_scales", "integer_linear", "quantize_rows", "row_planes", "panel_multipliers", "widened_linear"}
    made |= {"expert_integer_linear", "expert_widened_linear"}
    states = {"state_read", "state_write", "conv_taps", "causal_conv", "input_tails", "state_scan"}
    others = {"kv_append", "key_append", "paged_attention", "ragged_attention", "ragged_mean", "ragged_max", "scatter_inplace"}
    others |= {"sample", "token_logprobs", "refine_groups", "group_errors", "round_groups", *states}
    ours = {name for name in OPS if "." not in name}  # operators that tests define have a dot in the name
    assert {name for name in RECIPES if name in OPS} == ours - made - others


# The first 18 programs always run; the others are marked slow.
SEEDS = [*range(18), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(18, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_keeps_its_meaning(seed: int, tmp_path: Path):
    targets = [host(), *NAMED.values()]
    target = targets[seed % len(targets)]
    program = draw(seed, recipes=3 + seed % 8, special=seed % 4 == 3, halves=target.has_f16)
    try:
        check(program, target, tmp_path)
    except Exception as error:
        error.add_note(str(program))
        raise
