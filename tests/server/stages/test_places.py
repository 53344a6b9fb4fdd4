"""The places of stages on the command line."""

from __future__ import annotations

import pytest

from server.stages.places import DEFAULT_PORT, Place, PlaceError, parse_place, parse_places, require_places


def test_places() -> None:
    assert parse_places("2") == ("local", "local")
    assert parse_places("host1, 10.0.0.2:99,local") == ("host1", "10.0.0.2:99", "local")
    assert parse_place("host1") == Place("host1", "host1", DEFAULT_PORT)
    assert parse_place("[fe80::1]:99") == Place("[fe80::1]:99", "fe80::1", 99)
    assert parse_place("[fe80::1]") == Place("[fe80::1]", "fe80::1", DEFAULT_PORT)
    assert parse_place("local") == Place("local")


@pytest.mark.parametrize("text", ["", "host:", "host:x", "host:0", "host:65536", ":99", "[]:1", "[::1]99", "a,,local"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(PlaceError, match="no place of a stage; expected local, HOST or HOST:PORT"):
        parse_places(text)


@pytest.mark.parametrize("text", ["0", "1", "local"])
def test_one_stage_is_none(text: str) -> None:
    with pytest.raises(PlaceError, match="at least two stages"):
        parse_places(text)


def test_no_stage_is_named_as_it_was_given() -> None:
    with pytest.raises(PlaceError, match=r"^stages is 0; expected at least two stages"):
        parse_places("0")


def test_the_last_stage_is_the_server() -> None:
    with pytest.raises(PlaceError, match="end the list with local, or with head"):
        require_places(("host1", "host2"))
    with pytest.raises(PlaceError, match="head is the last stage, without layers: name it last"):
        parse_places("head,host2")


def test_a_server_behind_other_machines_has_no_layers() -> None:
    assert parse_places("host1,host2") == ("host1", "host2", "head")
    assert parse_places("host1,head") == ("host1", "head")
    assert parse_places("head:7070,local") == ("head:7070", "local")
