"""The console and the API page stand alone: a browser may load nothing else for them."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess

import pytest


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_needs_nothing_from_elsewhere(server, path):
    response = server.http().get(path)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    for address in re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)""", response.text):
        assert address.startswith(("/", "data:")) and not address.startswith("//"), address
    assert not re.search(r"@import|url\(|https?://", response.text)
    (script,) = re.findall(r"<script>(.*?)</script>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in response.headers["content-security-policy"]
    assert not re.search(r"<\w+[^>]*\son\w+=", response.text)  # handlers in attributes would not run
    assert "prefers-color-scheme: dark" in response.text and "innerHTML" not in script


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read JavaScript")
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_script_is_javascript(server, path, tmp_path):
    (script,) = re.findall(r"<script>(.*?)</script>", server.http().get(path).text, re.DOTALL)
    file = tmp_path / "page.js"
    file.write_text(script)
    subprocess.run(["node", "--check", file], check=True)


def test_every_address_the_scripts_ask_exists(server):
    client = server.http()
    paths = client.get("/openapi.json").json()["paths"]
    for page in ("/", "/docs"):
        for address in re.findall(r"""fetch\(["']([^"']+)""", client.get(page).text):
            assert address in paths or address == "/openapi.json"


def test_elements_the_console_speaks_of_exist(server):
    for page in ("/", "/docs"):
        text = server.http().get(page).text
        ids = set(re.findall(r'id="(\w+)"', text))
        assert set(re.findall(r'\$\("(\w+)"\)', text)) <= ids


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_fits_a_phone_and_browsers_do_not_complain(server, path):
    text = server.http().get(path).text
    assert re.search(r"@media \(max-width: \d+px\)", text)
    outside = re.sub(r"<form.*?</form>", "", text, flags=re.DOTALL)
    assert 'type="password"' in text and 'type="password"' not in outside  # browsers want a form around it
    for form in re.findall(r'<form[^>]*id="(\w+)"', text):
        assert f'$("{form}").addEventListener("submit"' in text, "Enter would leave the page"
