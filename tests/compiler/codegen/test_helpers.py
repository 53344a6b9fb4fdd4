"""Kernels compiled by other processes are those that this process would compile."""

from __future__ import annotations

import sys
import time

import pytest

from compiler.codegen import helpers
from compiler.codegen.helpers import Helpers
from compiler.codegen.link import link, text_of
from compiler.codegen.machine_code import emitted
from compiler.driver import Options, compile_module
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import Fn
from compiler.ir.text.parser import parse
from compiler.machine.target import Target, host
from tests.compiler.codegen.test_link import rowwise
from tests.compiler.test_driver import PROGRAM

KERNELS = [
    rowwise(DType.F32, host(), f"k{number}", *functions) for number, functions in enumerate([(Fn.EXP,), (Fn.SIN,), (Fn.SQRT, Fn.TANH)])
]
TEXTS = {kernel.name: text_of(kernel, host()) for kernel in KERNELS}


def refuse(_text: str, _target: Target) -> bytes:
    raise AssertionError("this process compiled a kernel")


def test_a_helper_compiles_what_this_process_would() -> None:
    with Helpers(1, host()) as some:
        for name, text in TEXTS.items():
            some.begin(name, text)
        end_s = time.monotonic() + 120
        while len(some.finished) < len(TEXTS) and time.monotonic() < end_s:
            time.sleep(0.01)
        found = some.finish(refuse)
    assert found == link(KERNELS, host()).objects == {name: emitted(text, host()) for name, text in TEXTS.items()}


def test_a_program_has_the_same_code_with_helpers_and_without() -> None:
    assert compile_module(parse(PROGRAM), Options(num_helpers=2)).object_code == compile_module(parse(PROGRAM)).object_code


@pytest.mark.parametrize(
    "command",
    [
        ("/there/is/no/such/program",),
        (sys.executable, "-c", ""),
        (sys.executable, "-c", "import sys; sys.stdin.buffer.read(100); sys.stdout.write('rubbish')"),
    ],
    ids=["missing", "ends", "rubbish"],
)
def test_this_process_compiles_what_a_helper_fails_to_compile(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "COMMAND", command)
    with Helpers(2, host()) as some:
        for name, text in TEXTS.items():
            some.begin(name, text)
        assert some.finish(emitted) == {name: emitted(text, host()) for name, text in TEXTS.items()}


def test_an_error_ends_the_helpers() -> None:
    with pytest.raises(ValueError, match="of the pass"), Helpers(1, host()) as some:
        some.begin("k0", TEXTS["k0"])
        raise ValueError("of the pass")
    assert not any(thread.is_alive() for thread in some.threads)
