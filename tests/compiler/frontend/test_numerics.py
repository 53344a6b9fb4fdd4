"""If the user has chosen no numerics, the target and the weights decide how a program rounds."""

from __future__ import annotations

import pytest

from compiler.frontend.numerics import Numerics
from compiler.machine.target import GPU, NAMED, get


@pytest.mark.parametrize("name", NAMED)
def test_programs_for_a_gpu_always_round(name: str) -> None:
    """By default, programs for a GPU round rows whatever their weights are. On other machines, programs with quantised weights do not, so
    that their results are the same on each of them."""
    found, is_gpu = Numerics.on(get(name)), get(name).system == GPU
    assert found.rounds(is_quantised=True) == is_gpu and found.rounds(is_quantised=False)
