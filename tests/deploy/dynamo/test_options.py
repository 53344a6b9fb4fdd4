"""The options of a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("dynamo.llm", reason="needs Dynamo (the extra dynamo)")

from deploy.dynamo.options import parse
from server.settings import SettingsError


def test_a_model_and_the_options_of_dynamo() -> None:
    options = parse(["demo=d", "--namespace", "mine", "--discovery-backend", "file"])
    assert (options.spec.name, options.entry, options.settings, options.url) == ("d", "demo=d", {}, None)
    assert (options.runtime.namespace, options.component, options.endpoint) == ("mine", "backend", "generate")
    assert options.runtime.discovery_backend == "file"


def test_an_endpoint_names_its_namespace_and_component() -> None:
    options = parse(["demo", "--endpoint", "dyn://a.b.c"])
    assert (options.runtime.namespace, options.component, options.endpoint) == ("a", "b", "c")


def test_settings_and_the_model_of_a_file(tmp_path: Path) -> None:
    (config := tmp_path / "relaxserve.yaml").write_text("max_body_bytes: 5000\nmodels:\n- {source: demo, name: d, max_batch: 4}\n")
    options = parse(["--config", str(config)])
    assert (options.spec.name, options.spec.max_batch, options.settings) == ("d", 4, {"max_body_bytes": 5000})


def test_settings_may_come_from_a_stream_which_is_read_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"max_body_bytes: 5000\nmodels: [demo]\n")
    os.close(writing)
    options = parse(["--config", f"/dev/fd/{reading}"])
    os.close(reading)
    assert (options.spec.name, options.settings) == ("demo", {"max_body_bytes": 5000})


def test_a_server_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_KEY", "a-key-of-some-length")
    options = parse(["demo", "--url", "http://host:8000", "--kv-events", "tcp://host:5557"])
    assert (options.url, options.events, options.key) == ("http://host:8000", "tcp://host:5557", "a-key-of-some-length")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "MODEL is missing"),
        (["demo", "--url", "http://x", "--config", "x.yaml"], "--url is http://x and --config is x.yaml; .*: leave one out"),
        (["demo", "--kv-events", "tcp://x:1"], "--kv-events is tcp://x:1 without --url; .*: leave it out"),
        (["demo", "--endpoint", "a.b"], "a.b"),
        (["/nowhere/model"], "/nowhere/model"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        parse(words)


@pytest.mark.parametrize("url", ["http://host", "https://host:8443/llm", "http://[::1]:8000/"])
def test_addresses_of_servers(url: str) -> None:
    assert parse(["demo", "--url", url]).url == url


@pytest.mark.parametrize(
    "url",
    ["", "host:8000", "localhost", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host:0", "http://[::1"]
    + ["http://ho st", "http://host/\n", "http://höst", "http://user@host", "http://host?key=1", "http://host#top"],
)
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(SettingsError) as found:
        parse(["demo", "--url", url])
    assert str(found.value) == f"--url is {url!r}; expected http://HOST:PORT"


@pytest.mark.parametrize("key", ["schlüssel", "line\nbreak"])
def test_a_key_that_cannot_be_sent_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_KEY", key)
    with pytest.raises(SettingsError, match="RELAXSERVE_KEY cannot be sent in an HTTP header; expected a key in printable ASCII"):
        parse(["demo", "--url", "http://host"])


@pytest.mark.parametrize(("text", "words"), [("models: [demo]", ["demo"]), ("models: [demo, demo=b]", []), ("max_body_bytes: 5000", [])])
def test_a_worker_has_one_model(text: str, words: list[str], tmp_path: Path) -> None:
    (config := tmp_path / "relaxserve.yaml").write_text(text)
    with pytest.raises(SettingsError, match="a worker serves one model"):
        parse([*words, "--config", str(config)])
