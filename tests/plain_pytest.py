"""Start pytest in a process of its own, for tests of plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def plain_pytest(folder: Path, *arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run pytest on tests below `folder`, without our configuration, and without the plugins of installed packages, whose import takes a
    second. Plugins that the tests need are named in `arguments`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
