"""Every page of the console at desktop and phone widths, in the light and the dark theme: no page is wider than the screen, and axe finds
no accessibility problem.

The screenshots are in the folder of the test run, which `pytest --basetemp=FOLDER` sets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.console.conftest import TOOLS, ask, send

pytestmark = pytest.mark.xdist_group("console")
AXE = Path(__file__).parents[3] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {"desktop": (1280, 800), "phone": (375, 720)}
QUICK = [("light", "desktop"), ("dark", "phone")]  # (theme, size) pairs of the quick test: each theme and each size occurs once
ALL = [(theme, size) for theme in ("light", "dark") for size in SIZES]


@pytest.fixture(params=[pytest.param(QUICK, id="quick"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
def look(request, page, folder, axe):
    """Return a function that takes screenshots of the page in several themes and sizes, and checks the page with axe."""

    def call(name: str) -> None:
        for theme, size in request.param:
            width, height = SIZES[size]
            page.prefer(dark=theme == "dark")
            page.resize(width, height)
            page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            page.screenshot(folder / f"{name}-{size}-{theme}.png")
            assert page.js(f"document.documentElement.scrollWidth <= {width}"), f"{name} is wider than a {size}"
            found = judged(page, axe)
            assert found == [], f"{name} on a {size}, {theme}: {json.dumps(found, indent=1)}"

    return call


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        pytest.skip(f"needs axe-core: {AXE} is missing; `make .venv/browser` installs it")
    return AXE.read_text()


def judged(page, axe: str) -> list[dict]:
    if page.js("typeof axe") == "undefined":
        page.js(axe)
    return page.js("""axe.run(document, {resultTypes: ["violations"]}).then(({violations}) =>
        violations.map(({id, nodes}) => ({id, where: nodes.map(node => [node.html.slice(0, 200), node.failureSummary])})))""")


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.getbasetemp() / "screens"


def test_chat(page, site, look):
    page.open(f"{site('writer', 'caller').url}/")
    page.see("writer", ".empty h2")
    look("chat-empty")
    send(page, "Tell me about rivers")
    look("chat")
    page.resize(1280, 800)
    page.click("#chat [data-action=options]")
    page.fill("#options [name=tools]", TOOLS)
    look("chat-options")
    page.resize(1280, 800)
    page.click("#options button", "Close options")
    page.choose("#model", "caller")
    send(page, "What is the weather in Oslo?")
    page.see("The model waits for a tool.")
    look("chat-tool")


def test_compare(page, site, look):
    page.open(f"{site('writer', 'seeded').url}/#/compare")
    ask(page, "Tell me about rivers", "#compare")
    page.see("My seed is")
    page.see("drawn")
    look("compare")


def test_models(page, site, look):
    page.open(f"{site('writer', 'seeded').url}/#/models")
    page.see("writer", "#models .card h2")
    look("models")
    page.fill("#models .load input", "other")
    page.click("#models button", "What would it take?")
    page.see("other fits.")
    look("models-plan")


def test_live(page, site, look):
    server = site("writer", "slow")
    page.open(f"{server.url}/#/live")
    page.see("Tokens per second")
    for _ in range(4):
        server.chat(model="writer")
    page.wait("document.querySelector('.chart .line').getAttribute('d').length > 20")
    look("live")


def test_the_menu_and_the_dialogs(page, site, look):
    """On a phone the menu covers the page. Dialogs cover the page at every width."""
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.resize(*SIZES["phone"])
    page.click("#chat button", "Menu")
    page.see("Compare", "#sidebar")
    look("menu")
    page.resize(*SIZES["phone"])
    page.click("#sidebar a", "Models")
    page.see("writer", "#models article h2")
    page.wait("!document.body.classList.contains('is-menu')")
    page.click("#models button", "Load log")
    page.see("compile", "dialog .stages")
    look("load-log")
    page.press("Escape")
    page.resize(*SIZES["desktop"])
    page.click("#open-key")
    look("key")


def test_the_api_page(page, site, look):
    page.open(f"{site('writer').url}/docs")
    page.see("/v1/chat/completions")
    look("docs")


def test_what_goes_wrong(page, site, look):
    """The chat page says that no model is loaded, or that the user has to enter a key."""
    page.excuse("status of 401")
    page.open(f"{site().url}/")
    page.see("No model is loaded")
    look("chat-no-model")
    page.open(f"{site('writer', api_keys=['a-key-of-a-client']).url}/")
    page.see("A key is needed")
    look("chat-no-key")
