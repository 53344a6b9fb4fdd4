"""When a replica dies, another one repeats its stream, and the client gets only what it does not have yet."""

from __future__ import annotations

import pytest

from deploy.ray.progress import Departure, Progress
from deploy.replicas.events import Events


def chunk(index: int, text: str) -> bytes:
    return b'data: {"id":"a","choices":[{"index":%d,"delta":{"content":"%s"}}]}\n\n' % (index, text.encode())


def test_a_second_stream_goes_on_behind_the_first() -> None:
    events = [chunk(0, f"t{at}") for at in range(6)]
    progress = Progress()
    assert all(progress.takes(event) for event in events[:4])
    progress.again()
    assert [progress.takes(event) for event in events[:2]] == [False] * 2
    progress.again()  # the second replica dies before it has caught up
    assert [progress.takes(event) for event in events] == [False] * 4 + [True] * 2


def test_choices_may_take_turns_in_another_order() -> None:
    progress = Progress()
    assert all(progress.takes(event) for event in (chunk(0, "a"), chunk(1, "x"), chunk(0, "b"), chunk(0, "c")))
    progress.again()
    order = (chunk(1, "x"), chunk(1, "y"), chunk(0, "a"), chunk(0, "b"), chunk(2, "new"), chunk(0, "c"), chunk(0, "d"))
    assert [progress.takes(event) for event in order] == [False, True, False, False, True, False, True]


def test_another_stream_is_not_a_continuation() -> None:
    progress = Progress()
    assert progress.takes(chunk(0, "a"))
    assert progress.takes(chunk(0, "b"))
    progress.again()
    assert not progress.takes(chunk(0, "a"))
    with pytest.raises(Departure, match="the first 2 events differ"):
        progress.takes(chunk(0, "c"))


def test_a_prefix_cache_makes_no_difference_and_text_about_it_does() -> None:
    def start(counts: str) -> bytes:
        return b'event: message_start\ndata: {"usage":{%s}}\n\n' % counts.encode()

    progress = Progress()
    assert progress.takes(start('"input_tokens":90,"cache_read_input_tokens":0,"output_tokens":1'))
    progress.again()
    assert not progress.takes(start('"input_tokens":10,"cache_read_input_tokens":80,"output_tokens":1'))
    quoted = Progress()
    assert quoted.takes(chunk(0, '\\"cached_tokens\\":1'))
    quoted.again()
    with pytest.raises(Departure):
        quoted.takes(chunk(0, '\\"cached_tokens\\":2'))


def test_choices_are_told_apart_in_each_form_of_event() -> None:
    """Chat and completions name the choice in a list, llama.cpp's completions at the beginning, others not at all."""
    named = [chunk(12, "a"), b'data: {"index":3,"content":"a"}\n\n', b'event: ping\ndata: {"type":"ping"}\n\n', b'{"choices":[]}\n']
    progress = Progress()
    assert all(progress.takes(event) for event in named)
    assert {*progress.parts} == {b"12", b"3", b""}
    assert progress.parts[b""].delivered == 2


def test_several_events_in_one_piece_are_told_apart() -> None:
    events = Events("text/event-stream")
    assert events.push(chunk(0, "a") + chunk(0, "b")) == [chunk(0, "a"), chunk(0, "b")]
    assert events.push(b"\n") == [], "shorter than the end of an event"
    assert events.push(b"\n") == [b"\n\n"]
