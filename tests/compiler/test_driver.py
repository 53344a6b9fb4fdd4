"""The compiler's driver: levels of compilation, debug switches, and equal executables for equal programs."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import compiler.ops
from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED
from runtime import flags
from runtime.executable import Executable
from runtime.session import Session
from tests.kept_code import compiled_anew

assert compiler.ops
assert compiled_anew  # a fixture

PROGRAM = """
func main(x: f32[n, 32], w: f32[16, 32]) -> object where n in 1..8 {
  dataflow {
    y = linear(x, w)
    z = gelu(y)
    s = softmax(z)
  }
  return s
}
"""


@pytest.mark.usefixtures("compiled_anew")
def test_compiling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    saved: list[bytes] = []
    for _ in range(2):  # under the same name, which is sealed too
        compile_module(parse(PROGRAM)).save(tmp_path / "a")
        saved.append((tmp_path / "a").read_bytes())
    assert saved[0] == saved[1]


def test_a_saved_executable_runs_without_the_compiler(tmp_path: Path) -> None:
    executable = compile_module(parse(PROGRAM))
    executable.save(tmp_path / "x.rsx")
    x, w = np.ones((3, 32), np.float32), np.eye(16, 32, dtype=np.float32)
    results = [Session(e, device_threads=1).call("main", x, w) for e in (executable, Executable.load(tmp_path / "x.rsx"))]
    assert results[0].tobytes() == results[1].tobytes()


def test_the_signature_is_stored() -> None:
    assert compile_module(parse(PROGRAM)).meta.functions["main"].signature == "(f32[n0, 32], f32[16, 32]) where n0 in 1..8"


def test_texts_of_all_levels_on_request(tmp_path: Path) -> None:
    executable = compile_module(parse(PROGRAM), Options(texts=True))
    executable.save(tmp_path / "x.rsx")
    texts = Executable.load(tmp_path / "x.rsx").texts
    assert set(texts) == {"program.ir", "program.loops", "program.ll", "program.s"}
    parse(texts["program.ir"])
    assert "launch @" in texts["program.loops"] and "define " in texts["program.ll"] and ".text" in texts["program.s"]
    assert not compile_module(parse(PROGRAM)).texts


@pytest.mark.parametrize("name", NAMED)
def test_every_named_target_compiles(name: str) -> None:
    """Every named target can be compiled for, even on a machine that cannot run its code."""
    executable = compile_module(parse(PROGRAM), Options(NAMED[name]))
    assert executable.meta.target == NAMED[name].key


def test_a_long_chain_computes_what_its_operators_do() -> None:
    """64 doublings, followed by 600 operators that each read the two previous results, give the same bits as NumPy's operators applied one
    after another."""
    doublings = [f"d{i + 1} = add(d{i}, d{i})" for i in range(64)]
    operators = ("subtract", "maximum", "minimum")
    chain = [f"x{i + 2} = {operators[i % 3]}(x{i + 1}, {'x0' if i % 5 else 'd64'})" for i in range(600)]
    text = f"dataflow {{ {' '.join(doublings)} x1 = multiply(d64, x0) {' '.join(chain)} r = (d64, x601) }}"
    session = Session(compile_module(parse(f"func main(d0: f32[n], x0: f32[n]) -> object where n in 0..64 {{ {text} return r }}")))
    d, first = np.random.default_rng(0).standard_normal((2, 33), np.float32)
    doubled, last = session.call("main", d, first)
    x = np.ldexp(d, 64)
    np.testing.assert_array_equal(doubled, x)
    meaning = (np.subtract, np.maximum, np.minimum)
    x = x * first
    for i in range(600):
        x = meaning[i % 3](x, first if i % 5 else doubled)
    np.testing.assert_array_equal(last, x)


def test_depth_adds_no_kernels() -> None:
    def layers(count: int) -> str:
        body = "".join(f"a{i} = linear(s{i}, w) b{i} = gelu(a{i}) s{i + 1} = softmax(b{i})\n" for i in range(count))
        return f"func main(s0: f32[n, 16], w: f32[16, 16]) -> object {{ dataflow {{ {body} }} return s{count} }}"

    assert len(compile_module(parse(layers(2))).meta.kernels) == len(compile_module(parse(layers(9))).meta.kernels)


# --- debug levels and dumps ----------------------------------------------------------------------------------------------

LEVELS = {
    1: "compiled main for host in ",
    2: " ms  legalize",
    3: "# after fuse\nfunc main(",
    4: "define ",
    5: "--- before\n+++ after legalize\n",
}


@pytest.mark.parametrize("level", range(6))
def test_each_level_shows_its_own_and_those_below(level: int, capsys: pytest.CaptureFixture[str]) -> None:
    with flags.scope(debug=level):
        compile_module(parse(PROGRAM))
    shown = capsys.readouterr().err
    for other, words in LEVELS.items():
        wanted = other <= level and not (other == 3 and level == 5)  # level 5 shows diffs instead of the whole programs of level 3
        assert (words in shown) is wanted, (level, other)
    assert (shown == "") is (level == 0)


def test_dumping_writes_numbered_files(tmp_path: Path) -> None:
    with flags.scope(dump=tmp_path / "d"):
        compile_module(parse(PROGRAM))
    names = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert names[0] == "00-start.ir"
    assert any(n.endswith("-legalize.ir") for n in names)
    assert names[-3:] == ["99-program.ll", "99-program.loops", "99-program.s"]
    parse((tmp_path / "d" / "00-start.ir").read_text())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    unknown = parse('func main(x: f32[n]) -> object { y = call_library "no.such"(x) -> f32[n] return y }')
    (gc.enable if enabled else gc.disable)()
    try:
        compile_module(parse("func main(x: f32[n]) -> object { y = exp(x) return y }"))
        assert gc.isenabled() is enabled
        with pytest.raises(Exception, match=r"no\.such"):
            compile_module(unknown)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
