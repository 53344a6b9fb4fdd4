"""Take the screenshot of the console for the README: `python -m tests.screenshot` serves the demo model, asks two questions and
writes docs/images/console.png."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from tests.conftest import ROOT, serving_demo
from tests.lab.chromium import NAMES, Chromium, installed

PICTURE = ROOT / "docs" / "images" / "console.png"
QUESTIONS = ("What is the capital of France?", "How many legs does a spider have?")


def main() -> None:
    program = installed()
    if program is None:
        raise SystemExit(f"needs Chromium: none of {', '.join(NAMES)} is installed; `make .venv/browser` installs it")
    with (
        tempfile.TemporaryDirectory() as folder,
        serving_demo(Path(folder) / "cache") as server,
        closing(Chromium(program, Path(folder))) as chromium,
    ):
        page = chromium.new_page(1000, 560)
        page.open(server.url)
        page.see("Ask the demo model")
        for number, question in enumerate(QUESTIONS, 1):
            page.fill("#chat textarea", question)
            page.press("Enter")
            figures = "[...document.querySelectorAll('article.assistant .figures')]"
            page.wait(f"{figures}.filter(one => one.textContent.includes('tokens')).length === {number}")
        page.wait("document.querySelector('.context').innerText.includes('tokens')")
        page.expect_no_faults()
        page.screenshot(PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size >> 10} KB")


if __name__ == "__main__":
    main()
