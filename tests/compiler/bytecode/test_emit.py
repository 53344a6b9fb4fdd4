"""A captured region ends only before an instruction for which the host needs the result of a launch."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from runtime.errors import ArgumentMismatch
from runtime.executable import Call, Executable
from runtime.session import Session

assert compiler.ops


def callees(executable: Executable) -> list[str]:
    return [i.callee for i in executable.meta.functions["main"].instructions if isinstance(i, Call)]


def test_results_need_no_region_of_their_own() -> None:
    """A function whose result is a tuple has only one captured region. The instructions before the region allocate the results, make the
    view `v` of the result `a`, and build the tuple."""
    executable = compile_module(
        parse("""
        func main(x: f32[n, 32], w: f32[32, 32]) -> object where n in 1..8 {
          dataflow {
            a = linear(x, w)
            v = reshape(a, shape[n * 32])
            b = softmax(a)
            c = linear(b, w)
            t = (v, c)
          }
          return t
        }
    """)
    )
    names = callees(executable)
    assert names.count("vm.run_region") == 1 and names[-1] == "vm.run_region"
    assert "vm.reshape" in names and "vm.tuple" in names
    x, w = np.ones((3, 32), np.float32), np.eye(32, dtype=np.float32)
    flat, rows = Session(executable, device_threads=1).call("main", x, w)
    assert flat.shape == (96,) and np.array_equal(flat, x.ravel())
    np.testing.assert_allclose(rows, np.full((3, 32), 1 / 32), rtol=1e-6)


def test_a_routine_of_the_host_ends_a_region() -> None:
    executable = compile_module(
        parse("""
        func main(x: f32[n]) -> object where n in 1..8 {
          dataflow {
            a = exp(x)
            s = sort(a)
            b = exp(s)
          }
          return b
        }
    """)
    )
    assert callees(executable).count("vm.run_region") == 2
    x = np.array([0.5, -1.0, 0.0], np.float32)
    np.testing.assert_allclose(Session(executable, device_threads=1).call("main", x), np.exp(np.sort(np.exp(x))), rtol=1e-5)


@pytest.mark.parametrize("name", ["reshape(x, shape[n * 2, 2])", "match_cast x to f32[n, 4]"])
def test_an_argument_is_not_written_through_another_name_unless_it_may_be(name: str) -> None:
    executable = compile_module(
        parse(f"""
        impure func main(x: f32[n, 4]) -> object where n in 1..8 {{
          y = {name}
          z = call_tir_inplace @bump(y) [0] -> f32[{"n * 2, 2" if "reshape" in name else "n, 4"}]
          return z
        }}
        prim bump(A: f32[r, c], out B: f32[r, c]) attrs {{inplace=[[0, 1]]}} {{ for i in r {{ for j in c {{ B[i, j] = A[i, j] + 1.0 }} }} }}
    """)
    )
    session = Session(executable, device_threads=1)
    x = np.zeros((2, 4), np.float32)
    assert session.call("main", x) is not None and np.array_equal(x, np.ones((2, 4)))
    x.flags.writeable = False
    with pytest.raises(ArgumentMismatch, match="'x' is changed in place, but the array is read-only"):
        session.call("main", x)
