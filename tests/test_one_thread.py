"""NumPy multiplies on one thread in the tests, as tests/one_thread.py asks, unless whoever runs the tests has asked for more."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from tests.one_thread import VARIABLE


def test_numpy_multiplies_on_one_thread() -> None:
    libraries = list(Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas64_*"))
    if not libraries:
        pytest.skip("needs a NumPy that brings OpenBLAS")
    assert ctypes.CDLL(str(libraries[0])).scipy_openblas_get_num_threads64_() == min(int(os.environ[VARIABLE]), os.cpu_count() or 1)
