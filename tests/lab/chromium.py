"""Control headless Chromium over a pipe by its DevTools protocol, which needs no package besides the browser. A page records its errors
(`faults`) and its requests (`requests`)."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    "--use-fake-device-for-media-stream",  # a microphone that beeps
    "--use-fake-ui-for-media-stream",  # grants pages the microphone without asking
]
# Replace descriptors 3 and 4 of the new process: Chromium reads commands from 3 and sends answers to 4.
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
PATIENCE_S = 60.0  # long, because the machine may be busy
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "Backspace": (8, ""),
    " ": (32, " "),
}
# Parts of the errors that Chromium reports when a page navigates during a command. Which one depends on whether the new document runs in
# another process, and on how far the command was.
NAVIGATED = ("context", "navigated")
MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}
# Finds the first visible element that matches a selector and, if a text is given, has this text or label.
LOOKS = 5  # how often a click looks again if another element covers its element
FIND = """(selector, text) => [...document.querySelectorAll(selector)].find(element => {
  const named = [element.textContent.trim(), element.getAttribute("aria-label"), element.title];
  return element.checkVisibility({visibilityProperty: true}) && (text === "" || named.includes(text));
})"""


def installed() -> str | None:
    """Return the browser's program, or None if it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class ProtocolError(AssertionError):
    """Chromium refused a command, or an exception occurred in a page."""


class NavigatedError(ProtocolError):
    """The page navigated while Chromium executed a command in it."""


class Chromium:
    def __init__(self, program: str, folder: Path, *, patience_s: float = PATIENCE_S, sound: Path | None = None) -> None:
        """`sound` is a WAV file that the microphone hears in place of beeps."""
        self._patience_s = patience_s
        self._log = (folder / "chromium.log").open("wb")
        theirs_in, self._out = _high_pipe()
        self._in, theirs_out = _high_pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), program, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
        command += [f"--use-file-for-fake-audio-capture={sound}"] if sound else []
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stdout=self._log, stderr=self._log)
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""
        self._last_id = 0
        self._pages: dict[str, Page] = {}
        self._emptied: Page | None = None

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and return its result. Events that arrive before the result are delivered to their pages."""
        self._last_id += 1
        wanted = self._last_id
        command = {"id": wanted, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + self._patience_s
        while (message := self._receive(until, method)).get("id") != wanted:
            self._deliver(message)
        if "error" in message:
            text = message["error"]["message"]
            raise (NavigatedError if any(part in text for part in NAVIGATED) else ProtocolError)(f"{method}: {text}")
        return message["result"]

    def deliver_events(self) -> None:
        """Deliver all events that have arrived to their pages."""
        self.call("Browser.getVersion")

    def new_page(self, width: int = 1280, height: int = 800, *, dark: bool = False, beside: Page | None = None) -> Page:
        """Return a new page with storage of its own, or with that of the page `beside` it, as another tab has."""
        context = self.call("Target.createBrowserContext")["browserContextId"] if beside is None else beside.context
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        return page

    def empty_page(self) -> Page:
        """Return the page that the last test emptied, or a new page."""
        page, self._emptied = self._emptied, None
        return page or self.new_page()

    def empty(self, page: Page) -> None:
        """Empty a page and its storage for the next test, because a new page would start another renderer process."""
        origin = page.js("location.origin")
        if origin != "null":
            page.js("sessionStorage.clear()")
            page.call("Page.navigate", url="about:blank")
            page.wait("location.href === 'about:blank' && document.readyState === 'complete'")
            page.call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        page.call("Page.resetNavigationHistory")
        self.call("Browser.resetPermissions", browserContextId=page.context)
        page.resize(1280, 800)
        page.prefer(dark=False)
        self.deliver_events()
        for told in (page.faults, page.requests, page.excused):
            told.clear()
        self._emptied = page

    def close_page(self, page: Page) -> None:
        del self._pages[page.session]
        self.call("Target.disposeBrowserContext", browserContextId=page.context)

    def close_tab(self, page: Page) -> None:
        """Close a page whose storage another page shares."""
        page.call("Page.close")
        del self._pages[page.session]

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
                raise ProtocolError(f"{method}: no answer for {self._patience_s:.0f} s; {self._log.name} has what Chromium wrote")
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
    faults: list[str] = field(default_factory=list)  # exceptions and console errors, such as a violated policy or a missing file
    requests: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)  # texts of faults that the test causes on purpose and therefore accepts

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
        """Open a URL and wait until the page and its modules are loaded."""
        here = self.js("location.href")
        self.call("Page.navigate", url=url)
        if here.partition("#")[0] != url.partition("#")[0]:
            self.wait(f"location.href !== {json.dumps(here)}")
        self.wait("document.readyState === 'complete'")

    def to_front(self) -> None:
        """Show this page: a browser draws none behind another."""
        self.call("Page.bringToFront")

    def reload(self) -> None:
        self.js("window.isBeforeReload = true")
        self.call("Page.reload")
        self.wait("!window.isBeforeReload && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or the result of a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise ProtocolError(f"{expression[:200]}: {details.get('exception', {}).get('description', details['text'])}")
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until a JavaScript expression is true, and return its value. The page may navigate meanwhile."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                if value := self.js(expression):
                    return value
            except NavigatedError:
                if time.monotonic() > until:
                    raise
            if time.monotonic() > until:
                raise AssertionError(f"not true within {timeout_s:.0f} s: {expression}; faults: {self.faults}; text: {self.text()[-1500:]}")
            time.sleep(0.02)

    def see(self, text: str, selector: str = "body") -> None:
        """Wait until a visible element that matches the selector shows the text."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        self.wait(f"{found}.some(e => e.checkVisibility() && e.innerText.includes({json.dumps(text)}))")  # a hidden element has a text too

    def text(self, selector: str = "body") -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str, text: str = "") -> None:
        """Click the middle of an element with the mouse. If another element covers this point, look again a few times, because the page may
        just be scrolling; then fail."""
        found = f"({FIND})({json.dumps(selector)}, {json.dumps(text)})"
        self.wait(f"!!{found}")
        point = self._scroll_to(found)
        for _ in range(LOOKS):
            if point["above"]:
                time.sleep(0.1)
                point = self._scroll_to(found)
        assert not point["above"], f"{selector} {text!r} is covered by {point['above'][:200]}"
        self._mouse("mousePressed", point, button="left", clickCount=1)
        self._mouse("mouseReleased", point, button="left", clickCount=1)

    def _scroll_to(self, found: str) -> dict[str, Any]:
        """Scroll to an element, and move the mouse to its middle. Return what `_aim` returns then."""
        self.js(f"{found}.scrollIntoView({{block: 'nearest', behavior: 'instant'}})")
        self._mouse("mouseMoved", self._aim(found))  # hovering may show more elements, which may move this element
        return self._aim(found)

    def _aim(self, found: str) -> dict[str, Any]:
        """Return the coordinates of an element's middle, and the element that covers it there, if one does."""
        return self.js(f"""(() => {{
          const element = {found}, box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
          const hit = document.elementFromPoint(x, y);
          return {{x, y, above: element.contains(hit) ? "" : hit?.outerHTML ?? "nothing"}};
        }})()""")

    def _mouse(self, kind: str, point: dict[str, Any], **button: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=point["x"], y=point["y"], **button)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field, as if it were typed."""
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
        """Press a key, or a key with modifiers, as in `Control+k`."""
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
        """Accept faults that contain one of these texts. The browser reports every answer with a status of 400 or above as a fault."""
        self.excused += parts

    def expect_no_faults(self) -> None:
        self.chromium.deliver_events()
        faults = [fault for fault in self.faults if not any(part in fault for part in self.excused)]
        assert not faults, faults


def _high_pipe() -> tuple[int, int]:
    """Return a pipe with descriptors above 4, which the launcher does not replace."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
