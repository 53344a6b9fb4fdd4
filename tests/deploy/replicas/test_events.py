"""Events of a stream are found in whatever pieces its bytes arrive."""

from __future__ import annotations

import tracemalloc

from deploy.replicas.events import Events, is_comment


def test_events_are_whole_however_the_bytes_arrive() -> None:
    stream = b"".join(b'data: {"at":%d}\n\n' % at for at in range(5)) + b": still working\n\n" + b"data: [DONE]\n\n"
    for size in (1, 3, 50, len(stream)):
        events = Events("text/event-stream")
        found = [event for at in range(0, len(stream), size) for event in events.push(stream[at : at + size])]
        assert b"".join(found) == stream
        assert [is_comment(event) for event in found] == [False] * 5 + [True, False]


def test_lines_of_json_are_events() -> None:
    assert Events("application/x-ndjson").push(b'{"a":1}\n{"b"') == [b'{"a":1}\n']


def test_a_long_event_is_not_copied_for_each_of_its_pieces() -> None:
    """An event with log-probabilities of a prompt has megabytes, which arrive in pieces."""
    events, piece, num_copies = Events("text/event-stream"), b"x" * 1000, 0
    tracemalloc.start()
    try:
        for number in range(1000):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert events.push(piece) == []
            _, most = tracemalloc.get_traced_memory()
            num_copies += most - before >= number * len(piece)
    finally:
        tracemalloc.stop()
    assert num_copies < 50
    assert events.push(b"\n") == [] and events.push(b"\n: after") == [piece * 1000 + b"\n\n"]
