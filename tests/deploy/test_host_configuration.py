"""The configurations for nginx and systemd in `deploy` agree with the server's settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.settings import PREFIX, SETTINGS, num_bytes
from runtime.flags import SWITCHES
from server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = (DEPLOY / "nginx" / "nginx.conf").read_text()
UNIT = (DEPLOY / "systemd" / "relaxserve.service").read_text()


def directive(name: str) -> list[str]:
    return re.findall(rf"^\s*{name} ([^;]+);", NGINX, re.MULTILINE)


def test_nginx_passes_streams_on_as_they_come() -> None:
    locations = len(directive("proxy_pass"))
    assert set(directive("proxy_buffering")) == {"off"} and len(directive("proxy_buffering")) == locations
    assert directive("proxy_http_version") == ["1.1"] * locations
    assert NGINX.count("{") == NGINX.count("}")


def test_nginx_waits_as_long_as_the_server_and_takes_what_it_takes() -> None:
    settings = ServerSettings()
    (read_s,) = (float(value.removesuffix("s")) for value in directive("proxy_read_timeout"))
    assert read_s >= settings.max_timeout_s > settings.heartbeat_s
    (size,) = directive("client_max_body_size")
    assert num_bytes(size) == settings.max_body_bytes


def test_nginx_takes_the_file(tmp_path: Path) -> None:
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed")
    plain = re.sub(r"listen 443 ssl;|^\s*ssl_\w+ .*;$", "", NGINX, flags=re.MULTILINE)  # remove TLS, because the test has no certificate
    whole = f"pid {tmp_path}/pid; error_log {tmp_path}/log; events {{}} http {{ access_log off; {plain} }}"
    (tmp_path / "nginx.conf").write_text(whole)
    subprocess.run([nginx, "-t", "-q", "-c", tmp_path / "nginx.conf"], check=True)


def test_the_unit_names_settings_that_exist() -> None:
    known = {PREFIX + setting.name.upper() for setting in SETTINGS} | {switch.variable for switch in SWITCHES}
    named = set(re.findall(r"(RELAXSERVE_\w+)=", UNIT))
    assert named and named <= known


def test_the_unit_waits_for_running_requests() -> None:
    (stop_s,) = map(int, re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE))
    assert stop_s >= ServerSettings().drain_s + 5
    assert "KillMode=mixed" in UNIT, "systemd must signal only the front: a signal would end a worker's requests"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    command = Path(sys.executable).with_name("relaxserve")
    unit = tmp_path / "relaxserve.service"
    unit.write_text(UNIT.replace("/opt/relaxserve/bin/relaxserve", str(command)))
    verified = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
    assert [line for line in verified.stderr.splitlines() if "relaxserve.service" in line] == []
