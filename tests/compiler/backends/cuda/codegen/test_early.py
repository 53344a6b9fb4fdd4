"""Kernels for sm_90a wait for the kernels before them, and products read only their weights before that."""

from __future__ import annotations

import re

import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.executable import Executable

NUM_WORDS = 3  # words that a softmax reads from its record: two buffers and the number of rows
WAIT, LET_BEGIN = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
CHAIN = """
func main(x: bf16[n, 128], {weight}w: bf16[64, 128]) -> object where n in 0..64 {{
  dataflow {{ y = linear(x, w) z = softmax(y) }} return z
}}
"""
EXPERTS = """
func main(x: bf16[t, 128], e: i32[t], weight w: bf16[4, 64, 128], weight b: f32[4, 64]) -> object where t in 0..64 {
  dataflow { y = expert_linear(x, w, e, b, out_dtype="f32") } return y
}
"""


def compiled(text: str, target: str = "sm_90a") -> Executable:
    return compile_module(parse(text), Options(get(target)))


def bodies(executable: Executable) -> dict[str, str]:
    """Return the PTX of each kernel."""
    text = executable.object_code.decode()
    return {m[1]: m[2] for m in re.finditer(r"\.entry (\S+)\((.*?)^}", text, re.MULTILINE | re.DOTALL)}


def overlapping(executable: Executable) -> list[bool]:
    return [launch.overlaps for region in executable.meta.regions for launch in region.launches]


def test_a_product_reads_weights_early_and_everything_else_waits() -> None:
    """A product copies weights before it waits. A kernel of another kind reads only its record before it waits, so that the words of the
    record arrive together."""
    executable = compiled(CHAIN.format(weight="weight "))
    (product,) = (text for name, text in bodies(executable).items() if "wgmma" in text)
    (rest,) = (text for name, text in bodies(executable).items() if "wgmma" not in text)
    assert product.index(LET_BEGIN) < product.index("cp.async.bulk") < product.index(WAIT) < product.index("cp.async.cg")
    before, after = rest.split(WAIT)
    assert LET_BEGIN in before and len(re.findall(r"ld\.global\.b64", before)) == NUM_WORDS and "st." not in before
    assert "st.global" in after and "ld.global.nc" not in rest, "the assembler would move loads of constants behind the wait"
    assert overlapping(executable) == [True, True]


def test_a_product_of_what_a_launch_writes_does_not_begin_early() -> None:
    """The weights are inputs, which a launch packs: the product must not read them before that launch has ended."""
    packing, product, softmax = overlapping(compiled(CHAIN.format(weight="")))
    assert (packing, product, softmax) == (True, False, True)


def test_a_product_that_reads_choices_first_waits_at_its_begin() -> None:
    (text,) = bodies(compiled(EXPERTS)).values()
    assert text.index(WAIT) < text.index("cp.async.bulk") and text.index(WAIT) < text.index("ld.global.b32")


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_older_gpus_know_no_early_launches(target: str) -> None:
    executable = compiled(CHAIN.format(weight="weight "), target)
    assert "griddepcontrol" not in executable.object_code.decode() and not any(overlapping(executable))
