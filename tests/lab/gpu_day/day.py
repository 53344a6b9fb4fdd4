"""Run the steps of a day with a card:

    PYTHONPATH=.gpu/first python -m tests.lab.gpu_day.day --out FOLDER --seconds 480

Each step has a process and a time limit of its own, so a fault or a hang costs one step. As a step ends, one line of JSON is added to
FOLDER/day.jsonl, and what it printed to FOLDER/log.txt. No step begins when less than LEAST_S of the given seconds are left. Steps run
one after another, because they measure the card; only in a rehearsal, which measures nothing, TOGETHER of them run at the same time. Only
the standard library is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.lab.gpu_day.steps import PLANTED, PYTHON, STEPS, Step

ROOT = Path(__file__).resolve().parents[3]
CARRIED = ROOT / ".gpu"  # what `make gpu-day` prepares for a machine that can fetch nothing
FIRST = CARRIED / "first"  # comes before all other folders with packages
LINES, LOG = "day.jsonl", "log.txt"
LEAST_S = 8.0
SAID_BYTES = 600  # the line of a failed step has the last bytes of its output, at most so many of each stream
TOGETHER = 2  # number of steps that a rehearsal runs at the same time
REHEARSED = 6  # a rehearsal's limits are so many times as long, because it shares its machine with other work
INSTALLED = "site"  # the folder into which the first step installs packages
SITE = "GPU_DAY_SITE"  # names the folder into which the first step installs packages


@dataclass(frozen=True, slots=True)
class Line:
    """The result of a step."""

    step: str
    outcome: str  # passed, failed, died, timed out, left out
    status: int | None  # exit status; -11: died by signal 11
    seconds: float
    processor_s: float  # processor time of the step and of those of its children that it waited for
    said: str  # the last line of the output; of a step that did not pass, its end
    found: list[Any]  # the objects that the step printed as JSON, also those from before it failed

    @property
    def has_passed(self) -> bool:
        return self.outcome == "passed"


class Running:
    """The process groups of the steps that run now: a step leads one, to which its children belong."""

    def __init__(self) -> None:
        self._lock, self._is_stopped, self._groups = threading.Lock(), False, set[int]()

    def add(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            if self._is_stopped:
                kill_group(group)

    def remove(self, group: int) -> None:
        with self._lock:
            self._groups.discard(group)

    def stop(self) -> None:
        """Kill the groups, and those that are added from now on."""
        with self._lock:
            self._is_stopped = True
            for group in self._groups:
                kill_group(group)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_day(
    steps: Sequence[Step], out: Path, seconds: float, environment: Mapping[str, str], *, is_small: bool = False, cwd: Path = ROOT
) -> Generator[Line]:
    """Run the steps. Yield the result of each as soon as its line is written. If the caller stops, or an exception interrupts the day, the
    steps that still run are killed."""
    out.mkdir(parents=True, exist_ok=True)
    end_s, running = time.monotonic() + seconds, Running()

    def run(step: Step) -> tuple[Line, str]:
        left_s = end_s - time.monotonic()
        if left_s < LEAST_S:
            return Line(step.name, "left out", None, 0.0, 0.0, f"{max(0.0, left_s):.0f} s were left", []), ""
        command, limit_s = command_of(step, is_small=is_small), step.limit_s * (REHEARSED if is_small else 1)
        return run_step(step.name, command, min(limit_s, left_s), environment, cwd, running)

    with (
        (out / LINES).open("w") as lines,
        (out / LOG).open("w") as log,
        contextlib.closing(results(run, steps, running=running, is_small=is_small)) as ended,
    ):
        for line, printed in ended:
            log.write(f"=== {line.step}: {line.outcome} after {line.seconds:.1f} s\n{printed}\n")
            log.flush()
            lines.write(json.dumps(asdict(line)) + "\n")
            lines.flush()
            yield line


def results(
    run: Callable[[Step], tuple[Line, str]], steps: Sequence[Step], *, running: Running, is_small: bool
) -> Generator[tuple[Line, str]]:
    """Run the steps one after another. In a rehearsal, run the first one, which installs packages, and then TOGETHER of the others at the
    same time. Yield results as they come. If the caller takes no more of them, kill the steps that run and begin no others."""
    yield from map(run, steps[:1] if is_small else steps)
    if is_small:
        pool = ThreadPoolExecutor(TOGETHER)
        try:
            yield from (done.result() for done in as_completed([pool.submit(run, step) for step in steps[1:]]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            running.stop()
            pool.shutdown()


def command_of(step: Step, *, is_small: bool) -> list[str]:
    given = [*step.command, *(step.small if is_small else ())]
    return [sys.executable if word == PYTHON else word for word in given]


def run_step(
    name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str], cwd: Path, running: Running
) -> tuple[Line, str]:
    """Run a command for at most `limit_s`, then kill it and its children. Return its line and everything that it printed. The output goes
    to files, because a child that outlives the command would keep a pipe open."""
    began_s, late = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            return Line(name, "failed", None, 0.0, 0.0, f"{command[0]} cannot be run: {error}", []), ""

        def end() -> None:
            late.set()
            kill_group(process.pid)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            running.add(process.pid)
            _, ended, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
            running.remove(process.pid)
            kill_group(process.pid)  # the children of the command
        process.returncode = os.waitstatus_to_exitcode(ended)
        status = None if late.is_set() else process.returncode
        printed, errors = (_text(file) for file in (out, err))
    seconds, spent_s = round(time.monotonic() - began_s, 1), round(usage.ru_utime + usage.ru_stime, 1)
    line = Line(name, _outcome(status), status, seconds, spent_s, _said(printed, errors, status), objects(printed))
    return line, printed + errors


def _outcome(status: int | None) -> str:
    if status is None:
        return "timed out"
    return "passed" if status == 0 else "failed" if status > 0 else "died"


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _said(printed: str, errors: str, status: int | None) -> str:
    lines = (printed.strip() or errors.strip()).splitlines()
    if status == 0:
        return lines[-1][-SAID_BYTES:] if lines and not lines[-1].startswith(("{", "]", "}")) else ""
    return "\n".join(text for part in (printed, errors) if (text := part.strip()[-SAID_BYTES:]))


def objects(printed: str) -> list[Any]:
    """Return what a step printed as JSON: one document, or one object a line among other lines."""
    with contextlib.suppress(json.JSONDecodeError):
        whole = json.loads(printed)
        return whole if isinstance(whole, list) else [whole]
    found: list[Any] = []
    for line in printed.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def environment_of(work: Path) -> dict[str, str]:
    """Return the environment variables of all steps. Compiled code and bytecode go into the folder `work`. If wheels were carried along,
    the first step installs them into a subfolder of `work`, from which Python imports them."""
    site = [str(FIRST), str(work / INSTALLED)] if (CARRIED / "wheels").is_dir() else []
    given = os.environ.get("PYTHONPATH")
    paths = [*site, str(ROOT), str(ROOT / "deploy" / "entry"), *([given] if given else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONPYCACHEPREFIX": str(work / "bytecode"),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(work / "cache"),
        "CUDA_MODULE_LOADING": "EAGER",  # a kernel is loaded with its module, not at its first launch, which is timed
        **({SITE: site[1]} if site else {}),
    }


def main(argv: Sequence[str] | None = None, prog: str = "python -m tests.lab.gpu_day.day") -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-day")), help="folder for results; default: $OUT or gpu-day"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all steps together")
    parser.add_argument("--small", action="store_true", help="one case per test and tiny models, for a model of a card in software")
    parser.add_argument("--kept", type=Path, help="folder where what steps compile stays for the next day; default: a temporary one")
    parser.add_argument("--plant", action="store_true", help="also run a step that dies and one that hangs")
    parser.add_argument("--only", metavar="TEXT", help="run only the first step, which installs, and those whose names contain the text")
    options = parser.parse_args(argv)
    steps = [step for number, step in enumerate(STEPS) if not number or options.only is None or options.only in step.name]
    if options.plant:
        steps[2:2] = PLANTED
    with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as temporary:
        work, found = options.kept or Path(temporary), list[Line]()
        shutil.rmtree(work / INSTALLED, ignore_errors=True)
        with contextlib.closing(run_day(steps, options.out, options.seconds, environment_of(work), is_small=options.small)) as lines:
            for line in lines:
                found.append(line)
                print(f"{line.seconds:6.1f} s  {line.outcome:9}  {line.step}  {'' if line.has_passed else line.said[-200:]}", flush=True)
    print(f"{sum(line.has_passed for line in found)} of {len(found)} steps passed; see {options.out / LINES} and {options.out / LOG}")
    raise SystemExit(not all(line.has_passed for line in found))


if __name__ == "__main__":
    main()
