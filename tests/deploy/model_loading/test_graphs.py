"""For every possible batch, a graph of a suitable size is captured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from deploy.model_loading.graphs import MANY, captured_launches, prepare, sizes_of
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

STEP: dict[str, int | None] = {"t": 512, "s": 8, "r": 8, "h": 8, "m": 40, "p": 24, "p1": 3, "pages": None}
SAMPLER: dict[str, int | None] = {"r": 8, "n": 8, "biased": None, "seen": None, "masked": 8}


def magnitude(value: int) -> int:
    return int(np.frexp(float(value))[1])


@pytest.mark.parametrize("variables", [STEP, SAMPLER])
def test_sizes_are_those_that_the_program_takes(variables: dict[str, int | None]) -> None:
    sizes = list(sizes_of(variables))
    assert len({tuple(each.items()) for each in sizes}) == len(sizes) <= 64
    for each in sizes:
        assert each.keys() == variables.keys()
        assert all(value == MANY if (most := variables[name]) is None else 0 < value <= most for name, value in each.items())


def test_each_batch_has_sizes_of_its_own_magnitude_that_cover_it() -> None:
    """For each batch there is a captured graph whose number of tokens has the same magnitude (number of bits), and whose page tables are
    less than four times as long as needed."""
    sizes = list(sizes_of(STEP))
    for t, p in itertools.product((1, 2, 3, 4, 5, 63, 64, 511, 512), (1, 2, 7, 16, 24)):
        near = [each for each in sizes if magnitude(each["t"]) == magnitude(t) and 0 <= magnitude(each["p"] or 0) - magnitude(p) < 2]
        assert near, (t, p)
        assert all(each["s"] >= min(each["t"], 8) and each["pages"] == MANY for each in near)


def test_without_variables_there_is_one_size() -> None:
    assert list(sizes_of({})) == [{}]


@needs_pycuda
def test_captured_launches_are_planned_before_and_take_no_more_memory_than_that(software_gpu: SoftwareGpu) -> None:
    """The number of captured launches is known before the capture, and the graphs take no more memory than was planned for this number.
    Here there are five graphs, for 1, 3, 7, 15 and 20 rows, with two launches each."""
    text = "func main(x: f32[t, 128]) -> object where t in 0..20 { dataflow { a = softmax(x) y = sum(a, axes=[0]) } return y }"
    executable = compile_module(parse(text), Options(get("sm_80")))
    session = Session(executable)
    session.call("main", np.ones((1, 128), np.float32))
    limits, before = session.device.limits, session.device.card_usage.num_graphs
    prepare(session, executable)
    assert captured_launches(executable) == 2 * 5
    assert session.device.card_usage.num_graphs == 5 and before == 1
    taken = limits.free_bytes - session.device.limits.free_bytes
    assert 0 < taken <= limits.launch_bytes * captured_launches(executable)
