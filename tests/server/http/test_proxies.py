"""Behind proxies, the server finds the client's address, and removes the prefix below which a proxy serves it."""

from __future__ import annotations

import logging
import time

import pytest

from server.http.proxies import Proxies
from tests.server.http.test_record import lines

NETWORKS = ("127.0.0.1", "10.0.0.0/8", "fd00::/8")


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", "", "203.0.113.9"),
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("127.0.0.1", "1.2.3.4, 198.51.100.1", "198.51.100.1"),
        ("127.0.0.1", "198.51.100.1, 10.1.2.3", "198.51.100.1"),
        ("fd00::1", "2001:db8::7", "2001:db8::7"),
        ("127.0.0.1", "10.1.2.3", "10.1.2.3"),
        ("127.0.0.1", "somebody", "127.0.0.1"),
        ("127.0.0.1", "198.51.100.1, somebody", "127.0.0.1"),
        ("127.0.0.1", ",", "127.0.0.1"),
        ("", "198.51.100.1", ""),
    ],
    ids=[
        "direct",
        "said by a client",
        "no header",
        "proxy",
        "said to a proxy",
        "two proxies",
        "v6",
        "own network",
        "no address",
        "spoilt",
        "empty",
        "none",
    ],
)
def test_the_address_of_a_client_is_the_last_that_is_no_proxy(peer: str, forwarded: str, client: str) -> None:
    assert Proxies(NETWORKS, None).client(peer, forwarded) == client
    assert Proxies((), None).client(peer, forwarded) == peer


@pytest.mark.parametrize(
    ("path", "found"),
    [("/llm/v1/models", "/v1/models"), ("/llm", "/"), ("/llm/", "/"), ("/v1/models", "/v1/models"), ("/llmx/v1", "/llmx/v1"), ("/", "/")],
)
@pytest.mark.parametrize("prefix", ["/llm", "/llm/"])
def test_a_prefix_is_removed(prefix: str, path: str, found: str) -> None:
    assert Proxies((), prefix).path(path) == found
    assert Proxies((), None).path(path) == path


def test_requests_through_a_proxy_are_logged_with_the_client_and_served_below_the_prefix(serve, caplog):
    server = serve(proxy_networks=("127.0.0.1",), root_path="/llm")
    with caplog.at_level(logging.INFO, logger="server.access"):
        response = server.http().get("/llm/v1/models", headers={"x-forwarded-for": "198.51.100.1"})
    ((_, text, fields),) = lines(caplog)
    assert response.status_code == 200 and "GET /v1/models 200" in text and fields["client"] == "198.51.100.1"
    assert server.http().get("/llm/console/main.js").status_code == server.http().get("/console/main.js").status_code == 200
    assert server.http().get("/llm/").text == server.http().get("/").text


def test_the_line_that_a_proxy_adds_counts_and_not_the_line_of_the_client(serve, caplog):
    """HAProxy's `option forwardfor` adds a line of its own behind those that the client has sent."""
    server = serve(proxy_networks=("127.0.0.1",))
    with caplog.at_level(logging.INFO, logger="server.access"):
        server.http().get("/v1/models", headers=[("x-forwarded-for", "1.2.3.4"), ("x-forwarded-for", "198.51.100.1")])
    ((_, _, fields),) = lines(caplog)
    assert fields["client"] == "198.51.100.1"


def test_a_prefix_opens_no_path(serve):
    """The prefix is removed before a request is checked."""
    server = serve(api_keys=("k" * 8,), admin_keys=("a" * 8,), root_path="/llm")
    client = server.http(headers={"authorization": f"Bearer {'k' * 8}"})
    assert [client.get(f"{prefix}/admin/models").status_code for prefix in ("", "/llm")] == [403, 403]
    assert [server.http().get(f"{prefix}/v1/models").status_code for prefix in ("", "/llm")] == [401, 401]


def test_a_client_of_this_machine_is_no_proxy(serve, caplog):
    """Only `proxy_networks` say which addresses are believed."""
    with caplog.at_level(logging.INFO, logger="server.access"):
        serve().http().get("/v1/models", headers={"x-forwarded-for": "198.51.100.1"})
    ((_, _, fields),) = lines(caplog)
    assert fields["client"] == "127.0.0.1"


@pytest.mark.parametrize(("proxies", "scheme"), [((), "http"), (("127.0.0.1",), "https")])
@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_addresses_in_answers_lead_through_the_proxy(serve, tmp_path, proxies, scheme, prefix):
    server = serve(proxy_networks=proxies, root_path="/llm", batch_dir=tmp_path / "batches")
    http = server.http(headers={"x-forwarded-proto": "https"})
    (tmp_path / "models" / "one").mkdir()
    loading = http.post(f"{prefix}/admin/models", json={"source": "one"})
    assert loading.headers["location"] == f"{prefix}/admin/operations/{loading.json()['id']}"
    params = {"model": "null", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    batch = http.post(f"{prefix}/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]}).json()
    end_s = time.monotonic() + 60
    while (batch := http.get(f"{prefix}/v1/messages/batches/{batch['id']}").json())["processing_status"] != "ended":
        assert time.monotonic() < end_s, batch
        time.sleep(0.02)
    assert batch["results_url"] == f"{scheme}://127.0.0.1:{server.port}{prefix}/v1/messages/batches/{batch['id']}/results"
    assert http.get(batch["results_url"].removeprefix(f"{scheme}://127.0.0.1:{server.port}")).json()["result"]["type"] == "succeeded"
