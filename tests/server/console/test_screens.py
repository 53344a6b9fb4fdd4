"""Every page at the widths of a desktop and a phone, light and dark: nothing overflows, and axe finds nothing.

The pictures are kept in the folder of the test run: `pytest --basetemp=FOLDER` says where.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.console.conftest import TOOLS, send

pytestmark = pytest.mark.xdist_group("console")
AXE = Path(__file__).parents[3] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {"desktop": (1280, 800), "phone": (375, 720)}


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        pytest.skip(f"needs axe-core: {AXE} is missing; `make .venv/browser` installs it")
    return AXE.read_text()


def look(page, name: str, folder: Path, axe: str) -> None:
    """Take pictures of what is shown, and let axe judge it."""
    for theme in ("light", "dark"):
        page.prefer(dark=theme == "dark")
        for size, (width, height) in SIZES.items():
            page.resize(width, height)
            page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            page.screenshot(folder / f"{name}-{size}-{theme}.png")
            assert page.js(f"document.documentElement.scrollWidth <= {width}"), f"{name} is wider than a {size}"
            found = judged(page, axe)
            assert found == [], f"{name} on a {size}, {theme}: {json.dumps(found, indent=1)}"


def judged(page, axe: str) -> list[dict]:
    if page.js("typeof axe") == "undefined":
        page.js(axe)
    return page.js("""axe.run(document, {resultTypes: ["violations"]}).then(({violations}) =>
        violations.map(({id, nodes}) => ({id, where: nodes.map(node => [node.html.slice(0, 200), node.failureSummary])})))""")


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / "screens"


def test_chat(page, site, folder, axe):
    page.open(f"{site('writer', 'caller').url}/")
    page.see("writer", ".empty h2")
    look(page, "chat-empty", folder, axe)
    send(page, "Tell me about rivers")
    look(page, "chat", folder, axe)
    page.resize(1280, 800)
    page.click("#chat [data-action=options]")
    page.fill("#options [name=tools]", TOOLS)
    look(page, "chat-options", folder, axe)
    page.resize(1280, 800)
    page.click("#options button", "Close options")
    page.choose("#model", "caller")
    send(page, "What is the weather in Oslo?")
    page.see("The model waits for a tool.")
    look(page, "chat-tool", folder, axe)


def test_compare(page, site, folder, axe):
    page.open(f"{site('writer', 'seeded').url}/#/compare")
    page.fill("#compare textarea", "Tell me about rivers")
    page.press("Enter")
    page.see("My seed is")
    page.see("drawn")
    look(page, "compare", folder, axe)


def test_models(page, site, folder, axe):
    page.open(f"{site('writer', 'seeded').url}/#/models")
    page.see("writer", "#models .card h2")
    look(page, "models", folder, axe)
    page.fill("#models .load input", "other")
    page.click("#models button", "What would it take?")
    page.see("other fits.")
    look(page, "models-plan", folder, axe)


def test_live(page, site, folder, axe):
    server = site("writer", "slow")
    page.open(f"{server.url}/#/live")
    page.see("Tokens per second")
    for _ in range(4):
        server.chat(model="writer")
    page.wait("document.querySelector('.chart .line').getAttribute('d').length > 20")
    look(page, "live", folder, axe)


def test_the_menu_and_the_dialogs(page, site, folder, axe):
    """On a phone the menu lies above the page; dialogs do so everywhere."""
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.resize(*SIZES["phone"])
    page.click("#chat button", "Menu")
    page.see("Compare", "#sidebar")
    look(page, "menu", folder, axe)
    page.resize(*SIZES["phone"])
    page.click("#sidebar a", "Models")
    page.see("writer", "#models article h2")
    page.wait("!document.body.classList.contains('is-menu')")
    page.click("#models button", "Load log")
    page.see("compile", "dialog .stages")
    look(page, "load-log", folder, axe)
    page.press("Escape")
    page.resize(*SIZES["desktop"])
    page.click("#open-key")
    look(page, "key", folder, axe)


def test_the_api_page(page, site, folder, axe):
    page.open(f"{site('writer').url}/docs")
    page.see("/v1/chat/completions")
    look(page, "docs", folder, axe)


def test_what_goes_wrong(page, site, folder, axe):
    """Without a model, without a key."""
    page.excuse("status of 401")
    page.open(f"{site().url}/")
    page.see("No model is loaded")
    look(page, "chat-no-model", folder, axe)
    page.open(f"{site('writer', api_keys=['a-key-of-a-client']).url}/")
    page.see("A key is needed")
    look(page, "chat-no-key", folder, axe)
