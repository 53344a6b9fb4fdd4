"""`any_context` drops the bound of the page table's columns, if it is large."""

from __future__ import annotations

import pytest

from compiler.backends.cpu.passes.any_context import MANY, any_context
from compiler.ir.equal import assert_equal
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify


def attention(columns: str, of_queries: str = "t", variables: str = "") -> IRModule:
    return parse(f"""
prim k(a: f32[{of_queries}, 2, 32], b: f32[1, 2, pages, 1, 512], c: i32[s, p], d: i32[{of_queries}], e: i32[{of_queries}],
    f: scalar i64, out out: f32[{of_queries}, 2, 32])
    where {variables}s in 0..8, p in {columns}, pages in 1.. {{
  attention(queries=a, keys=paged(cache=b, tables=c, layer=f), sequences=d, out=out, positions=e) {{scale=0.125}}
}}""")


def test_many_columns_become_unbounded() -> None:
    changed = any_context(attention(f"1..{MANY}", variables="t in 0..64, "))
    verify(changed)
    assert_equal(changed, attention("1..", variables="t in 0..64, "))


@pytest.mark.parametrize(
    "module",
    [
        attention(f"1..{MANY - 1}", variables="t in 0..64, "),
        attention("1..", variables="t in 0..64, "),
        attention(f"1..{MANY}", of_queries="p"),
        parse(f"prim k(a: f32[n], out b: f32[n]) where n in 0..{MANY} {{ for i in n {{ b[i] = a[i] }} }}"),
    ],
    ids=["few", "unbounded", "shared", "no attention"],
)
def test_other_kernels_stay(module: IRModule) -> None:
    assert any_context(module) is module
