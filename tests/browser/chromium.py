"""Headless Chromium, driven by its DevTools protocol over a pipe, so that no package is needed beside the browser.

`chromium` is the browser of a test run, `page` an empty page of it with storage of its own. Both skip where there is no Chromium. A page
remembers what went wrong in it (`faults`) and what it asked for (`requests`).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
]
# Chromium reads commands from descriptor 3 and writes answers to 4.
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
PATIENCE_S = 60.0  # the machine may be busy
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "Backspace": (8, ""),
    " ": (32, " "),
}
MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}
# The first visible element that a selector finds, of those with this text or label if one is given.
FIND = """(selector, text) => [...document.querySelectorAll(selector)].find(element => {
  const named = [element.textContent.trim(), element.getAttribute("aria-label"), element.title];
  return element.checkVisibility({visibilityProperty: true}) && (text === "" || named.includes(text));
})"""


class ProtocolError(AssertionError):
    """A command that Chromium refused, or a page's own exception."""


class Chromium:
    def __init__(self, program: str, folder: Path) -> None:
        self._log = (folder / "chromium.log").open("wb")
        theirs_in, self._out = _high_pipe()
        self._in, theirs_out = _high_pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), program, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stdout=self._log, stderr=self._log)
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._last_id = 0
        self._pages: dict[str, Page] = {}

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and take what it gives; events that come first go to their pages."""
        self._last_id += 1
        wanted = self._last_id
        command = {"id": wanted, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + PATIENCE_S
        while (message := self._receive(until, method)).get("id") != wanted:
            self._deliver(message)
        if "error" in message:
            raise ProtocolError(f"{method}: {message['error']['message']}")
        return message["result"]

    def deliver_events(self) -> None:
        """Hand the events that have arrived to their pages."""
        self.call("Browser.getVersion")

    def new_page(self, width: int = 1280, height: int = 800, *, dark: bool = False) -> Page:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        return page

    def close_page(self, page: Page) -> None:
        del self._pages[page.session]
        self.call("Target.disposeBrowserContext", browserContextId=page.context)

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)
            self._log.close()

    def _receive(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise ProtocolError(f"{method}: no answer for {PATIENCE_S:.0f} s; {self._log.name} has what Chromium wrote")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise ProtocolError(f"{method}: Chromium ended; {self._log.name} has what it wrote")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _deliver(self, message: dict[str, Any]) -> None:
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None:
            page.on_event(message["method"], message["params"])


@dataclass
class Page:
    chromium: Chromium
    session: str
    context: str
    faults: list[str] = field(
        default_factory=list
    )  # exceptions, and what the console reports as an error: blocked by the policy, not found
    requests: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)  # parts of faults that a test provokes

    def call(self, method: str, **parameters: Any) -> Any:
        return self.chromium.call(method, self.session, **parameters)

    def on_event(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.faults.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.faults.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "assert"):
                self.faults.append(str([argument.get("value", argument.get("description")) for argument in event["args"]]))
            case "Network.requestWillBeSent":
                self.requests.append(event["request"]["url"])
            case _:
                pass

    def open(self, url: str) -> None:
        """Go there and wait until the page and its modules are loaded."""
        here = self.js("location.href")
        self.call("Page.navigate", url=url)
        if here.partition("#")[0] != url.partition("#")[0]:
            self.wait(f"location.href !== {json.dumps(here)}")
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        self.js("window.isBeforeReload = true")
        self.call("Page.reload")
        self.wait("!window.isBeforeReload && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise ProtocolError(f"{expression[:200]}: {details.get('exception', {}).get('description', details['text'])}")
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """The value of an expression once it is true. Navigation may take the page away meanwhile."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                if value := self.js(expression):
                    return value
            except ProtocolError as error:
                if time.monotonic() > until or "context" not in str(error).lower():
                    raise
            if time.monotonic() > until:
                raise AssertionError(f"not true within {timeout_s:.0f} s: {expression}; faults: {self.faults}; text: {self.text()[-1500:]}")
            time.sleep(0.02)

    def see(self, text: str, selector: str = "body") -> None:
        """Wait until a visible element of this selector shows the text."""
        self.wait(f"[...document.querySelectorAll({json.dumps(selector)})].some(e => e.innerText.includes({json.dumps(text)}))")

    def text(self, selector: str = "body") -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str, text: str = "") -> None:
        """As the mouse does it: what lies above the element gets the click."""
        found = f"({FIND})({json.dumps(selector)}, {json.dumps(text)})"
        self.wait(f"!!{found}")
        self.js(f"{found}.scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
        self._mouse("mouseMoved", self._aim(found))  # what is hovered may show more, and move
        point = self._aim(found)
        assert not point["above"], f"{selector} {text!r} is covered by {point['above'][:200]}"
        self._mouse("mousePressed", point, button="left", clickCount=1)
        self._mouse("mouseReleased", point, button="left", clickCount=1)

    def _aim(self, found: str) -> dict[str, Any]:
        """The middle of an element, and what lies above it there."""
        return self.js(f"""(() => {{
          const element = {found}, box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
          const hit = document.elementFromPoint(x, y);
          return {{x, y, above: element.contains(hit) ? "" : hit?.outerHTML ?? "nothing"}};
        }})()""")

    def _mouse(self, kind: str, point: dict[str, Any], **button: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=point["x"], y=point["y"], **button)

    def fill(self, selector: str, text: str) -> None:
        """Replace what a field holds, as if it were typed."""
        self.click(selector)
        self.js("document.activeElement.select?.()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.press("Backspace")
        self.js("document.activeElement.dispatchEvent(new Event('change', {bubbles: true}))")

    def choose(self, selector: str, value: str) -> None:
        self.js(f"""(() => {{
          const select = document.querySelector({json.dumps(selector)});
          select.value = {json.dumps(value)};
          if (select.value !== {json.dumps(value)}) throw new Error("there is no such option");
          for (const name of ["input", "change"]) select.dispatchEvent(new Event(name, {{bubbles: true}}));
        }})()""")

    def press(self, key: str) -> None:
        """A key, with modifiers before it: `Control+k`."""
        *held, name = key.split("+")
        code, text = KEYS.get(name, (ord(name[-1].upper()), name))
        modifiers = sum(MODIFIERS[modifier] for modifier in held)
        event = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = "" if modifiers & ~MODIFIERS["Shift"] else text
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def prefer(self, *, dark: bool) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def excuse(self, *parts: str) -> None:
        """Faults with one of these parts are meant to be: a browser reports each answer of 400 and above."""
        self.excused += parts

    def expect_no_faults(self) -> None:
        self.chromium.deliver_events()
        faults = [fault for fault in self.faults if not any(part in fault for part in self.excused)]
        assert not faults, faults


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those to which Chromium's are moved."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed")
    browser = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Chromium) -> Iterator[Page]:
    """A page that must end without faults."""
    page = chromium.new_page()
    yield page
    page.expect_no_faults()
    chromium.close_page(page)
