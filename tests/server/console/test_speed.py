"""The time until the console appears, and the longest browser task while a long conversation scrolls.

Other work on the machine can only make a measurement worse, so each test uses the best of several measurements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.server.console.conftest import MARKDOWN

pytestmark = pytest.mark.xdist_group("console")
TRIES = 8
FIRST_PAINT_MS = 300
# On a machine that is too busy for FIRST_PAINT_MS, a page may take this many times as long as a page with one line of text.
TIMES_A_LINE = 6
LONGEST_TASK_MS = 50
WORDS = "The river carries what the mountain gives away, and nobody has ever asked it why. "


def least(measure: Callable[[], float], enough: float) -> float:
    """Measure several times and return the smallest value. Stop as soon as a value is at most `enough`."""
    found: list[float] = []
    for _ in range(TRIES):
        found.append(measure())
        if found[-1] <= enough:
            break
    print(f"{min(found):.0f} ms, after {len(found)} tries")  # `pytest -rP` shows this output
    return min(found)


@pytest.mark.parametrize("path", ["/", "/#/models", "/#/live", "/docs"])
def test_a_page_is_painted_at_once(page, site, path):
    server = site("writer")

    def first_paint() -> float:
        page.reload()
        return page.wait("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")

    page.open(f"{server.url}{path}")
    found = least(first_paint, FIRST_PAINT_MS)
    if found > FIRST_PAINT_MS:
        page.open(f"{server.url}/health/live")
        page.excuse("favicon.ico")  # a page with one line of text names no icon
        assert found <= TIMES_A_LINE * least(first_paint, 0)


def conversation(num_answers: int) -> str:
    """Return a conversation of about 10,000 tokens: 40,000 characters of prose and Markdown."""
    answers = [f"{MARKDOWN}\n{WORDS * 4}\n\n{WORDS * 14}" for _ in range(num_answers)]
    nodes, parent = {}, None
    for number, text in enumerate(answer for content in answers for answer in ("What about rivers?", content)):
        role = "assistant" if number % 2 else "user"
        fields = {"role": role, "content": text, "reasoning": "", "calls": [], "model": "writer", "finish": "stop"}
        nodes[f"n{number}"] = {"id": f"n{number}", "parent": parent, "created": number, **fields}
        parent = f"n{number}"
    assert sum(len(node["content"]) for node in nodes.values()) > 40_000
    return json.dumps({"id": "long", "title": "Long", "created": 0, "updated": 0, "options": {}, "leaf": parent, "nodes": nodes})


@pytest.fixture
def long(page, site) -> Iterator[object]:
    """Return a browser page that shows a long saved conversation."""
    page.open(f"{site('writer').url}/")
    page.js(f"""import("/console/core/store.js").then(async ({{Store}}) => {{
        const store = new Store(); await store.open(); await store.put({conversation(24)}); }})""")
    page.reload()
    page.js("location.hash = '#/chat/long'")
    page.wait("document.querySelectorAll('article').length === 48")
    return page


LONG_TASKS = """window.tasks = []; window.watch?.disconnect();
window.watch = new PerformanceObserver(list => tasks.push(...list.getEntries().map(entry => entry.duration)));
watch.observe({type: "longtask"});"""
# the browser reports a long task only after it ends
LONGEST_TASK = "new Promise(done => setTimeout(() => done(Math.max(0, ...tasks)), 100))"


def test_long_tasks_are_noticed(long):
    long.js(LONG_TASKS)
    long.js("new Promise(done => setTimeout(() => { const end = performance.now() + 80; while (performance.now() < end); done(); }))")
    assert long.js(LONGEST_TASK) >= 80


def test_a_long_conversation_scrolls_without_long_tasks(long):
    """Scrolling with the wheel from the end to the start and back causes no browser task longer than 50 ms."""

    def longest_task() -> float:
        long.js(LONG_TASKS)
        for delta in (-600, 600):
            edge = "pane.scrollTop < 1" if delta < 0 else "pane.scrollHeight - pane.scrollTop - pane.clientHeight < 2"
            for _ in range(200):
                long.call("Input.dispatchMouseEvent", type="mouseWheel", x=700, y=400, deltaX=0, deltaY=delta)
                long.js("new Promise(done => requestAnimationFrame(done)).then(() => 0)")
                if long.js(f"(pane => {edge})(document.querySelector('#chat .scroll'))"):
                    break
            else:
                raise AssertionError("the wheel does not scroll to the end")
        return long.js(LONGEST_TASK)

    assert least(longest_task, LONGEST_TASK_MS) <= LONGEST_TASK_MS


def test_a_long_conversation_opens_at_its_end_without_long_tasks(long):
    """Opening a long conversation causes no long browser task, because the page builds the conversation in slices and lays out only its
    visible part."""

    def longest_task() -> float:
        long.js("location.hash = '#/chat'")
        long.see("writer", ".empty h2")
        long.js(LONG_TASKS)
        long.js("location.hash = '#/chat/long'")
        long.wait("document.querySelectorAll('article').length === 48")
        return long.js(LONGEST_TASK)

    assert least(longest_task, LONGEST_TASK_MS) <= LONGEST_TASK_MS

    def opens_at_its_end() -> bool:
        longest_task()
        return long.js("document.querySelector('article:last-of-type').getBoundingClientRect().bottom <= innerHeight")

    # Try this ten times, because the number of slices in which the console builds the conversation varies.
    assert all(opens_at_its_end() for _ in range(10))
