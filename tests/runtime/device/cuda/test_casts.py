"""A GPU rounds f32 to bf16 by one instruction, and gets the bits of the interpreter, which rounds by NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]

CAST = 'func main(x: f32[n]) -> object where n in 0..8192 { dataflow { y = cast(x, dtype="bf16") } return y }'
PRODUCT = "func main(x: bf16[n], y: bf16[n]) -> object where n in 0..8192 { dataflow { z = multiply(x, y) w = add(z, x) } return w }"
TIES = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800000]  # halfway to even and to odd, near it, to infinity
DENORMAL = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF, 0x800000]
NANS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF]


def numbers() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return f32 of every magnitude, and those that are hard to round."""
    hard = np.array([*TIES, *DENORMAL, *NANS], np.uint32)
    drawn = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    return np.concatenate([hard, hard | 0x80000000, drawn]).view(np.float32)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_numbers_are_rounded_to_the_nearest_and_every_nan_becomes_one(target: str, software_gpu: SoftwareGpu) -> None:
    executable, x = compile_module(parse(CAST), Options(get(target))), numbers()
    assert executable.object_code.decode().count("cvt.rn.bf16.f32") == 1, "rounding takes one instruction"
    found = Session(executable).call("main", x)
    with np.errstate(all="ignore"):
        wanted = x.astype(ml_dtypes.bfloat16)
    assert (found.view(np.uint16)[np.isnan(x)] == 0x7FFF).all()
    np.testing.assert_array_equal(found.view(np.uint16)[~np.isnan(x)], wanted.view(np.uint16)[~np.isnan(x)])


def test_each_result_of_arithmetic_is_rounded(software_gpu: SoftwareGpu) -> None:
    session = Session(compile_module(parse(PRODUCT), Options(get("sm_90a"))))
    with np.errstate(all="ignore"):
        x = numbers()[:4096].astype(ml_dtypes.bfloat16)
        y = x[::-1].copy()
        found = session.call("main", x, y)
        wanted = ((x.astype(np.float32) * y.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32) + x).astype(
            ml_dtypes.bfloat16
        )
    is_number = ~np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(found.view(np.uint16)[is_number], wanted.view(np.uint16)[is_number])
    assert is_number.sum() > 3000
