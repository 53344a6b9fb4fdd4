"""Which numerics a program has if nobody has chosen any."""

from __future__ import annotations

import pytest

from compiler.frontend.numerics import Numerics
from compiler.machine.target import GPU, NAMED, get


@pytest.mark.parametrize("name", NAMED)
def test_programs_for_a_gpu_always_round(name: str) -> None:
    """Quantised weights make a program portable on other machines only."""
    found, is_gpu = Numerics.on(get(name)), get(name).system == GPU
    assert found.rounds(is_quantised=True) == is_gpu and found.rounds(is_quantised=False)
