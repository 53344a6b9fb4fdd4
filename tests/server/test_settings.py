from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from server.settings import ServerSettings, SettingsError


def test_the_page_lists_every_setting_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", page, re.MULTILINE))
    assert all(field.default is not MISSING for field in fields(ServerSettings))
    assert listed == {field.name: str(field.default) for field in fields(ServerSettings)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"heartbeat_s": 0}, "heartbeat_s is 0"),
        ({"max_inputs": 0}, "max_inputs is 0; expected more than 0"),
        ({"max_queued_requests": -1}, "max_queued_requests is -1; expected 0 or more"),
        ({"drain_s": math.nan}, "drain_s is nan"),
        ({"keep_alive_s": math.inf}, "keep_alive_s is inf"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes is 0"),
        ({"host": "0.0.0.0"}, "no API key"),
        ({"host": "example.org"}, "no API key"),
        ({"allowed_hosts": ("http://my.box",)}, "allowed_hosts has 'http://my.box'; expected a name"),
        ({"allowed_hosts": ("my.box", "my.box:8000")}, "allowed_hosts has 'my.box:8000'"),
        ({"allowed_hosts": ("fd00::1",)}, "an IPv6 address in brackets"),
        ({"allowed_hosts": ("*",)}, "allowed_hosts has"),
        ({"cors_origins": ("my.box",)}, "cors_origins has 'my.box'; expected an origin as browsers send it"),
        ({"cors_origins": ("https://my.box/",)}, "cors_origins has 'https://my.box/'"),
        ({"cors_origins": ("https://My.Box",)}, "cors_origins has 'https://My.Box'"),
    ],
)
def test_values_that_cannot_work(values, message):
    with pytest.raises(SettingsError, match=message):
        ServerSettings(**values)


def test_hosts_and_origins_that_can_be_met():
    ServerSettings(
        allowed_hosts=("my.box", "My-Box_2", "10.0.0.5", "[fd00::1]"),
        cors_origins=("*", "null", "https://my.box", "http://10.0.0.5:3000", "http://[::1]:3000", "tauri://localhost"),
    )


def test_nothing_may_wait_and_nothing_may_be_waited_for():
    ServerSettings(max_queued_requests=0, max_queued_tokens=0, max_stop_strings=0, drain_s=0)
