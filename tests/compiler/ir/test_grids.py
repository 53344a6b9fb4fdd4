"""The grids of GGUF's IQ1, IQ2 and IQ3 are those of the `gguf` package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from compiler.ir.grids import GRIDS

OWN = {
    "iq1": gguf.quants.IQ1_S,
    "iq2_xxs": gguf.quants.IQ2_XXS,
    "iq2_xs": gguf.quants.IQ2_XS,
    "iq2_s": gguf.quants.IQ2_S,
    "iq3_xxs": gguf.quants.IQ3_XXS,
    "iq3_s": gguf.quants.IQ3_S,
}


def reference(name: str) -> Any:
    """Return the grid of the `gguf` package. Each number is replaced by its index in the package's list of levels."""
    OWN[name].init_grid()
    return np.searchsorted(OWN[name].grid_map, OWN[name].grid.reshape(OWN[name].grid_shape))


def test_every_grid_has_a_reference() -> None:
    assert GRIDS.keys() == OWN.keys()


@pytest.mark.parametrize("name", OWN)
def test_points_and_their_order_are_those_of_the_reference(name: str) -> None:
    grid = GRIDS[name]
    assert (grid.size, grid.levels) == (OWN[name].grid_shape[1], len(OWN[name].grid_map))
    np.testing.assert_array_equal(grid.points(), reference(name))


@pytest.mark.parametrize("name", OWN)
def test_a_word_has_four_bits_for_each_coordinate(name: str) -> None:
    grid = GRIDS[name]
    found = grid.codes()[:, None].astype(np.uint32) >> 4 * np.arange(grid.size, dtype=np.uint32) & 15
    assert grid.codes().dtype.itemsize * 2 == grid.size
    np.testing.assert_array_equal(found, reference(name))
