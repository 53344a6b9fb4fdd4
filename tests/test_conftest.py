"""Programs that are no tests, such as the benchmarks of tests/lab, may import tests/conftest.py without a change of their process."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_an_import_leaves_the_garbage_collector_on() -> None:
    script = "import gc, tests.conftest; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "True\n"
