"""`python -m tests.check.observe [FILE...]`: find tests that `make check` would wrongly leave out.

Run each test file by itself under strace, and record which files of the checkout its processes open. A change of any of these files must
reach the test. Modules that an empty test opens do not count, because only the conftest.py files import them. Of our own modules only the
bytecode counts, because the compiler's version is a hash of all sources. Records are kept in build/observed, so an interrupted campaign
goes on where it stopped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.check.reach import Tree

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "build" / "observed"
BYTECODE = re.compile(r"__pycache__/(\w+)\.cpython-\d+(?:\.opt-\d)?(?:-pytest-[\d.]+)?\.pyc")
PACKAGES = ("server/", "compiler/", "runtime/", "deploy/")
AT_ONCE = 2
PATIENCE_S = 1800


def main(asked: list[str]) -> None:
    tree = Tree.of(ROOT)
    tests = asked or tree.tests
    subprocess.run([sys.executable, "-m", "compileall", "-q", *PACKAGES, "tests"], cwd=ROOT, check=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        opened = dict(zip(tests, pool.map(lambda path: observed(path, tree), tests), strict=True))
    folders = sorted({str(Path(path).parent) for path in tests})
    imported = dict(zip(folders, map(opened_by_empty_test, folders), strict=True))
    faults = [
        f"{path} opens {file}"
        for path in tests
        for file in sorted((opened[path] - imported[str(Path(path).parent)]) & tree.paths)
        if not file.endswith("conftest.py") and path not in {found.path for found in tree.reached([file])}
    ]
    print(*faults, f"{len(tests)} test files: {len(faults)} files are opened without being known", sep="\n")
    sys.exit(bool(faults))


def observed(path: str, tree: Tree) -> set[str]:
    record = RECORDS / f"{path.replace('/', '.')}.json"
    if not record.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(sorted(opened_by(path) & tree.paths)))
    return set(json.loads(record.read_text()))


def opened_by_empty_test(folder: str) -> set[str]:
    with tempfile.NamedTemporaryFile("w", dir=ROOT / folder, prefix="test_", suffix=".py") as file:
        file.write("def test_nothing():\n    pass\n")
        file.flush()
        return opened_by(str(Path(file.name).relative_to(ROOT)))


def opened_by(path: str) -> set[str]:
    """Return the files of the checkout that the processes of a test file open. A compiled module counts as its source."""
    with tempfile.NamedTemporaryFile("r") as trace:
        tracer = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=openat,open", "-e", "status=successful", "-o", trace.name]
        subprocess.run(
            [*tracer, sys.executable, "-m", "pytest", "-q", path], cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=False
        )
        names = re.findall(r'"((?:[^"\\]|\\.)+)"', trace.read())
    found = {Path(name) if name.startswith("/") else ROOT / name for name in names}
    inside = {str(file.relative_to(ROOT)) for file in found if file.is_relative_to(ROOT)}
    return {BYTECODE.sub(r"\1.py", name) for name in inside if not (name.endswith(".py") and name.startswith(PACKAGES))}


if __name__ == "__main__":
    main(sys.argv[1:])
