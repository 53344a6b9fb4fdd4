from __future__ import annotations

import pytest

from runtime.units import in_units


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (236.4 * 2**20, "236.4 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**40 - 4096, "1.00 TiB"),
        (1000 * 2**30, "1,000.00 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
    ],
)
def test_an_amount_is_written_in_the_largest_unit_that_it_reaches(num_bytes: float, text: str) -> None:
    assert in_units(num_bytes) == text
