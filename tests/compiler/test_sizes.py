"""Three kinds of sizes are refused before a call touches memory: negative sizes, sizes that are too large, and zero where the program
divides by the size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from runtime.errors import ArgumentMismatch, BoundExceeded, OutOfMemory, RuntimeFault
from runtime.memory import MemoryAccount
from runtime.session import Session

ROWS = """
func main(s: shape[n]) -> object {
  a = full(shape[n, 16], 1.0, dtype=f32)
  b = softmax(a)
  c = softmax(b)
  return c
}
"""
HUGE = 2**62 + 16  # a row has 64 bytes, so the byte count of all rows is 1024 modulo 2**64


def refusal(text: str, *args: Any, limit: int | None = None) -> RuntimeFault:
    module = parse(text)
    verify(module)
    session = Session(compile_module(module), device_threads=1, memory=MemoryAccount(limit))
    with pytest.raises(RuntimeFault) as refused:
        session.call("main", *args)
    return refused.value


@pytest.mark.parametrize("n", [-1, -4096, -(2**62), -(2**63)])
def test_a_negative_dimension_of_a_shape_is_refused(n: int) -> None:
    """A shape argument with a negative dimension is refused if the program makes a tensor of this shape."""
    refused = refusal(ROWS, (n,))
    assert isinstance(refused, BoundExceeded) and str(refused) == f"main: n = {n} is outside its declared range 0 <= n"
    with pytest.raises(MismatchError, match=f"n is {n}, outside its declared range 0.."):
        Interpreter(parse(ROWS)).call("main", (n,))


def test_a_negative_number_is_refused_where_it_is_a_dimension() -> None:
    refused = refusal(ROWS.replace("s: shape[n]", "s: scalar[i64, n]"), -7)
    assert isinstance(refused, BoundExceeded) and "n = -7 is outside" in str(refused)


def test_a_negative_dimension_of_a_match_cast_is_refused() -> None:
    refused = refusal(
        ROWS.replace("s: shape[n]) -> object {", "x: i64[1]) -> object { t = tensor_to_shape(x) s = match_cast t to shape[n]"),
        np.array([-3]),
    )
    assert isinstance(refused, BoundExceeded) and str(refused) == "main: match_cast 's': n = -3 is outside its declared range 0 <= n"


def test_a_declared_negative_range_is_kept() -> None:
    text = "func main(s: shape[n]) -> object where n in -8..8 { a = full(shape[n + 8], 1.0, dtype=f32) b = exp(a) return b }"
    session = Session(compile_module(parse(text)), device_threads=1)
    assert session.call("main", (-5,)).shape == (3,)
    with pytest.raises(BoundExceeded, match="-8 <= n <= 8"):
        session.call("main", (-9,))


@pytest.mark.parametrize("n", [HUGE, 2**58, 2**63 - 1])
def test_a_byte_count_beyond_64_bits_is_refused(n: int) -> None:
    """A call that needs more bytes than 64 bits can count is refused. Modulo 2**64 the arena would hold a few bytes, and kernels would
    write past its end."""
    refused = refusal(ROWS, (n,))
    assert isinstance(refused, BoundExceeded) and "does not fit 64 bits where n = " in str(refused)


def test_a_byte_count_beyond_the_memory_is_refused() -> None:
    assert isinstance(refusal(ROWS, (2**40,), limit=1 << 30), OutOfMemory)


def test_a_declared_bound_beyond_all_memory_is_no_bound() -> None:
    text = ROWS.replace("object {", f"object where n in 0..{2**60} {{")
    assert Session(compile_module(parse(text)), device_threads=1).call("main", (3,)).shape == (3, 16)
    assert "does not fit 64 bits" in str(refusal(text, (2**59,)))


def test_an_extent_that_turns_out_negative_does_not_shrink_the_arena() -> None:
    """An extent that turns out negative at run time is refused, and until then does not make the arena smaller. The plan places memory that
    is used before the check behind the memory whose size depends on the extent."""
    text = """
    func main(x: f32[n], s: shape[m]) -> object {
      a = exp(x)
      b = softmax(a)
      c = full(shape[m - 4096], 1.0, dtype=f32)
      d = softmax(c)
      e = softmax(b)
      r = (d, e)
      return r
    }
    """
    refused = refusal(text, np.ones(4096, np.float32), (1,))
    assert str(refused) == "main: shape of 'c': expected max(0, m - 4096) = 0, got -4095"


@pytest.mark.parametrize(("shape", "args"), [("n // m", (16, 0)), ("n % m + 1", (16, 0)), ("(n + m) // (m - 1)", (4, 1))])
def test_a_dimension_divided_by_zero_is_refused(shape: str, args: tuple[int, int]) -> None:
    """A division of a dimension by zero is refused; the CPU's division instruction would end the process."""
    refused = refusal(f"func main(s: shape[n, m]) -> object {{ a = full(shape[{shape}], 1.0, dtype=f32) b = exp(a) return b }}", args)
    assert isinstance(refused, ArgumentMismatch) and "divides by zero where n = " in str(refused)


def test_the_least_number_divided_by_minus_one_is_refused() -> None:
    text = f"func main(s: shape[n, m]) -> shape[n // m] where n in {-(2**63)}..0, m in -9..9 {{ t = shape[n // m] return t }}"
    assert Session(compile_module(parse(text)), device_threads=1).call("main", (-12, -5)) == (2,)
    assert "does not fit 64 bits" in str(refusal(text, (-(2**63), -1)))


@pytest.mark.parametrize("declared", ["-9223372036854775808..", "-9223372036854775808..9223372036854775807", "-3..9223372036854775807"])
def test_a_declared_range_may_be_as_wide_as_the_integers(declared: str) -> None:
    text = f"""
        func main(s: shape[m]) -> object where m in {declared} {{ y = call_tir @f(m) -> i64[1] return y }}
        prim f(k: dim, out Y: i64[1]) where k in {declared} {{ Y[0] = dim(k) }}
    """
    assert Session(compile_module(parse(text)), device_threads=1).call("main", (-3,)).tolist() == [-3]
