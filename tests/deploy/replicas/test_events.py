"""Events of a stream are found in whatever pieces its bytes arrive."""

from __future__ import annotations

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
