"""The routing of a mixture of experts on a GPU chooses the experts of the interpreter, whatever ties and special numbers there are, and
groups rows as it does. Mistakes in its kernels are noticed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.errors import DeviceFault
from runtime.executable import Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.runtime.device.cuda.test_sabotage import Mistake, limit_blocks

pytestmark = needs_pycuda

SHARES = """
    e = top_experts({judged}, k={k})
    g = gather(s, e, axis=1)
    n = sum(g, axes=[1], keepdims=true)
    shares = divide(g, n)
    rows = group_rows(e, count={count})
    out = (e, shares, rows)"""
FORMS = {
    "softmax": "s = softmax(x)" + SHARES.replace("{judged}", "s"),
    "bias": "s = sigmoid(x) z = add(s, b)" + SHARES.replace("{judged}", "z"),
}


def program(form: str, count: int, k: int) -> str:
    body = FORMS[form].format(count=count, k=k)
    return f"func main(x: f32[t, {count}], b: f32[{count}]) -> object where t in 0..256 {{ dataflow {{ {body} }} return out }}"


@cache
def executable(text: str, target: str = "sm_90a") -> Executable:
    return compile_module(parse(text), Options(get(target)))


def scores(rows: int, count: int, seed: int = 0) -> list[NDArray[Any]]:
    """Return scores with many ties, and biases. Some rows have only one score, or numbers that are not finite."""
    rng = np.random.default_rng(seed)
    x = np.round(rng.standard_normal((rows, count)).astype(np.float32), 1)
    x[1::5] = 0.5
    x[2::7, ::2] = -0.0
    return [x, np.round(rng.standard_normal(count).astype(np.float32), 1)]


def flat(found: Any) -> list[NDArray[Any]]:
    return [array for part in found for array in (flat(part) if isinstance(part, tuple | list) else [part])]


def check(text: str, args: list[NDArray[Any]], target: str = "sm_90a") -> None:
    found, meant = flat(Session(executable(text, target)).call("main", *args)), flat(Interpreter(parse(text)).call("main", *args))
    for number, (a, b) in enumerate(zip(found, meant, strict=True)):
        if b.dtype == np.int32:
            np.testing.assert_array_equal(a, b, err_msg=f"result {number}")
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 33, 256])
@pytest.mark.parametrize(("form", "count", "k"), [("softmax", 8, 2), ("bias", 40, 3)])
def test_experts_are_those_of_the_interpreter(form: str, count: int, k: int, rows: int, software_gpu: SoftwareGpu) -> None:
    check(program(form, count, k), scores(rows, count))


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "k", "target"), [(128, 8, "sm_90a"), (1, 1, "sm_90a"), (64, 64, "sm_90a"), (300, 5, "sm_80")])
def test_every_number_of_experts(count: int, k: int, target: str, software_gpu: SoftwareGpu) -> None:
    """As many as a mixture has, one, all, and a number that leaves lanes without experts in the last turn."""
    check(program("bias", count, k), scores(6, count), target)


@pytest.mark.gpu
def test_numbers_that_are_not_finite_have_their_place(software_gpu: SoftwareGpu) -> None:
    """NaN ranks last, beside -infinity, and experts with equal scores rank by their numbers."""
    text = "func main(x: f32[t, 40]) -> object where t in 0..256 { dataflow { e = top_experts(x, k=6) } return e }"
    x, _ = scores(40, 40)
    x[3, :] = np.nan
    x[4, ::3], x[4, 1::3] = np.nan, -np.inf
    x[5, 7], x[5, 30] = np.inf, np.inf
    x[6, :] = -np.inf
    x[8, 10:] = np.nan
    np.testing.assert_array_equal(Session(executable(text)).call("main", x), Interpreter(parse(text)).call("main", x))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 127, 171, 256])
def test_rows_of_few_experts_and_of_bad_ones_are_grouped(rows: int, software_gpu: SoftwareGpu) -> None:
    """Most experts have no rows, and experts that do not exist count as the nearest one that does. With more than 170 tokens, a thread
    loads choices several times."""
    text = "func main(e: i32[t, 3]) -> object where t in 0..256 { dataflow { y = group_rows(e, count=9) } return y }"
    rng = np.random.default_rng(rows)
    check(text, [rng.choice(np.array([4, 5, 5, -3, 99, -(1 << 31)], np.int32), (rows, 3))])


def test_routing_is_two_launches(software_gpu: SoftwareGpu) -> None:
    kernels = executable(program("softmax", 8, 2)).meta.kernels
    assert [(kernel.name, len(kernel.phases)) for kernel in kernels] == [("group_rows", 1), ("route", 1)]


def test_a_token_has_the_same_bits_alone(software_gpu: SoftwareGpu) -> None:
    session, (x, b) = Session(executable(program("softmax", 8, 2))), scores(33, 8)
    together = session.call("main", x, b)
    for first, end in ((0, 1), (1, 4), (30, 33)):
        for a, whole in zip(session.call("main", x[first:end], b)[:2], together, strict=False):
            np.testing.assert_array_equal(a, whole[first:end])


def test_few_blocks_compute_many_rows(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that computes several rows, or groups several experts, uses its shared memory again."""
    limit_blocks(monkeypatch, 2)
    check(program("bias", 40, 3), scores(33, 40))


LAST_BARRIER = r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[\s\S])*?redux\.sync\.{})"  # before the first reduction of a kind
MISTAKES = {
    "keys read before all lanes have written them": Mistake(LAST_BARRIER.format("max"), "", "a race", 0),
    "counts summed before all threads have written them": Mistake(LAST_BARRIER.format("add"), "", "a race", 0),
    "a sum over the threads before that not all lanes add to": Mistake(r"(shfl\.sync\.up\.b32.*), -1;", r"\1, 255;", "lanes", 0),
    "a choice that not all lanes make": Mistake(
        r"redux\.sync\.max\.s32 (%r\d+), (%r\d+), -1;", r"redux.sync.max.s32 \1, \2, 1;", "lanes", 0
    ),
    "no wait for the kernels that were launched before": Mistake(
        r"griddepcontrol\.wait;", "", r"reads before griddepcontrol\.wait what launch \d+ wrote"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_a_fault(mistake: Mistake, software_gpu: SoftwareGpu) -> None:
    made = executable(program("softmax", 40, 3))
    broken = replace(made, object_code=mistake.made_in(made.object_code.decode()).encode())
    with pytest.raises(DeviceFault):
        Session(broken).call("main", *scores(33, 40))
    assert re.search(mistake.fault, software_gpu.faults[-1]), software_gpu.faults[-1]
