"""The kinds of numbers that quantised weights consist of. The front imports this module to read GGUF files, so it imports little."""

from __future__ import annotations

from enum import StrEnum

import numpy as np


class Kind(StrEnum):
    """How numbers are stored."""

    INT = "int"
    E2M1 = "e2m1"  # floats of 4 bits


# The values of 4-bit floats (e2m1), indexed by their bits. They are doubled, which makes them integers.
DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
