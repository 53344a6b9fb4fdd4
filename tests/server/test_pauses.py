"""The settings of garbage collection after a start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from server import pauses


def test_the_objects_of_a_start_are_exempt_without_being_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """To examine them takes 0.1 s, for which the first request would wait."""
    called: list[str] = []
    recorded = SimpleNamespace(
        freeze=lambda: called.append("freeze"),
        set_threshold=lambda *_: called.append("set_threshold"),
        collect=lambda: called.append("collect"),
    )
    monkeypatch.setattr(pauses, "gc", recorded)
    pauses.collect_in_small_portions()
    assert called == ["freeze", "set_threshold"]
