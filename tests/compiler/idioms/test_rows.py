"""The rows of a kernel are computed in any order, each with all stages, only if no row depends on what another row writes."""

from __future__ import annotations

import pytest

from compiler.idioms.rows import match_rows
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.write import Kernel, total
from compiler.ir.text.parser import parse


def is_matched(body: str, outputs: str = "out A: f32[n], out S: f32[n, 2], out Y: f32[n, 8]") -> bool:
    return match_rows(parse(f"prim f(X: f32[n, 8], {outputs}) {{ {body} }}").prim("f").body) is not None


def test_parts_that_read_numbers_of_other_rows_wait_for_them() -> None:
    """A stage on parts of rows reads the number of the row before, so the stages do not share a pass over a row."""
    k, n = Kernel(), Dim.of(DimVar("n"))
    x, out = k.arrays(Buffer("x", (n, Dim.of(8)), DType.F32), Buffer("out", (n, Dim.of(2)), DType.F32))
    top = k.workspace("top", n)
    with k.nest((n,)) as (i,):
        top[i] = total((8,), lambda r: x[i, r])
    with k.nest((n, 2)) as (i, g):
        out[i, g] = total((4,), lambda r: x[i, 4 * g + r] * top[n - 1 - i])
    assert match_rows(k.body()) is None


def test_a_stage_that_reads_what_other_rows_wrote_waits_for_them() -> None:
    """The second stage reads what the first stage computed for other rows, so the stages do not share a pass over a row."""
    k, (n,) = Kernel(), [Dim.of(DimVar("n"))]
    x, out = k.arrays(Buffer("x", (n,), DType.F32), Buffer("out", (n,), DType.F32))
    held = k.workspace("held", n)
    for target, source in ((held, x), (out, held)):
        with k.nest((n,)) as (i,):
            target[i] = total((n,), lambda r, source=source, i=i: source[r] * source[i])
    assert match_rows(k.body()) is None


def test_a_stage_that_reads_the_element_beside_its_own_waits() -> None:
    text = """
        prim f(X: f32[n, 16], out A: f32[n + 1], out B: f32[n]) {
          for i in n { A[i] = sum(r in 16) X[i, r] }
          for i in n { B[i] = A[i + 1] }
        }
    """
    assert match_rows(parse(text).prim("f").body) is None


@pytest.mark.parametrize("place", ["0", "i % 2", "i // 2"])
def test_rows_that_write_the_same_element_are_computed_in_order(place: str) -> None:
    text = f"prim f(X: f32[n, 16], out A: f32[n]) {{ for i in n {{ A[{place}] = sum(r in 16) X[i, r] }} }}"
    assert match_rows(parse(text).prim("f").body) is None


@pytest.mark.parametrize(("read", "is_own"), [("4*g + r", True), ("4*(1 - g) + r", False), ("4*g + 3 - r", False)])
def test_a_part_of_a_row_reads_the_elements_that_it_wrote(read: str, is_own: bool) -> None:
    """The rows of this kernel are the halves of the rows of X."""
    text = f"""
        prim f(X: f32[n, 8], out Q: f32[n, 8], out S: f32[n, 2]) {{
          for i in n, g in 2, r in 4 {{ Q[i, 4*g + r] = X[i, 4*g + r] * 2.0 }}
          for i in n, g in 2 {{ S[i, g] = sum(r in 4) Q[i, {read}] }}
        }}
    """
    assert (match_rows(parse(text).prim("f").body) is not None) is is_own


ALL = "for i in n { A[i] = sum(r in 8) X[i, r] }"


@pytest.mark.parametrize(("read", "matched"), [("i", True), ("n - 1 - i", False), ("0", False)])
def test_parts_read_what_their_own_row_wrote(read: str, matched: bool) -> None:
    assert is_matched(f"{ALL} for i in n, g in 2 {{ S[i, g] = sum(r in 4) X[i, 4*g + r] + A[{read}] }}") is matched


@pytest.mark.parametrize(("place", "matched"), [("i", True), ("n - 1 - i", False)])
def test_stages_that_write_one_element_belong_to_one_row(place: str, matched: bool) -> None:
    assert is_matched(f"{ALL} for i in n {{ A[{place}] = sum(r in 8) X[i, r] * 2.0 }}") is matched


@pytest.mark.parametrize(("place", "matched"), [("i, g", True), ("n - 1 - i, g", False)])
def test_parts_write_only_to_their_own_row(place: str, matched: bool) -> None:
    body = f"{ALL} for i in n, j in 2 {{ S[i, j] = A[i] }} for i in n, g in 2 {{ S[{place}] = sum(r in 4) X[i, 4*g + r] }}"
    assert is_matched(body) is matched


@pytest.mark.parametrize(("read", "matched"), [("4*g + r", True), ("4*(1 - g) + r", False)])
def test_parts_of_a_shared_row_read_what_they_wrote(read: str, matched: bool) -> None:
    body = f"""
        alloc global L: f32[n, 8] {{
          {ALL}
          for i in n, j in 8 {{ L[i, j] = X[i, j] + A[i] }}
          for i in n, g in 2, r in 4 {{ L[i, 4*g + r] = X[i, 4*g + r] }}
          for i in n, g in 2 {{ S[i, g] = sum(r in 4) L[i, {read}] }}
        }}
    """
    assert is_matched(body) is matched


@pytest.mark.parametrize(("read", "matched"), [("j + 1", True), ("j", False)])
def test_the_elements_of_a_row_are_no_recurrence(read: str, matched: bool) -> None:
    assert is_matched(f"{ALL} for i in n, j in 7 {{ Y[i, j + 1] = Y[i, {read}] + A[i] }}") is matched
