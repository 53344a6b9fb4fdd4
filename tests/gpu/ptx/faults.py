"""What a kernel may do wrong, and PTX that the software GPU does not know."""

from __future__ import annotations


class Fault(Exception):
    """A kernel broke a rule of the hardware: an address, an alignment, a barrier, a hang."""


class UnknownPtx(Exception):
    """Text or an instruction that no table here describes."""
