"""Sessions hold no more bytes than they may together, and no key takes what the others need."""

from __future__ import annotations

import pytest

from server.api.speech.realtime_memory import SessionMemory, Share
from server.errors import ApiError


def test_what_is_given_back_can_be_held_again() -> None:
    memory = SessionMemory(100, 60)
    first, second, third = (Share(memory, owner) for owner in ("a", "a", "b"))
    first.hold(40)
    with pytest.raises(ApiError, match="the sessions of the key would hold 70 bytes of audio; expected at most 60") as refused:
        second.hold(30)
    assert refused.value.kind.retry and refused.value.kind.status == 503
    second.hold(20)
    with pytest.raises(ApiError, match="the sessions of this server would hold 110 bytes"):
        third.hold(50)
    third.hold(40)
    first.hold(10)
    third.hold(60)
    assert (memory.num_bytes, dict(memory.of_owner)) == (90, {"a": 30, "b": 60})
    for share in (first, second, third):
        share.hold(0)
    assert (memory.num_bytes, dict(memory.of_owner)) == (0, {})


def test_without_keys_each_session_is_its_own_owner() -> None:
    memory = SessionMemory(100, 60)
    first, second = Share(memory, ""), Share(memory, "")
    first.hold(50)
    second.hold(50)
    with pytest.raises(ApiError, match="the session would hold 61 bytes"):
        Share(SessionMemory(100, 60), "").hold(61)


def test_less_can_always_be_held() -> None:
    memory = SessionMemory(100, 60)
    share = Share(memory, "a")
    share.hold(60)
    memory.most_of_owner = 10
    share.hold(50)
    assert memory.num_bytes == 50
