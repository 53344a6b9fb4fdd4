"""`make check`: check a change within minutes. Lint everything, check the types of changed modules, and run the tests that the change can
reach, nearest first, until the time is up. What is left out is named; `make test` runs everything."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests.check.plugin import seconds_of_files
from tests.check.reach import Reached, Tree, changed_files, commit_before

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PARALLEL = ("-q", "-n", "4", "--dist", "loadgroup", "--no-loadscope-reorder")  # as the Makefile runs all tests
UNKNOWN_S = 5.0  # seconds that a test file is taken to need if it has not run on this machine


def main() -> None:
    began_s = time.time()
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__)
    parser.add_argument("--base", default="", help="commit to compare with; by default where the branch left its upstream, or else HEAD")
    parser.add_argument("--minutes", type=float, default=2.3, help="time after which no further test starts")
    parser.add_argument("--list", action="store_true", help="list the test files and their distance from the change, and run nothing")
    asked = parser.parse_args()
    base = asked.base or commit_before(ROOT)
    changed = changed_files(ROOT, base)
    if not changed:
        sys.exit(f"nothing differs from {base}; name an older commit: make check BASE=HEAD~1")
    tree = Tree.of(ROOT)
    tests = ordered(tree.reached(changed), changed)
    if asked.list:
        print(*(f"{found.distance} {found.path}" for found in tests), sep="\n")
        return
    print(f"{len(changed)} files differ from {base}; they can reach {len(tests)} of {len(tree.tests)} test files", flush=True)
    sys.exit(asyncio.run(check(changed, [found.path for found in tests], began_s + 60 * asked.minutes)))


def ordered(tests: list[Reached], changed: list[str]) -> list[Reached]:
    """Return the tests in the order in which they run: nearest to the change first, then those that mirror a changed file, then short
    ones."""
    mirrors = {f"test_{Path(path).stem}.py" for path in changed}
    seconds = seconds_of_files(ROOT)
    return sorted(
        tests, key=lambda found: (found.distance, Path(found.path).name not in mirrors, seconds.get(found.path, UNKNOWN_S), found.path)
    )


async def check(changed: list[str], tests: list[str], until_s: float) -> int:
    """Run all checks at the same time and return the exit status. No test starts after `until_s`, in seconds since the epoch."""
    typed = [path for path in changed if path.endswith(".py") and is_typed(path) and (ROOT / path).exists()]
    checks = [
        run("format", "ruff", "format", "--check", "--quiet", "."),
        run("lint", "ruff", "check", "--quiet", "."),
        run("imports", "lint-imports"),
    ]
    if typed:
        checks.append(run("types", "basedpyright", *typed))
    with NamedTemporaryFile("w", suffix=".txt") as ranked:
        ranked.write("\n".join(tests))
        ranked.flush()
        if tests:
            options = ["-p", "tests.check.plugin", "--until", str(until_s), "--ranked", ranked.name]
            # pytest finds the fixtures of a folder only if the files of the folder are named in a row
            checks.append(run("tests", "pytest", *PARALLEL, *options, *sorted(tests), is_shown=True))
        failed = [name for name in await asyncio.gather(*checks) if name]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed; `make test` runs the remaining tests")
    return 1 if failed else 0


def is_typed(path: str) -> bool:
    """Return whether pyproject.toml tells the type checker to check a file."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    included, excluded = (
        any(path.startswith(f"{pattern}/") or fnmatchcase(path, pattern) for pattern in options[which]) for which in ("include", "exclude")
    )
    return included and not excluded


async def run(name: str, program: str, *arguments: str, is_shown: bool = False) -> str:
    """Run a program and return `name` if it fails. Show its output at once, or only if it fails."""
    output = None if is_shown else asyncio.subprocess.PIPE
    # Tests wait for other processes, and checks do not, so let the tests go first.
    command = [*(() if is_shown else ("nice",)), str(BIN / program), *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=output, stderr=output and asyncio.subprocess.STDOUT)
    said, _ = await process.communicate()
    if process.returncode == 0:
        print(f"{name} passed", flush=True)
        return ""
    print(f"{name} failed\n{'' if said is None else said.decode()}", flush=True)
    return name


if __name__ == "__main__":
    main()
