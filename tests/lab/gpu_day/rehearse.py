"""Rehearse a day with a card: copy what travels, and run its steps there by the bare interpreter, on the model of a card in software, with
tiny models and one case per test. Stand-ins take the places of the peers and of NVIDIA's tools."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from server.settings import SettingsError
from tests.gpu.driver.library import ROOT, build
from tests.lab.gpu_day.day import FIRST
from tests.lab.gpu_day.prepare import travelling

WORK = ROOT / ".venv" / "rehearsal"
LOCK = WORK.with_suffix(".lock")
KEPT = "kept"  # in this folder: compiled code and bytecode, which the next rehearsal uses again
MOST_KEPT_BYTES = 4 << 30
STAND_INS = ROOT / "tests" / "lab" / "stand_ins"
SANITIZER = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\nexec "$@"\n'  # runs the command behind its options
TOOLS = {"compute-sanitizer": SANITIZER, "nvidia-smi": "#!/bin/sh\necho a card in software\n"}


@contextmanager
def alone() -> Generator[None]:
    """Hold the lock of the folder for a rehearsal, and of .gpu. Raise SettingsError if another process holds it."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another `make gpu-day` uses {WORK}; expected one at a time: wait for its end, or stop it"
            raise SettingsError(text) from None
        yield


def lay_peers(folder: Path) -> None:
    """Write the stand-ins for the packages of peers to a folder, where they look installed."""
    for file in STAND_INS.glob("*.py"):
        about = folder / f"{file.stem}-0.1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {file.stem}\nVersion: 0.1\n")
        shutil.copy(file, folder)


def lay_tools(folder: Path) -> None:
    folder.mkdir()
    for name, text in TOOLS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def clear(work: Path) -> None:
    """Empty the folder of the last rehearsal, except its subfolder KEPT. Remove KEPT too if it has more than MOST_KEPT_BYTES."""
    num_kept = sum(path.stat().st_size for path in (work / KEPT).rglob("*") if path.is_file())
    for old in work.glob("*"):
        if old.name != KEPT or num_kept > MOST_KEPT_BYTES:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def copy_checkout(folder: Path) -> None:
    for path in travelling():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # with its time, by which Python knows whether bytecode is up to date


def environment_in(work: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rehearsal: those of a card in software, and only PATH of this environment."""
    lay_tools(work / "tools")
    lay_peers(work / "peers")
    library = build(work / "card")
    return {
        "HOME": str(work),
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join((str(work / "tools"), given["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(FIRST.relative_to(ROOT)), str(work / "peers"))),
        "STAND_IN_LOG": str(work / "peers.log"),
        "LD_LIBRARY_PATH": str(library.parent),
        "SOFTWARE_GPU_ARCH": "9.0",
        "SOFTWARE_GPU_MEMORY": str(4 << 30),
    }


def lay_rival(python: str) -> None:
    """Install a package named tests, as careless packages do, so that the rehearsal shows that the tests of the checkout come first."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    (packages / "tests").mkdir(exist_ok=True)
    (packages / "tests" / "__init__.py").write_text("")


def rehearse(python: str, command: Sequence[str], out: Path) -> int:
    """Run the command of the day in a copy of what travels. Return its exit status."""
    clear(WORK)
    copy_checkout(WORK / "checkout")
    lay_rival(python)
    rehearsed = [python, *command, "--small", "--out", str(out.resolve()), "--kept", str(WORK / KEPT)]
    with subprocess.Popen(rehearsed, cwd=WORK / "checkout", env=environment_in(WORK, os.environ)) as process:
        try:
            return process.wait()
        finally:
            process.wait()  # an interrupted day ends its steps
