"""A plugin for pytest, which pyproject.toml loads: NumPy multiplies on one thread, also in the processes that tests start.

Tests multiply small matrices, beside tests on all other cores. Threads of OpenBLAS wait for each other by spinning, which takes several
times as much processor time as the products.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "OPENBLAS_NUM_THREADS"  # OpenBLAS reads it once, when NumPy is imported
assert VARIABLE in os.environ or "numpy" not in sys.modules, "NumPy was imported before this plugin"
os.environ.setdefault(VARIABLE, "1")
