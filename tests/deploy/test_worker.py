"""The program of a worker process."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import gc
from deploy import worker
from server.messages import Load
worker.load_model = lambda load, progress: [[i] for i in range(100_000)]  # a compiled program has this many objects
model = worker.build(Load("m", "m"), None)
print(len(model), len(gc.get_objects()))
"""


def test_the_collector_leaves_out_what_was_loaded() -> None:
    """The garbage collector ignores all objects that exist when loading ends. Scanning the compiled program would stop all streams for up
    to 0.13 s."""
    output = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True).stdout
    num_loaded, num_watched = map(int, output.split())
    assert num_loaded == 100_000 and num_watched < 1000
