"""Dictation in the chat: speech that the microphone records is transcribed by a model of the server, and written into the message. The
microphone is that of Chromium, which beeps; the model is a small random Whisper, so the text means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DemoServer, serving_demo
from tests.lab.chromium import Page

MODEL = Path(__file__).parents[2] / "golden" / "whisper"
BUTTON = "#chat [data-action=dictate]"
FIELD = "document.querySelector('#chat textarea').value"
# Keep what the server answers to the request for a transcript.
OVERHEAR = """const asked = window.fetch;
window.fetch = async (...args) => {
  const response = await asked(...args);
  if (String(args[0]).endsWith("/audio/transcriptions")) response.clone().json().then(found => { window.heard = found; });
  return response;
}"""
pytestmark = pytest.mark.xdist_group("console")


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[DemoServer]:
    with serving_demo(cache_folder, str(MODEL), "--quantize", "f32") as server:
        yield server


@pytest.fixture
def page(server: DemoServer, page: Page) -> Page:
    page.open(f"{server.url}/")
    page.wait(f"document.querySelector('{BUTTON}').checkVisibility()")
    return page


def test_a_recording_is_written_where_the_cursor_is(page: Page) -> None:
    page.js(OVERHEAR)
    page.fill("#chat textarea", "Once ")
    page.click(BUTTON, "Dictate")
    page.wait(f"document.querySelector('{BUTTON}').title === 'Stop and write' && !document.querySelector('{BUTTON}').disabled")
    page.js("new Promise(done => setTimeout(done, 300))")
    page.click(BUTTON, "Stop and write")
    page.wait("window.heard !== undefined")
    page.wait(f"document.querySelector('{BUTTON}').title === 'Dictate' && !document.querySelector('{BUTTON}').disabled")
    text = page.js("window.heard.text").strip()
    assert page.js(FIELD) == f"Once {text}"
    assert text or page.js("document.querySelector('.toast').textContent").startswith("Nothing was heard.")


def test_a_microphone_that_cannot_be_used_is_named(page: Page) -> None:
    page.js("navigator.mediaDevices.getUserMedia = async () => { throw new Error('Permission denied'); }")
    page.click(BUTTON, "Dictate")
    page.see("The microphone cannot be used: Permission denied.", ".toast")
    assert page.js(f"document.querySelector('{BUTTON}').title") == "Dictate"


def test_a_recording_that_cannot_be_transcribed_is_named(page: Page) -> None:
    page.js("OfflineAudioContext.prototype.decodeAudioData = async () => { throw new Error('no sound'); }")
    page.click(BUTTON, "Dictate")
    page.wait(f"document.querySelector('{BUTTON}').title === 'Stop and write' && !document.querySelector('{BUTTON}').disabled")
    page.click(BUTTON, "Stop and write")
    page.see("The recording could not be transcribed: no sound", ".toast")
    assert page.js(FIELD) == ""
