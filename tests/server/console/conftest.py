"""A server whose models give all kinds of answers that the console must display: Markdown, tool calls, long answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from runtime.fits import Stretched
from server.messages import Listening, Submit, Vision
from server.models.model import Footprint, FormEstimate
from server.models.state import ModelSpec
from tests.doubles.worker import NullScript
from tests.lab.chromium import Chromium, Page

MARKDOWN = """## Rivers

A *short* list with **bold** text, `code` and [a link](https://example.com/a_(b)):

1. Amazon
   - in Brazil
   - in Peru
2. Nile

| River | Length (km) |
|:------|------------:|
| Nile | 6650 |
| Amazon | 6400 |

```python
def length(name: str) -> int:  # in kilometres
    return {"Nile": 6650}[name]
```

> Rivers flow <b>downhill</b>.

- [x] measured
- [ ] drawn
"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
MIB = 1 << 20
# Make the next chooser of files choose a file with this name, type and text.
CHOOSE = """(name, type, text) => {
  HTMLInputElement.prototype.click = function () {
    const chosen = new DataTransfer();
    chosen.items.add(new File([text], name, {type}));
    this.files = chosen.files;
    this.dispatchEvent(new Event("change"));
  };
}"""


def said(text: str) -> Callable[[Submit, int], list[list[int]]]:
    return lambda _submit, _choice: [[byte] for byte in text.encode()]


def _weather(submit: Submit, _choice: int) -> list[list[int]]:
    """Answer with a tool call. If the prompt already contains the result of the call, answer with text."""
    is_answered = b"<|tool|>" in bytes(token for token in submit.prompt_ids if token < 256)
    return said("It is cold in Oslo." if is_answered else CALL)(submit, 0)


def _seed(submit: Submit, _choice: int) -> list[list[int]]:
    return said(f"My seed is {submit.params.seed}.")(submit, 0)


SCRIPTS = {
    "writer": NullScript(answer=said(MARKDOWN)),
    "caller": NullScript(answer=_weather),
    "seeded": NullScript(answer=_seed, weights_bytes=3 * MIB),
    "slow": NullScript(answer=said("word " * 500), interval_s=0.01),
    "small": NullScript(answer=said("I have a small context."), max_context=400),
    "other": NullScript(load_s=0.5),
    "listener": NullScript(
        answer=said("I hear a tone."),
        listening=Listening(256, num_mels=80, num_hops=3000, frames_each=4, ends=True, most_windows=1),
    ),
    "looker": NullScript(
        answer=said("It is a river."),
        vision=Vision(crop_size=8, edge_tokens=2, image_token=256, fit=Stretched(), filter=2),
    ),
}


@pytest.fixture
def site(serve: Callable[..., Any], tmp_path: Any) -> Callable[..., Any]:
    """Return a function that starts a server with the named models. Its model root also contains the folder `other`, which tests can load
    as another model."""

    def start(*models: str, **options: Any) -> Any:
        (tmp_path / "models" / "other").mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / "other" / "config.json").write_text("{}")
        footprints = {name: Footprint(2 * MIB, 1 << 16, 4 * MIB, 4096) for name in SCRIPTS}
        scripts = {name: replace(script) for name, script in SCRIPTS.items()}
        return serve(
            initial=[ModelSpec(name, name) for name in models],
            scripts=scripts,
            footprints=footprints,
            forms={"other": [FormEstimate("auto", 3 * MIB, 0.0), FormEstimate("4bit", MIB, 0.083)]},
            memory_limit_bytes=64 * MIB,
            **options,
        )

    return start


@pytest.fixture
def page(serve: object, page: Page) -> Page:
    """Return a browser page that is closed before the servers stop, because an open page would report failed requests as faults."""
    assert serve
    return page


@pytest.fixture
def other_page(chromium: Chromium) -> Iterator[Page]:
    """Yield a second browser page. It has its own storage, so it shares no saved conversations with the page of the fixture `page`."""
    page = chromium.new_page()
    yield page
    chromium.close_page(page)


@pytest.fixture
def tab(page: Page, chromium: Chromium) -> Iterator[Page]:
    """Yield a second tab beside the page of the fixture `page`, with the same storage."""
    tab = chromium.new_page(beside=page)
    page.to_front()
    yield tab
    tab.expect_no_faults()
    chromium.close_tab(tab)
    page.to_front()


def send(page: Page, text: str) -> None:
    """Send a message in the chat and wait until the answer is complete."""
    before = page.js("document.querySelectorAll('article.assistant').length")
    ask(page, text)
    page.wait(f"document.querySelectorAll('article.assistant').length > {before}")
    idle(page)


def ask(page: Page, text: str, view: str = "#chat") -> None:
    """Send a message as soon as the page knows that its model is ready."""
    page.fill(f"{view} .composer textarea", text)
    press_send(page, view)


def press_send(page: Page, view: str = "#chat") -> None:
    page.wait(f"!document.querySelector('{view} .send').disabled")
    page.press("Enter")


def idle(page: Page) -> None:
    page.wait("document.querySelector('#chat .send').title === 'Send'")
    page.wait("document.querySelector('#chat .messages').ariaBusy === 'false'")
