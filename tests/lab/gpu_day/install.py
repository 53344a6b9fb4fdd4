"""Install what `make gpu-day` carried along into the folder that the variable GPU_DAY_SITE names, and make sure that pycuda finds the
driver. If the carried build of pycuda does not, build its source with the toolkit of this machine. Without the variable, everything is
installed already, and only the driver is looked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.gpu_day.day import CARRIED, SITE

LOOK = "import pycuda.driver as d; d.init(); print(d.Device(0).name(), d.get_driver_version())"


def pip(*arguments: str | Path, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-cache-dir"]
    subprocess.run([*command, *map(str, arguments)], check=True, env={**os.environ, **variables})


def look() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)


def build(site: str) -> None:
    """Build the carried source of pycuda with the toolkit of this machine."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise SystemExit("pycuda's carried build does not work, and there is no nvcc to build another with")
    (source,) = CARRIED.glob("pycuda-*.tar.gz")
    pip("--no-build-isolation", "--upgrade", "--target", site, source, CUDA_ROOT=str(Path(compiler).resolve().parents[1]))


def main() -> None:
    site = os.environ.get(SITE)
    if site:
        pip("--no-compile", "--upgrade", "--target", site, *sorted((CARRIED / "wheels").glob("*.whl")))
    found = look()
    if found.returncode and site:
        print(found.stderr, file=sys.stderr)
        build(site)
        found = look()
    if found.returncode:
        raise SystemExit(found.stderr)
    print(json.dumps({"card": found.stdout.strip()}))


if __name__ == "__main__":
    main()
