"""Memory that a process has freed goes back to the system."""

import subprocess
import sys

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
