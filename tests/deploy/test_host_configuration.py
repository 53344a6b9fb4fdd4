"""The configurations for nginx and systemd in `deploy` agree with the server's settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote

import httpx
import jsonschema_rs
import pytest
import yaml

from deploy.nginx.__main__ import with_admin_paths
from deploy.settings import PREFIX, SETTINGS, num_bytes
from runtime.flags import SWITCHES
from server.api.answer.socket import SILENT_S
from server.http.auth import Access, access_of
from server.http.multipart import MAX_FORM_BYTES
from server.http.websocket import PATHS
from server.settings import ServerSettings
from tests.debian import file, program

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = (DEPLOY / "nginx" / "nginx.conf").read_text()
COMPOSE = (DEPLOY / "compose.yaml").read_text()
UNIT = (DEPLOY / "systemd" / "relaxserve.service").read_text()


def test_no_index_is_asked_for_relaxserve_itself() -> None:
    """It is in none, and somebody else could take the name."""
    code = (path for folder in ("server", "compiler", "runtime", "deploy") for path in (DEPLOY.parent / folder).rglob("*.py"))
    named = {
        str(path): found
        for path in (*DEPLOY.rglob("*.service"), *DEPLOY.rglob("*.yaml"), *code)
        if (found := re.findall(r"(?:pip|pipx|tool) install '?relaxserve\b.*", path.read_text()))
    }
    assert named == {}


def directive(name: str) -> list[str]:
    return re.findall(rf"^\s*{name} ([^;]+);", NGINX, re.MULTILINE)


def test_nginx_passes_streams_on_as_they_come() -> None:
    locations = len(directive("proxy_pass"))
    assert set(directive("proxy_buffering")) == {"off"} and len(directive("proxy_buffering")) == locations
    assert directive("proxy_http_version") == ["1.1"] * locations
    assert NGINX.count("{") == NGINX.count("}")


def test_nginx_passes_on_what_a_websocket_asks_for() -> None:
    for path in PATHS:
        (location,) = re.findall(rf"location = {path.decode()} {{(.*?)\n    }}", NGINX, re.DOTALL)
        assert 'proxy_set_header Connection "upgrade";' in location and "proxy_set_header Upgrade $http_upgrade;" in location
        (read_s,) = re.findall(r"proxy_read_timeout (\d+)s;", location)
        assert int(read_s) > SILENT_S


def test_nginx_waits_as_long_as_the_server_and_takes_what_it_takes() -> None:
    settings = ServerSettings()
    (read_s,) = {float(value.removesuffix("s")) for value in directive("proxy_read_timeout")}
    assert read_s >= settings.max_timeout_s > settings.heartbeat_s
    (size,) = directive("client_max_body_size")
    assert num_bytes(size) >= max(settings.max_body_bytes, settings.max_audio_bytes, settings.max_file_bytes) + MAX_FORM_BYTES


def test_nginx_denies_the_paths_of_the_administration() -> None:
    """The file has the list of server/http/auth.py; `python -m deploy.nginx` writes it."""
    assert with_admin_paths(NGINX) == NGINX
    assert re.search(r'"\(\?s\)\^\(.*\)\$" \{\n\s+allow 127\.0\.0\.1;\n\s+deny all;', NGINX)


def whole(folder: Path, listen: str, upstream: str = "", text: str = NGINX) -> Path:
    """Write the file without TLS, because the test has no certificate, as the configuration of a whole server."""
    plain = re.sub(r"^\s*ssl_\w+ .*;$", "", text, flags=re.MULTILINE).replace("listen 443 ssl;", listen)
    plain = plain.replace("allow 127.0.0.1;", "").replace("server 127.0.0.1:8000;", f"server {upstream or f'unix:{folder}/none'};")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    path = folder / "nginx.conf"
    path.write_text(f"daemon off; pid {folder}/pid; error_log {folder}/log; events {{}} http {{ access_log off; {temporary} {plain} }}")
    return path


@pytest.fixture
def nginx() -> str:
    return program("nginx")


def test_nginx_takes_the_file(nginx: str, tmp_path: Path) -> None:
    subprocess.run([nginx, "-t", "-q", "-c", whole(tmp_path, "")], check=True)


def test_a_running_nginx_denies_what_the_server_counts_to_the_administration(nginx: str, tmp_path: Path) -> None:
    """There is no server behind this nginx, so it answers 502 for requests that it passes on."""
    names = ["", "/", "/x", "/x/load", "/load", "/unload", "/a/b/unload", "/index", "/a%0Ab/load", "ing"]
    roots = [
        "/admin",
        "/models",
        "/v1/models",
        "/v2/models",
        "/v2/repository",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/api/pull",
        "/api/delete",
    ]
    paths = [f"{root}{name}" for root in roots for name in names] + [
        "/api/delete",
        "//admin/models",
        "/v1/../sleep",
        "/%61dmin",
        "/v1/chat/completions",
    ]
    server = tmp_path / "socket"
    with subprocess.Popen([nginx, "-c", whole(tmp_path, f"listen unix:{server};")]) as process:
        try:
            while not server.exists() and process.poll() is None:
                time.sleep(0.01)
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(server)), base_url="http://x") as client:
                seen = {path: client.get(f"http://x{path}").status_code for path in paths}
        finally:
            process.terminate()
    plain = {path: normpath(unquote(path).replace("//", "/")) + "/" * (path.endswith("/")) for path in paths}
    expected = {path: 403 if access_of(plain[path], open_metrics=False) is Access.ADMIN else 502 for path in paths}
    assert seen == expected and list(seen.values()).count(403) > 30


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


# --- compose -----------------------------------------------------------------------------------------------------------


def test_the_file_of_compose_is_in_its_schema() -> None:
    """The schema is that of Compose's specification as of 2021, which Debian's package of docker-compose brings. It lacks two fields."""
    schema = json.loads(file("lib/python3/dist-packages/compose/config/compose_spec.json").read_text())
    written = yaml.safe_load(COMPOSE)
    assert written.pop("name") and written["services"]["relaxserve-cuda"]["build"].pop("additional_contexts")
    compose = jsonschema_rs.validator_for(schema)
    assert [problem.message for problem in compose.iter_errors(written)] == []
    assert not compose.is_valid({"services": {"a": {"image": "x", "mem_limt": "1g"}}})


def test_every_container_has_limits() -> None:
    """Each container has a limit of memory and a limit of processes."""
    for name, service in yaml.safe_load(COMPOSE)["services"].items():
        assert service["mem_limit"] and service["pids_limit"] > 0, name


def test_grafana_has_no_password_of_its_own() -> None:
    """Compose does not start without a password for Grafana."""
    environment = yaml.safe_load(COMPOSE)["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert "admin / admin" not in COMPOSE
