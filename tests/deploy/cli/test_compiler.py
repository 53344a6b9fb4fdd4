"""The compiler's commands, run as a user types them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from compiler.cache import Cache
from compiler.driver import compile_module
from compiler.interpret.loops import InterpretError
from compiler.ir.errors import CompileError
from compiler.ir.text.parser import parse
from compiler.machine.target import host
from deploy.cache import Kept
from deploy.cli import compiler as commands
from deploy.cli.compiler import cache
from deploy.cli.failure import FAILURE, status_of
from deploy.model_loading.program import compile_model
from deploy.run_program import Ran
from runtime import flags

PROGRAM = """
func main(x: f32[n, k], s: shape[k], weight w: f32[8, k]) -> object where n in 1..64 {
  dataflow {
    y = linear(x, w)
    z = softmax(y)
  }
  return z
}
"""

app = typer.Typer()
app.command("opt")(commands.opt)
app.command("eval")(commands.eval_)
app.add_typer(cache, name="cache")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.ir"
    path.write_text(PROGRAM)
    return path


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def printed(*words: str | Path) -> str:
    result = call(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


# --- relaxserve opt ------------------------------------------------------------------------------------------------------


def test_opt_prints_text_that_parses(program: Path) -> None:
    assert "linear(x, w)" not in printed("opt", program)
    assert "call_tir @linear" in printed("opt", program, "--until", "legalize")
    module = parse(printed("opt", program, "--passes", "legalize, fuse", "--target", "avx512"))
    assert "softmax" in module.functions


def test_opt_runs_the_passes_of_the_target(program: Path) -> None:
    for target, kind in (("avx512", "parallel"), ("sm_80", "block")):
        text = printed("opt", program, "--target", target)
        assert f"for {kind} " in text
        assert all(f"for {other} " not in text for other in {"parallel", "block"} - {kind}), text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("--until", "nonsense", "--target", "x86-64-v3"),
            "unknown pass 'nonsense'; known: check_facts, integer_products, legalize, ",
        ),
        (
            ("--until", "nonsense", "--target", "amx"),
            "unknown pass 'nonsense'; known: check_facts, integer_products, round_operands, legalize, ",
        ),
        (("--until", "nonsense", "--target", "aarch64-neon"), "unknown pass 'nonsense'; known: check_facts, integer_products, legalize, "),
        (("--target", "nonsense"), "unknown target 'nonsense'; known: host, "),
    ],
)
def test_opt_names_what_it_does_not_know(program: Path, words: tuple[str, ...], named: str) -> None:
    """The error message of `opt` names the unknown pass or option. Each case states a target, because the set of passes depends on the
    target."""
    result = call("opt", program, *words)
    assert result.exit_code != 0 and named in str(result.exception)


def test_opt_obeys_the_switches_of_developers(program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with flags.scope(debug=5, dump=tmp_path / "dump"):
        commands.opt(program, until="fuse", target="avx512")
    out, err = capfd.readouterr()
    assert parse(out).functions and "+++ after legalize" in err and " ms  legalize" in err
    assert [file.name for file in (tmp_path / "dump").glob("*-start.ir")] == ["00-start.ir"]
    assert list((tmp_path / "dump").glob("*-legalize.ir"))


def test_opt_takes_one_choice_of_passes(program: Path) -> None:
    result = call("opt", program, "--until", "fuse", "--passes", "fuse")
    assert result.exit_code == 2 and "cannot be used together" in result.output


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.ir").write_bytes(b"\xff\xfe")
    said = call("opt", tmp_path / "x.ir")
    assert said.exit_code == 2 and "is not a text file" in said.output


# --- relaxserve eval -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 64])
def test_run_compares_with_the_interpreter(program: Path, n: int) -> None:
    shape, error = printed("eval", program, "main", "--dim", f"n={n}", "--dim", "k=12", "--check").splitlines()
    assert shape == f"float32[{n}, 8]"
    assert float(error.split()[2]) < 1e-5


def test_run_fails_when_the_results_differ(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval --check` fails if the compiled results differ from the reference. In this test, the compiled program has another operator than
    the reference."""
    other = parse(PROGRAM.replace("softmax(y)", "log_softmax(y)"))
    monkeypatch.setattr("deploy.run_program.compile_module", lambda _: compile_module(other))
    result = call("eval", program, "--dim", "n=3", "--dim", "k=4", "--check")
    assert result.exit_code == 1 and "largest error" in result.stdout


def test_infinite_elements_that_agree_are_no_error() -> None:
    """Other elements decide how large the error is."""
    actual, expected = (np.array([np.inf, -np.inf, np.nan, one], np.float32) for one in (1.0, 1.25))
    assert Ran(actual, expected).largest_error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("main", "--dim", "n=3"), "dimension k has no value; give one with --dim k=7"),
        (("main", "--dim", "n=3", "--dim", "k=4", "--dim", "q=1"), "the program has no dimension q; it has k, n"),
        (("other",), "there is no function 'other'; known: main"),
        (("main", "--dim", "n=-3", "--dim", "k=4"), "parameter x cannot have the shape [-3, 4]: negative dimensions are not allowed"),
        (("main", "--dim", f"n={10**14}", "--dim", "k=99"), f"parameter x cannot have the shape [{10**14}, 99]: "),
        (("main", "--dim", f"n={10**30}", "--dim", "k=4"), f"parameter x cannot have the shape [{10**30}, 4]: "),
    ],
)
def test_run_says_what_is_missing(program: Path, words: tuple[str, ...], named: str) -> None:
    result = call("eval", program, *words)
    assert isinstance(result.exception, CompileError) and named in str(result.exception)


@pytest.mark.parametrize("type_", ["f32[n // k]", "shape[n // k]", "scalar[i64, n // k]"])
def test_run_says_which_size_divides_by_zero(tmp_path: Path, type_: str) -> None:
    program = tmp_path / "divided.ir"
    program.write_text(f"func main(a: f32[n, k], x: {type_}) -> object {{ y = exp(a) return y }}")
    said = call("eval", program, "--dim", "n=4", "--dim", "k=0").exception
    assert isinstance(said, CompileError) and "parameter x has the size n // k, which divides by zero; give --dim other" in str(said)


def test_run_refuses_what_is_no_dimension(program: Path) -> None:
    result = call("eval", program, "main", "--dim", "n")
    assert result.exit_code == 2 and "expected NAME=N" in result.output


def test_run_refuses_two_values_of_a_dimension(program: Path) -> None:
    result = call("eval", program, "main", "--dim", "n=3", "--dim", "k=4", "--dim", "n=5")
    assert result.exit_code == 2 and "--dim n=5: n is 3 already; give each dimension once" in result.output


def test_run_refuses_what_is_no_seed(program: Path) -> None:
    result = call("eval", program, "main", "--dim", "n=3", "--dim", "k=4", "--seed", "-1")
    assert result.exit_code == 2 and "'--seed'" in result.output


NESTS = """
func main(x: f32[n, 4], i: i32[m]) -> object {
  z = call_tir @pick(x, i) -> f32[m, 4]
  y = exp(z)
  r = call_tir @shift(y) -> f32[m, 4]
  return r
}
prim pick(A: f32[n, 4], I: i32[m], out B: f32[m, 4]) {
  for i in m { let k = cast(i64, I[i]) { for j in 4 { B[i, j] = A[k, j] } } }
}
prim shift(A: f32[m, 4], out B: f32[m, 4]) {
  for i in m, j in 4 { B[i, j] = when_inside }
}
"""


@pytest.mark.parametrize(
    ("shifted", "n", "said"),
    [
        ("A[i, j]", 8, None),
        ("guard(0 <= j + 1 < 4 ? A[i, j + 1] : 0.0)", 8, None),  # the guard is false for the read outside A, so this is no error
        ("A[i, j + 1]", 8, "loop nest 'shift': index 4 of dimension 1 of A is outside its extent 4"),
        ("A[i - 1, j]", 8, "loop nest 'shift': index -1 of dimension 0 of A is outside its extent 5"),
        ("A[i, j]", 2, "of dimension 0 of A is outside its extent 2"),
    ],
)
def test_run_checks_the_bounds_of_hand_written_loop_nests(tmp_path: Path, shifted: str, n: int, said: str | None) -> None:
    """`eval --check-bounds` refuses loop nests that read or write outside their buffers. It does so in the interpreter, before compiled
    code could access wrong memory."""
    path = tmp_path / "nests.ir"
    path.write_text(NESTS.replace("when_inside", shifted))
    result = call("eval", path, "--dim", f"n={n}", "--dim", "m=5", "--check-bounds")
    if said is None:
        assert result.exit_code == 0 and result.stdout == "float32[5, 4]\n", result.exception
        return
    assert isinstance(result.exception, InterpretError) and said in str(result.exception)
    assert status_of(result.exception) == FAILURE


# --- relaxserve cache ----------------------------------------------------------------------------------------------------


def test_cache_lists_exports_imports_and_prunes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o400)
    with flags.scope(cache=tmp_path / "here", cache_key_file=key):
        step = PROGRAM.replace("main(", "step(")
        compile_model(parse(step), Cache(tmp_path / "here" / "executables"), host())
        assert "n0 1..64" in printed("cache", "ls")
        assert "wrote 1 entries" in printed("cache", "export", tmp_path / "all.tar")
    with flags.scope(cache=tmp_path / "elsewhere"):
        refused = call("cache", "import", tmp_path / "all.tar")
        assert "set RELAXSERVE_CACHE_KEY_FILE to the same key" in str(refused.exception), "another installation has another key"
    with flags.scope(cache=tmp_path / "there", cache_key_file=key):
        assert "imported 1 entries" in printed("cache", "import", tmp_path / "all.tar")
        for harmless in (("--keep", "1G"), ("--keep-days", "1"), ("--keep", "0", "--dry-run"), ()):
            printed("cache", "prune", *harmless)
            assert "n0 1..64" in printed("cache", "ls"), harmless
        assert "compiled programs: removed 1, " in printed("cache", "prune", "--keep", "0")
        assert "n0" not in printed("cache", "ls")


def test_cache_prune_says_what_went_per_kind(tmp_path: Path) -> None:
    orphan = Kept(tmp_path).weights_of("0" * 32, "1" * 32)
    orphan.parent.mkdir()
    orphan.write_bytes(bytes(2000))
    with flags.scope(cache=tmp_path):
        for words, verb in ((("--dry-run",), "would remove"), ((), "removed")):
            said = printed("cache", "prune", *words).splitlines()
            assert said == [
                f"compiled programs: {verb} none",
                f"packed weights: {verb} 1, 2.0 KiB",
                f"code assembled for GPUs: {verb} none",
                f"exports for browsers: {verb} none",
                f"machine code of kernels: {verb} none",
                f"quantised weights: {verb} none",
                f"digests of models' files: {verb} none",
                f"quality labels: {verb} none",
                f"predictions of exact weights: {verb} none",
                f"tokenizers of GGUF files: {verb} none",
                f"leftovers of interrupted loads: {verb} none",
            ]
    assert not orphan.exists()


@pytest.mark.parametrize("words", [("--keep", "much"), ("--keep", "-1"), ("--keep-days", "-1"), ("--keep-days", "nan")])
def test_cache_prune_refuses_what_is_no_amount(tmp_path: Path, words: tuple[str, ...]) -> None:
    with flags.scope(cache=tmp_path):
        result = call("cache", "prune", *words)
    assert result.exit_code == 2 and words[1] in result.output


@pytest.mark.parametrize("words", [("ls",), ("prune", "--keep", "0"), ("export", "all.tar"), ("import", __file__)])
def test_a_cache_that_is_no_folder_is_told(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    with flags.scope(cache=tmp_path / "file"):
        result = CliRunner(env={"COLUMNS": "500"}).invoke(app, ["cache", *words])
    assert result.exit_code == 2 and "file is not a folder; set RELAXSERVE_CACHE to a folder" in result.output


def test_every_command_shows_examples() -> None:
    for words in (("opt",), ("eval",), ("cache", "ls"), ("cache", "prune"), ("cache", "export"), ("cache", "import")):
        assert f"relaxserve {' '.join(words)}" in printed(*words, "--help")
