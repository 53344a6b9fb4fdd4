"""Memory that a process needs no more goes back to the system."""

import subprocess
import sys
from pathlib import Path

import pytest

# Blocks of 64 KB come from the heap. A block that stays in use above them keeps the heap from shrinking by itself.
PROCESS = """
import ctypes
from pathlib import Path
from server.free_memory import return_free_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

blocks = [libc.malloc(64 << 10) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[:-1]:
    libc.free(block)
before = resident_mib()
return_free_memory()
print(before - resident_mib())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_free_memory_goes_back_to_the_system() -> None:
    returned = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True).stdout
    assert int(returned) >= 60


CODE = """
import ctypes, mmap, sys
from pathlib import Path
from server.free_memory import return_free_memory

PAGE = mmap.PAGESIZE
path = Path(sys.argv[1])
path.write_bytes(b"a" * 64 * PAGE)
libc = ctypes.CDLL(None)

def resident(part):
    address = ctypes.addressof(ctypes.c_char.from_buffer(part))
    lines = Path("/proc/self/smaps").read_text().split(f"{address:x}-")[1].splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

parts = []
with path.open("rb") as file:
    for change in (False, True):
        part = mmap.mmap(file.fileno(), 64 * PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        if change:
            part[5 * PAGE] = ord("b")
        sum(part[at] for at in range(0, 64 * PAGE, PAGE))
        address = ctypes.addressof(ctypes.c_char.from_buffer(part))
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(64 * PAGE), mmap.PROT_READ | mmap.PROT_EXEC) == 0
        parts.append(part)
before = [resident(part) for part in parts]
return_free_memory()
after = [resident(part) for part in parts]
print(before[0] - after[0] >= 128, before[1] == after[1], chr(parts[1][5 * PAGE]), chr(parts[0][5 * PAGE]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_code_goes_back_that_is_as_it_is_in_its_file(tmp_path: Path) -> None:
    """The process has changed a page of one of two mappings of a library. That mapping stays; the other one is read again from the file."""
    command = [sys.executable, "-c", CODE, str(tmp_path / "code.so")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True True b a\n"
