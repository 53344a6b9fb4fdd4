"""The kernel that only multiplies exists for every way in which weights are held, and runs."""

from __future__ import annotations

import pytest

from compiler.driver import compile_module
from compiler.ir.parser import parse
from compiler.target import host
from deploy.bench.limits import Limits, multiplying
from runtime.session import Session


@pytest.mark.parametrize("held", ["f32", "bf16", "int8", "int4"])
def test_what_only_multiplies_runs(held: str) -> None:
    text, steps, operations, args = multiplying(held, host())
    session = Session(compile_module(parse(text)), device_threads=1)
    assert session.call("main", *args, (1,)).shape == (64,)
    session.close()
    assert operations > steps > 1


def test_the_slower_of_two_limits_holds() -> None:
    limits = Limits(bytes_per_s=10.0, flops=100.0)
    assert limits.seconds(50.0, 100.0) == 5.0
    assert limits.seconds(10.0, 300.0) == 3.0
