"""Attention over bf16 pages by `wgmma`: it has the same bits as the kernel by `mma.sync`, alone and in every batch, and the software GPU
notices mistakes in it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cuda.schedule import rules
from compiler.backends.cuda.schedule.attention import warpgroups
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics import wgmma_attend
from compiler.machine.target import get
from runtime.errors import DeviceFault
from runtime.executable import Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.runtime.device.cuda.test_sabotage import Mistake, limit_blocks
from tests.runtime.device.cuda.test_tensor_attention import Case

pytestmark = needs_pycuda

# A chunk with more tokens than a tile has, whose tokens see two splits; a short prompt; decode steps; another chunk of a prompt.
ROWS = (*((0, 110 + i) for i in range(37)), (1, 5), (1, 6), (2, 130), (1, 7), *((2, 131 + i) for i in range(6)))
LONG = (*((0, 252 + i) for i in range(10)), (1, 5))  # tokens that see three splits, so parts of stages are used again
CASES = {
    "two warpgroups": Case(rows=ROWS),
    "an infinite value": Case(rows=ROWS, infinite=True),
    "an infinite key": Case(heads=4, kv_heads=1, rows=ROWS[:12], infinite_key=True),
    "a window, sinks, and heads that do not divide a tile": Case(heads=6, kv_heads=1, size=32, window=20, sinks=True, rows=ROWS),
    "large heads": Case(heads=4, kv_heads=1, size=128, rows=ROWS[15:]),
    "sizes that are not powers of two": Case(heads=4, kv_heads=1, size=80, rows=ROWS[30:]),
    "one head": Case(heads=2, size=64, rows=ROWS[:-3]),
    "capped scores": Case(heads=2, kv_heads=1, size=32, softcap=1.5, rows=LONG),
    "heads of 256, in parts": Case(heads=2, kv_heads=1, size=256, window=150, rows=LONG),
    "latents": Case(heads=8, kv_heads=1, size=192, value_size=128, rows=LONG),
    "latents of several tiles, whose tokens do not divide them": Case(heads=3, kv_heads=1, size=128, value_size=128, rows=ROWS),
}


@cache
def executable(program: str) -> Executable:
    return compile_module(parse(program), Options(get("sm_90a")))


def run(executable: Executable, arguments: list[Any], rows: slice = slice(None)) -> NDArray[np.float32]:
    q, cache, tables, ids, at, *sinks = arguments
    return Session(executable).call("main", q[rows], cache, tables, ids[rows], at[rows], *sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_same_bits_as_by_other_instructions_and_in_every_batch(
    case: Case, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, by_wgmma = case.arguments(), executable(case.program)
    together = run(by_wgmma, arguments)
    np.testing.assert_allclose(together, Interpreter(parse(case.program)).call("main", *arguments), atol=1.2e-2)
    monkeypatch.setattr(rules, "schedule_warpgroup_attention", lambda prim, target: None)
    np.testing.assert_array_equal(run(compile_module(parse(case.program), Options(get("sm_90a"))), arguments), together)
    some = (slice(0, 1), slice(5, 19), slice(len(case.rows) - 9, len(case.rows)))
    for rows in some[: 2 if case.rows is LONG else 3]:
        np.testing.assert_array_equal(run(by_wgmma, arguments, rows), together[rows])


@pytest.mark.gpu
def test_blocks_of_the_second_launch_compute_several_runs(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ENOUGH = 1, the schedule takes a GPU for busy with one block, so that each block looks at up to 16 items. Here several runs are
    left for one block."""
    case = Case(heads=4, kv_heads=1, rows=(*ROWS[:12], *((s, at + i) for i in range(12) for s, at in ((1, 5), (2, 130)))))
    arguments = case.arguments()
    expected = run(executable(case.program), arguments)
    monkeypatch.setattr(warpgroups, "ENOUGH", 1)
    np.testing.assert_array_equal(run(compile_module(parse(case.program), Options(get("sm_90a"))), arguments), expected)


def test_blocks_compute_several_tiles(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with few multiprocessors has more tiles than blocks. A block reads its arguments again for each further tile."""
    case = Case(heads=4, kv_heads=1, rows=tuple((0, 110 + i) for i in range(60)))
    arguments = case.arguments()
    expected = run(executable(case.program), arguments)
    limit_blocks(monkeypatch, 1)
    np.testing.assert_array_equal(run(executable(case.program), arguments), expected)


@pytest.mark.gpu
def test_a_run_that_sees_no_keys_ends(software_gpu: SoftwareGpu) -> None:
    """The last position of each token is before its first one, in another split. There is no result, but the launch ends."""
    case = Case(heads=4, kv_heads=1, rows=ROWS[:12])
    q, cache, tables, ids, _ = case.arguments()
    program = case.program.replace("at: i32[t]", "at: i32[t, 2]")
    found = Session(executable(program)).call("main", q, cache, tables, ids, np.array([[130, 3]] * len(ids), np.int32))
    assert np.isnan(found).all()


def test_long_runs_use_wgmma() -> None:
    assert b"wgmma.mma_async" in executable(CASES["two warpgroups"].program).object_code


# --- planted mistakes ----------------------------------------------------------------------------------------------------

# A run of a whole tile, with three splits, so that stages are used again. Tokens see the middle one whole.
BROKEN = Case(heads=4, kv_heads=1, rows=tuple((0, 240 + i) for i in range(32)))
AWAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[%r\d+\], %r\d+;"
FENCE = r"fence\.proxy\.async\.shared::cta;"
OVERWRITES = "still reads|a race|a copy in flight is going to write"
MISTAKES = {
    "no fence between copied keys and tensor cores": Mistake(FENCE, "", "without fence.proxy.async", 1),
    "no fence between copied values and tensor cores": Mistake(FENCE, "", "without fence.proxy.async", 2),
    "no fence between the next keys and tensor cores": Mistake(FENCE, "", "without fence.proxy.async|a race", 3),
    "keys multiplied before they have arrived": Mistake(AWAIT, "setp.eq.u32 p, 1, 1;", "copy in flight", 0),
    "the next keys multiplied before they have arrived": Mistake(AWAIT, "setp.eq.u32 p, 1, 1;", "copy in flight|a race", 2),
    "values multiplied before they have arrived": Mistake(AWAIT, "setp.eq.u32 p, 1, 1;", "copy in flight", 1),
    "copies announced before they have ended": Mistake(
        r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64 ", "mbarrier.arrive.shared::cta.b64 _, ", "copy in flight"
    ),
    "fewer copies awaited than there are": Mistake(r"(mbarrier\.init\.shared\.b64 .*\]), 128;", r"\1, 64;", "more arrivals|in flight"),
    "weights written without a fence of wgmma": Mistake(r"wgmma\.fence\.sync\.aligned;", "", "written after the last wgmma.fence", 1),
    "scores read before their product has ended": Mistake(r"wgmma\.wait_group\.sync\.aligned 0;", "", "has not waited for", 0),
    "means read before their product has ended": Mistake(r"wgmma\.wait_group\.sync\.aligned 0;", "", "has not waited for", 1),
    "keys read as if they were not transposed": Mistake(r"(, 1, 1, 0), 1;", r"\1, 0;", "in flight"),
    "a warpgroup that keeps its turn": Mistake(r"bar\.arrive %r\d+, 256;", "", "hang|misses threads", 1),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_a_fault(mistake: Mistake, software_gpu: SoftwareGpu) -> None:
    kernel = executable(BROKEN.program)
    with pytest.raises(DeviceFault):
        run(replace(kernel, object_code=mistake.made_in(kernel.object_code.decode()).encode()), BROKEN.arguments())
    assert re.search(mistake.fault, software_gpu.faults[-1]), software_gpu.faults[-1]


TOO_EARLY = {
    "two stages": Case(heads=4, kv_heads=1, rows=LONG),
    "heads of 256, in parts": CASES["heads of 256, in parts"],
    "latents": CASES["latents"],
}


@pytest.mark.parametrize("case", TOO_EARLY.values(), ids=list(TOO_EARLY))
def test_memory_that_is_filled_before_all_warps_have_multiplied_it_is_a_fault(case: Case, software_gpu: SoftwareGpu) -> None:
    kernel = executable(case.program)
    mistake = Mistake(r"bar\.sync %r\d+, 128;", "", OVERWRITES)
    with pytest.raises(DeviceFault):
        run(replace(kernel, object_code=mistake.made_in(kernel.object_code.decode()).encode()), case.arguments())
    assert re.search(mistake.fault, software_gpu.faults[-1]), software_gpu.faults[-1]


def test_a_stage_that_is_filled_too_early_is_a_fault(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stage, the first warpgroup overwrites keys that the second one has not multiplied."""
    monkeypatch.setattr(wgmma_attend, "STAGES", 1)
    with pytest.raises(DeviceFault):
        run(compile_module(parse(BROKEN.program), Options(get("sm_90a"))), BROKEN.arguments())
    assert re.search(OVERWRITES, software_gpu.faults[-1]), software_gpu.faults[-1]
