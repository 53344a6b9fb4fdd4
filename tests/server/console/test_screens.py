"""Every page of the console at desktop and phone widths, in the light and the dark theme: no page is wider than the screen, no
word is broken by letters, and axe finds no accessibility problem.

The screenshots are in the folder of the test run, which `pytest --basetemp=FOLDER` sets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.models.model import Footprint
from server.models.state import ModelSpec
from tests.doubles.library import Shelf
from tests.doubles.worker import NullScript
from tests.server.console.conftest import CHOOSE, TOOLS, ask, send

pytestmark = pytest.mark.xdist_group("console")
AXE = Path(__file__).parents[3] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {"desktop": (1280, 800), "phone": (375, 800)}
QUICK = [("light", "desktop"), ("dark", "phone")]  # (theme, size) pairs of the quick test: each theme and each size occurs once
ALL = [(theme, size) for theme in ("light", "dark") for size in SIZES]

# The visible words of letters that stand on more than one line. Paths and other long names may break anywhere.
BROKEN = r"""(() => {
  const found = [], texts = document.createTreeWalker(document.querySelector("dialog[open]") ?? document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode());) {
    const parent = node.parentElement;
    if (!parent.checkVisibility({visibilityProperty: true}) || parent.closest("pre, .unseen, script, style, option")) continue;
    for (const {0: word, index} of node.data.matchAll(/(?<=^|[\s(])\p{L}{2,24}(?=$|[\s.,:;!?)])/gu)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const lines = new Set([...range.getClientRects()].filter(box => box.width).map(box => Math.round(box.top)));
      if (lines.size > 1) found.push(`${word} in <${parent.localName}> ${node.data.slice(0, 60)}`);
    }
  }
  return found;
})()"""


# The paths of the list of endpoints that stand on several lines although their row has more room beside the method.
CROWDED = """[...document.querySelectorAll("summary > code")].filter(code => {
  const row = code.parentElement.getBoundingClientRect(), box = code.getBoundingClientRect();
  return box.height > 1.5 * parseFloat(getComputedStyle(code).lineHeight) && row.right - box.right > 40;
}).map(code => code.textContent)"""


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
            assert page.js(BROKEN) == [], f"{name} on a {size} breaks words"
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
    page.js(f"({CHOOSE})('notes.md', '', 'a note')")
    page.click("#chat [data-action=attach]")
    page.see("notes.md", ".attached")
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


def test_chat_with_a_recording(page, site, look):
    page.open(f"{site('listener').url}/")
    page.see("listener", ".empty h2")
    page.click("#chat [data-action=record]", "Record")
    page.wait("document.querySelector('.recording').checkVisibility()")
    page.js("new Promise(done => setTimeout(done, 300))")
    look("chat-recording")
    page.click("#chat [data-action=record]", "Stop and attach")
    page.wait("document.querySelectorAll('.attached audio').length === 1")
    send(page, "What do you hear?")
    look("chat-recorded")


def test_the_dialogs_of_the_chat(page, site, look):
    page.open(f"{site('writer').url}/")
    prompts = [
        {"name": "French", "text": "Translate into French:"},
        {"name": "A name that is rather long for a prompt", "text": "Explain the text to somebody who has never heard of it. " * 6},
    ]
    page.js(f"localStorage.setItem('relaxserve.prompts', {json.dumps(json.dumps(prompts))})")
    send(page, "Tell me about rivers")
    for button, seen in (("#prompts", "Translate into French"), ("#share", "Copy a link")):
        page.click(button)
        page.see(seen, "dialog")
        look(button.strip("#"))
        page.press("Escape")
        page.resize(*SIZES["desktop"])
    page.press("Control+/")
    page.see("Show this list", "dialog")
    look("keys")


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
    page.see("Its code is not in the cache.")
    page.click("#models .load button", "What would it take?")
    page.see("other fits.")
    page.click("#models .load summary", "More settings")
    look("models-plan")


def test_memory_with_long_figures(page, serve, look):
    large = NullScript(weights_bytes=120 << 30, kv_cache_bytes=4 << 30)
    footprints = {"writer": Footprint(120 << 30, 0, 4 << 30, 4096)}
    server = serve(initial=[ModelSpec("writer", "writer")], scripts={"writer": large}, footprints=footprints)
    page.open(f"{server.url}/#/models")
    page.see("now, at most 124.00 GiB", "#models [aria-label=Memory]")
    look("models-memory")


def test_models_and_downloads(page, site, look):
    """The page shows loads, downloads and models with long names, and cards that begin above the lower edge of the screen."""
    shelf = Shelf()
    server = site("writer", "seeded", library=shelf, allow_hub=True)
    server.scripts["other"].load_s = shelf.pause_s = 600.0
    for path, body in (
        ("models", {"source": "other"}),
        ("downloads", {"source": "organisation/a-model-with-a-rather-long-name-GGUF:q4_k_m"}),
    ):
        assert server.http().post(f"/admin/{path}", json=body).status_code == 202
    page.open(f"{server.url}/#/models")
    page.see("Waiting for the size", "#models article")
    page.click("#models .card > summary", "Download a model")
    look("downloads")
    page.js("document.querySelector('#models article[aria-label=writer]').scrollIntoView()")
    look("models-cards")


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
    page.resize(*SIZES["phone"])
    assert page.js(CROWDED) == [], "a path gets the whole row before it breaks"


def test_the_api_page_describes_each_endpoint(page, site):
    """Streams of events, with and without [DONE] at their end, and of lines."""
    page.open(f"{site('writer').url}/docs")
    page.see("/v1/chat/completions")
    page.js("for (const box of document.querySelectorAll('#paths details')) box.open = true")
    page.wait("[...document.querySelectorAll('#paths details')].every(box => box.querySelector('table'))")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
        box = f"[...document.querySelectorAll('#paths details')].find(box => box.querySelector('code').textContent === '{path}')"
        titles = page.js(f"[...{box}.querySelectorAll('h3')].map(title => title.textContent)")
        assert "Each part of a stream" in titles, (path, titles)


def test_what_goes_wrong(page, site, look):
    """The chat page says that no model is loaded, or that the user has to enter a key."""
    page.excuse("status of 401")
    page.open(f"{site().url}/")
    page.see("No model is loaded")
    look("chat-no-model")
    page.open(f"{site('writer', api_keys=['a-key-of-a-client']).url}/")
    page.see("A key is needed")
    look("chat-no-key")
