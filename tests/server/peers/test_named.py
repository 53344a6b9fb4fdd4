"""The header with which an ingress names the server that gives pages."""

from __future__ import annotations

import pytest

from server.peers.named import Giver, header_of, named

KEY = "0123456789abcdef"


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize(("url", "host", "port"), [("http://10.0.0.2:8000", "10.0.0.2", 8000), ("http://[fd00::1]:1", "fd00::1", 1)])
def test_a_giver_is_named(url: str, host: str, port: int, computes: bool) -> None:
    assert named(header_of(KEY, url, computes=computes), KEY) == Giver(host, port, computes)


@pytest.mark.parametrize("value", ["file:///etc/passwd", "http://a", "http://a:0", "http://a:65536", "https://a:1", "http://a:1 fast", ""])
def test_a_wrong_form_is_told_without_the_key(value: str, caplog: pytest.LogCaptureFixture) -> None:
    assert named(f"{KEY} {value}", KEY) is None
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING" and KEY not in text
    assert f"x-relaxserve-pages is KEY {value!r}; expected KEY http://HOST:PORT" in text


@pytest.mark.parametrize(("header", "key"), [("another-key http://a:0", KEY), (f"{KEY} http://a:0", None), ("", KEY), ("\xe9 a", KEY)])
def test_who_has_no_key_is_not_listened_to(header: str, key: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert named(header, key) is None and not caplog.records
