"""Keep what servers and loads compile between runs of the tests, in the folder that pytest keeps for itself.

The key of a program holds the digest of the compiler's sources, so a change of the compiler compiles everything again. Tests that compile a
program without loading a model do not read these files (kept_code.py keeps their kernels).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".pytest_cache" / "programs"
PARTS = ("executables", "kernels")  # of a cache (deploy/cache.py); weights belong to the files of one run
MOST_BYTES = 1 << 30


@contextmanager
def kept_programs(cache_folder: Path, folder: Path = FOLDER) -> Iterator[None]:
    """Let a new cache folder begin with the programs and kernels of earlier runs. Processes of one run may share it."""
    cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for part in PARTS:
        (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process has made the link
            (cache_folder / part).symlink_to(folder / part)
    yield
    trim(folder)


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove the files that were used least recently until the rest fits. A program and its sidecar go together."""
    used: defaultdict[Path, list[tuple[float, int, Path]]] = defaultdict(list)
    for path in folder.glob("*/[0-9a-f]*"):
        with suppress(FileNotFoundError):  # another process has removed it
            status = path.stat()
            used[path.with_suffix("")].append((status.st_mtime, status.st_size, path))
    total = 0
    for files in sorted(used.values(), key=max, reverse=True):
        total += sum(num_bytes for _, num_bytes, _ in files)
        for _, _, path in files if total > most_bytes else ():
            path.unlink(missing_ok=True)
