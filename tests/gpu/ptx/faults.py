"""Exceptions for errors of a kernel and for PTX that the software GPU does not support."""

from __future__ import annotations


class Fault(Exception):
    """A kernel broke a rule of the hardware, such as a bad address, a misaligned access, a misused barrier or a hang."""


class UnknownPtx(Exception):
    """A PTX text or an instruction that the software GPU does not support."""
