"""Build pycuda into this virtual environment for the tests of the software GPU. PyPI has only pycuda's source.

    python -m tests.gpu.build_pycuda

The headers come from NVIDIA's wheels, and the build links with the software driver, so neither a toolkit nor a card is needed. Without a
compiler or a network this program prints what is missing and exits with status 0. Tests that need pycuda are then skipped with a reason.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.gpu.driver.library import ROOT, build, compiler

HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-profiler-api")
NEEDED = ("Mako", "pytools")  # what pycuda needs beside numpy
SETTINGS = """
CUDA_ROOT = {root!r}
CUDA_INC_DIR = [{root!r} + "/include"]
CUDADRV_LIB_DIR = [{libraries!r}]
CUDADRV_LIBNAME = ["cuda"]
CUDA_ENABLE_CURAND = False
CUDA_ENABLE_GL = False
CUDA_TRACE = False
USE_SHIPPED_BOOST = True
BOOST_INC_DIR = BOOST_LIB_DIR = BOOST_PYTHON_LIBNAME = BOOST_THREAD_LIBNAME = []
CXXFLAGS = ["-O0", "-w", "-g0"]
LDFLAGS = []
"""


CHECK = ("--require-hashes", "--only-binary", ":all:", "-c", ROOT / "constraints.txt")


def pip(*arguments: str | Path, python: str = sys.executable) -> None:
    """Run this environment's pip in the environment of another interpreter."""
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-q", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def install(folder: Path) -> None:
    pip("install", *CHECK, *NEEDED)
    pip("install", "--no-index", "--no-deps", wheel(folder))


def wheel(folder: Path, python: str = sys.executable) -> Path:
    """Build pycuda in a folder for an interpreter, with numpy and setuptools of its environment, whose hashes were checked. Return the
    wheel; the source lies in the folder, too."""
    pip("download", *CHECK, "--no-deps", "--no-binary", "pycuda", "--no-build-isolation", "-d", folder, "pycuda", python=python)
    pip("download", *CHECK, "--no-deps", "-d", folder, *HEADERS)
    for headers in folder.glob("*.whl"):
        zipfile.ZipFile(headers).extractall(folder / "headers")
    with tarfile.open(next(folder.glob("pycuda-*.tar.gz"))) as source:
        source.extractall(folder / "source", filter="data")
    tree = next((folder / "source").iterdir())
    root = next((folder / "headers").rglob("include/cuda.h")).parents[1]
    libraries = folder / "libraries"
    build(libraries)
    (libraries / "libcuda.so").symlink_to("libcuda.so.1")
    (tree / "siteconf.py").write_text(SETTINGS.format(root=str(root), libraries=str(libraries)))
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder / "built", tree, python=python)
    return next((folder / "built").glob("*.whl"))


def main() -> None:
    if importlib.util.find_spec("pycuda") is not None:
        return
    if compiler() is None or shutil.which(os.environ.get("CXX", "c++")) is None:
        print("pycuda is not built, for want of a C++ compiler: tests on the software GPU that need it are skipped")
        return
    print("building pycuda, once: a minute or two")
    with tempfile.TemporaryDirectory() as folder:
        try:
            install(Path(folder))
        except subprocess.CalledProcessError as error:
            lines = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if "error" in line.lower()]
            print(f"pycuda is not built ({lines[0].strip() if lines else error}): tests on the software GPU that need it are skipped")


if __name__ == "__main__":
    main()
