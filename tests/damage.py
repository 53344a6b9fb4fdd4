"""Damage a file's content at random with Hypothesis: cut off its end, flip up to three bits, or do both."""

from __future__ import annotations

from hypothesis import strategies as st


def damaged(content: bytes, data: st.DataObject) -> bytes:
    changed = bytearray(content)
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    for _ in range(data.draw(st.integers(0, 3)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(changed)
