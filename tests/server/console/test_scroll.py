"""The scroll position of the message pane: the pane stays at its end unless the reader has scrolled away."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.xdist_group("console")
FEW, LINES = 6, 150  # 6 messages are built in one slice; 150 lines make each far higher than the style's estimate of its height
GAP = "(pane => pane.scrollHeight - pane.scrollTop - pane.clientHeight)(document.querySelector('#chat .scroll'))"
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(() => done(0)))))"


@pytest.fixture
def few(page, site):
    """Return a browser page that shows a saved conversation of a few long messages."""
    nodes = {}
    for number in range(FEW):
        content = "\n\n".join(f"line {line}" for line in range(LINES))
        fields = {"content": content, "reasoning": "", "calls": [], "model": "writer", "finish": "stop"}
        node = {"id": f"n{number}", "parent": f"n{number - 1}" if number else None, "created": number}
        nodes[node["id"]] = node | {"role": "assistant" if number % 2 else "user"} | fields
    saved = {"id": "few", "title": "Few", "created": 0, "updated": 0, "options": {}, "leaf": f"n{FEW - 1}", "nodes": nodes}
    page.open(f"{site('writer').url}/")
    page.js(f"""import("/console/core/store.js").then(async ({{Store}}) => {{
        const store = new Store(); await store.open(); await store.put({json.dumps(saved)}); }})""")
    page.reload()
    page.js("location.hash = '#/chat/few'")
    page.wait(f"document.querySelectorAll('article').length === {FEW}")
    page.js(FRAMES)
    return page


def grow(page, article: str) -> None:
    """Make one message higher, as a streamed answer does."""
    page.js(f"document.querySelector('{article}').append(Object.assign(document.createElement('div'), {{style: 'height: 900px'}}))")
    page.js(FRAMES)


def test_a_conversation_opens_at_its_end(few):
    """The browser lays out a message only when it becomes visible, and the message then becomes higher. Nevertheless the pane stays at its
    end."""
    assert few.js(GAP) < 2


def test_the_pane_stays_at_its_end_while_messages_grow(few):
    for article in ("article:last-of-type", "article:first-of-type", "article:last-of-type"):
        grow(few, article)
        assert few.js(GAP) < 2


def test_a_reader_who_scrolled_away_stays_there(few):
    few.call("Input.dispatchMouseEvent", type="mouseWheel", x=700, y=400, deltaX=0, deltaY=-400)
    few.wait(f"{GAP} > 300")
    few.js(FRAMES)
    before = few.js("document.querySelector('#chat .scroll').scrollTop")
    grow(few, "article:last-of-type")
    assert few.js("document.querySelector('#chat .scroll').scrollTop") == before
    few.call("Input.dispatchMouseEvent", type="mouseWheel", x=700, y=400, deltaX=0, deltaY=2000)  # scroll back to the end
    few.wait(f"{GAP} < 2")
    few.js(FRAMES)
    grow(few, "article:last-of-type")
    assert few.js(GAP) < 2
