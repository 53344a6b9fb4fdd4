"""Format amounts of memory for people. The log, errors, commands and the console (`format.js`) write all amounts in the same units."""

from __future__ import annotations

UNITS = (("TiB", 40, 2), ("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1))  # name, power of two, digits after the point
LEAST = 0.99995  # least fraction of a unit that is written in this unit: 1,023.95 of the next smaller unit would be rounded to 1,024.0


def in_units(num_bytes: float) -> str:
    """Format a number of bytes, such as `236.4 MiB` or `1.25 GiB`."""
    for unit, power, digits in UNITS:
        if abs(num_bytes) >= LEAST * (1 << power):
            return f"{num_bytes / (1 << power):,.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"
