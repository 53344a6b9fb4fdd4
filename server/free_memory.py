"""Give memory that this process has freed back to the system, which the C library's allocator keeps for later use."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Call this after work that needs much memory for a moment. Reading a tokenizer.json of 260,000 tokens leaves 190 MB unused; to give
    them back takes 10 ms."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # only glibc has it
        trim(0)
