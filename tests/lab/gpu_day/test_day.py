"""A step that dies or hangs costs only itself, and every step has a line as soon as it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab.gpu_day.day import LINES, LOG, Line, environment_of, objects, run_day
from tests.lab.gpu_day.packages import PRESENT, carried
from tests.lab.gpu_day.steps import PLANTED, PYTHON, STEPS, Step


def says(name: str, text: str, status: int = 0) -> Step:
    return Step(name, 60, (PYTHON, "-c", f"print({text!r}); raise SystemExit({status})"))


def day(steps: Sequence[Step], out: Path, seconds: float = 600.0) -> list[Line]:
    return list(run_day(steps, out, seconds, os.environ))


def test_a_planted_fault_and_a_planted_hang_cost_one_step_each(tmp_path: Path) -> None:
    """A process that dies by a signal keeps what it had printed. One that hangs with a child is killed together with the child, and the
    steps after both run."""
    first, fault, hang, last = day([says("first", "one"), *PLANTED, says("last", '{"two": 2}')], tmp_path)
    assert [line.outcome for line in (first, fault, hang, last)] == ["passed", "died", "timed out", "passed"]
    assert fault.status == -11 and fault.found == [{"begun": True}]
    assert hang.seconds < 30, "the child of the step sleeps for ten minutes"
    assert last.found == [{"two": 2}] and first.said == "one"


def test_every_line_is_written_as_its_step_ends(tmp_path: Path) -> None:
    count = "import pathlib, sys; print(len(pathlib.Path(sys.argv[1]).read_text().splitlines()))"
    steps = [says("first", "one"), Step("second", 60, (PYTHON, "-c", count, str(tmp_path / LINES))), says("third", "x" * 5000, status=3)]
    found = day(steps, tmp_path)
    assert found[1].said == "1", "the second step reads the line of the first"
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    assert [line["step"] for line in lines] == ["first", "second", "third"]
    assert lines[2]["outcome"] == "failed" and lines[2]["status"] == 3 and len(lines[2]["said"]) < 1000
    assert "x" * 5000 in (tmp_path / LOG).read_text() and "=== third: failed" in (tmp_path / LOG).read_text()


def test_a_step_without_time_or_without_its_program_is_a_line(tmp_path: Path) -> None:
    absent = day([Step("absent", 60, ("no-such-tool", "x")), says("next", "one")], tmp_path)
    assert absent[0].outcome == "failed" and "no-such-tool cannot be run" in absent[0].said and absent[1].has_passed
    (late,) = day([says("late", "one")], tmp_path, seconds=3)
    assert late.outcome == "left out" and late.said == "3 s were left"


def test_a_step_gets_no_more_time_than_is_left(tmp_path: Path) -> None:
    began = time.monotonic()
    (hang,) = day([Step("hang", 600, PLANTED[1].command)], tmp_path, seconds=9)
    assert hang.outcome == "timed out" and time.monotonic() - began < 60


def test_a_rehearsal_runs_steps_at_the_same_time_after_the_first(tmp_path: Path) -> None:
    """Each of two steps waits for what the other writes, and both need what the first step writes."""
    wait = """
import pathlib, sys, time
own, other, first = map(pathlib.Path, sys.argv[1:])
own.touch()
print(first.exists())
while not other.exists():
    time.sleep(0.01)
"""
    first, one, two = (str(tmp_path / name) for name in ("first", "one", "two"))
    steps = [
        Step("first", 60, (PYTHON, "-c", f"import pathlib; pathlib.Path({first!r}).touch()")),
        Step("one", 10, (PYTHON, "-c", wait, one, two, first)),
        Step("two", 10, (PYTHON, "-c", wait, two, one, first)),
    ]
    found = list(run_day(steps, tmp_path, 600.0, os.environ, is_small=True))
    assert [(line.outcome, line.said) for line in found] == [("passed", ""), ("passed", "True"), ("passed", "True")]
    assert {line.step for line in found} == {"first", "one", "two"} and all(line.processor_s >= 0 for line in found)


def test_an_interrupted_rehearsal_ends_its_steps_and_begins_no_others(tmp_path: Path) -> None:
    """An exception that interrupts the day between two results, as when a line cannot be written, kills the steps that run. Steps that wait
    for their turn do not begin."""
    wait = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}\\n'); time.sleep(600)"
    begun = {name: tmp_path / name for name in ("two", "three", "four", "five")}
    waiting = [Step(name, 5, (PYTHON, "-c", wait, str(path))) for name, path in begun.items()]
    going = run_day([says("first", ""), says("one", ""), *waiting], tmp_path, 600.0, os.environ, is_small=True)
    assert [next(going).step, next(going).step] == ["first", "one"]
    while not (begun["two"].exists() and begun["two"].read_text()):
        time.sleep(0.01)
    with pytest.raises(KeyboardInterrupt):
        going.throw(KeyboardInterrupt())
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun["two"].read_text()), 0)
    assert not begun["four"].exists() and not begun["five"].exists(), "they wait for a place beside two and three"


def test_the_processor_time_of_a_step_is_its_own(tmp_path: Path) -> None:
    """The time of a step that runs beside another is that of the step and of its children."""
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    steps = [says("first", ""), Step("busy", 60, (PYTHON, "-c", child)), says("idle", "")]
    spent = {line.step: line.processor_s for line in run_day(steps, tmp_path, 600.0, os.environ, is_small=True)}
    assert spent["busy"] >= 0.5 > spent["idle"]


def test_results_are_one_document_or_lines_among_others() -> None:
    assert objects('[{"a": 1},\n {"a": 2}]\n') == [{"a": 1}, {"a": 2}]
    assert objects('{\n "a": 1\n}') == [{"a": 1}]
    assert objects('loading\n{"a": 1}\n{"b": 2}\n{"broken": ') == [{"a": 1}, {"b": 2}]


def test_the_steps_exist_and_the_first_installs() -> None:
    assert STEPS[0].name == "install" and len({step.name for step in STEPS}) == len(STEPS)
    files = [word for step in STEPS for word in step.command if word.endswith(".py")]
    modules = [step.command[2] for step in STEPS if step.command[1:3] != (PYTHON, "-m") and step.command[1] == "-m"]
    assert files and all((ROOT / file).is_file() for file in files)
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() or name in ("pytest", "tests.lab") for name in modules)


def test_every_file_with_tests_for_a_card_is_a_step() -> None:
    """A file whose tests are marked `gpu` runs in a step. The families that only the slow campaign covers are no step."""
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    named = {word for step in STEPS for word in step.command if word.endswith(".py")}
    assert marked - named == {"tests/deploy/test_cuda_all_families.py", "tests/lab/gpu_day/test_day.py"}


def test_the_runner_imports_nothing_that_a_bare_machine_lacks() -> None:
    """The first step installs packages, so the runner and this step import only the standard library."""
    names = "tests.lab.gpu_day.day, tests.lab.gpu_day.install"
    check = f"import sys, {names}; print([m for m in sys.modules if 'site-packages' in (getattr(sys.modules[m], '__file__', '') or '')])"
    done = subprocess.run([sys.executable, "-S", "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# Import modules where only some packages are installed: the first argument names these, the second the modules.
WITHOUT_OTHERS = """
import sys
from importlib import import_module, metadata

allowed, modules = (argument.split() for argument in sys.argv[1:])
owners = {top: {one.lower().replace("_", "-") for one in names} for top, names in metadata.packages_distributions().items()}
hidden = {top for top, names in owners.items() if not names & {*allowed}}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not installed on the machine with the card", name=name)

sys.meta_path.insert(0, Hidden())
for module in modules:
    import_module(module)
"""


def test_files_of_steps_import_only_packages_of_the_machine() -> None:
    """The machine with the card has none of the packages of `make test` that no step needs, such as openai."""
    files = [Path(word) for step in STEPS for word in step.command if word.endswith(".py")]
    shared = sorted({folder / "conftest.py" for file in files for folder in file.parents if (ROOT / folder / "conftest.py").exists()})
    run = [step.command[2] for step in STEPS if step.command[1] == "-m" and step.command[2].startswith("tests.")]
    modules = [*(".".join(file.with_suffix("").parts) for file in (*shared, *files)), *run]
    assert "tests.e2e.conftest" in modules
    allowed = {"relaxserve", "pycuda", *carried(), *PRESENT}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OTHERS, " ".join(allowed), " ".join(modules)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("carries", [False, True])
def test_packages_come_from_a_folder_of_their_own_where_wheels_were_carried(
    carries: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if carries:
        (tmp_path / ".gpu" / "wheels").mkdir(parents=True)
    monkeypatch.setattr("tests.lab.gpu_day.day.CARRIED", tmp_path / ".gpu")
    variables = environment_of(tmp_path)
    assert (str(tmp_path / "site") == variables["PYTHONPATH"].split(":")[1]) == carries == ("GPU_DAY_SITE" in variables)
    assert str(ROOT / "deploy" / "entry") in variables["PYTHONPATH"]
