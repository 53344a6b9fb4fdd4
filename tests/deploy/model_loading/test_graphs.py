"""The sizes for which graphs are captured cover all that a batch may have."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deploy.model_loading.graphs import MANY, sizes_of

STEP: dict[str, int | None] = {"t": 512, "s": 8, "r": 8, "h": 8, "m": 40, "p": 24, "p1": 3, "pages": None}
SAMPLER: dict[str, int | None] = {"r": 8, "n": 8, "biased": None, "seen": None, "masked": 8}


def magnitude(value: int) -> int:
    return int(np.frexp(float(value))[1])


@pytest.mark.parametrize("variables", [STEP, SAMPLER])
def test_sizes_are_those_that_the_program_takes(variables: dict[str, int | None]) -> None:
    sizes = list(sizes_of(variables))
    assert len({tuple(each.items()) for each in sizes}) == len(sizes) <= 64
    for each in sizes:
        assert each.keys() == variables.keys()
        assert all(value == MANY if (most := variables[name]) is None else 0 < value <= most for name, value in each.items())


def test_each_batch_has_sizes_of_its_own_magnitude_that_cover_it() -> None:
    """So many tokens exactly, and page tables less than four times as long."""
    sizes = list(sizes_of(STEP))
    for t, p in itertools.product((1, 2, 3, 4, 5, 63, 64, 511, 512), (1, 2, 7, 16, 24)):
        near = [each for each in sizes if magnitude(each["t"]) == magnitude(t) and 0 <= magnitude(each["p"] or 0) - magnitude(p) < 2]
        assert near, (t, p)
        assert all(each["s"] >= min(each["t"], 8) and each["pages"] == MANY for each in near)


def test_without_variables_there_is_one_size() -> None:
    assert list(sizes_of({})) == [{}]
