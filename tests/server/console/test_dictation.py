"""Dictation in the chat: speech that the microphone records is transcribed by a model of the server, and written into the message. The
microphone is that of Chromium, which beeps; the model is a small random Whisper, so the text means nothing."""

from __future__ import annotations

import json
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


# Open the microphone with no sound, and keep the streams that were opened.
STREAMS = """window.streams = [];
navigator.mediaDevices.getUserMedia = async () => {
  const stream = new MediaStreamAudioDestinationNode(new AudioContext()).stream;
  window.streams.push(stream);
  return stream;
}"""
# Answer each request for a transcript at once, and keep the name of the model that it asks.
ANSWER = """const asked = window.fetch;
window.models = [];
window.fetch = async (...args) => {
  if (!String(args[0]).endsWith("/audio/transcriptions")) return asked(...args);
  window.models.push(args[1].body.get("model"));
  return new Response('{"text": "hello"}', {headers: {"Content-Type": "application/json"}});
}"""
CLOSED = "window.streams.length > 0 && window.streams.every(stream => stream.getTracks().every(track => track.readyState === 'ended'))"
IDLE = f"document.querySelector('{BUTTON}').title === 'Dictate' && !document.querySelector('{BUTTON}').disabled"
RECORDING = f"document.querySelector('{BUTTON}').title === 'Stop and write' && !document.querySelector('{BUTTON}').disabled"


@pytest.mark.parametrize(
    "recorder",
    [
        "class { constructor() { throw new Error('no codec'); } }",
        "class { addEventListener() {} start() { throw new Error('no codec'); } }",
    ],
)
def test_a_recorder_that_cannot_begin_closes_the_microphone(page: Page, recorder: str) -> None:
    page.js(STREAMS)
    page.js(f"window.MediaRecorder = {recorder}; undefined")
    page.click(BUTTON, "Dictate")
    page.see("The microphone cannot be used: no codec.", ".toast")
    page.wait(CLOSED)
    page.wait(IDLE)


def test_a_recording_can_be_stopped_without_its_model(page: Page) -> None:
    """The model may be unloaded while somebody speaks. The transcript is asked of the model that was there at the beginning."""
    page.js(ANSWER)
    page.js("""import('./console/chat/dictation.js').then(({Dictation}) => {
      const button = document.createElement('button');
      button.id = 'alone';
      document.querySelector('#chat .composer').prepend(button);
      window.model = {id: 'first'};
      const write = (...written) => { window.written = written; };
      window.alone = new Dictation(button, {model: () => window.model, place: () => 'here', write});
      window.alone.show();
    })""")
    page.click("#alone", "Dictate")
    page.wait("document.getElementById('alone').title === 'Stop and write' && !document.getElementById('alone').disabled")
    page.js("window.model = null; window.alone.show()")
    page.js("new Promise(done => setTimeout(done, 300))")
    page.click("#alone", "Stop and write")
    page.wait("window.written !== undefined && document.getElementById('alone').hidden")
    assert page.js("window.models") == ["first"] and page.js("window.written") == ["hello", "here"]


def test_a_transcript_goes_to_the_conversation_in_which_it_was_dictated(page: Page) -> None:
    data = page.js("""(async () => {
      const {linkOf} = await import('./console/chat/exchange.js'), {add, newConversation} = await import('./console/chat/conversation.js');
      const conversation = newConversation({});
      add(conversation, null, {role: 'user', content: 'Tell me about rivers'});
      return (await linkOf(conversation)).split('#')[1];
    })()""")
    page.js(f"location.hash = {json.dumps(data)}")
    page.click("dialog button", "Keep")
    page.see("Tell me about rivers", ".messages")
    first = page.js("location.hash")
    page.js(ANSWER)
    for place, other in ((first, "#/chat"), ("#/chat", first)):
        page.js(f"location.hash = {json.dumps(place)}")
        page.wait(IDLE)
        page.click(BUTTON, "Dictate")
        page.wait(RECORDING)
        page.js(f"location.hash = {json.dumps(other)}")
        page.js("new Promise(done => setTimeout(done, 300))")
        page.click(BUTTON, "Stop and write")
        page.see("The transcript is in the conversation in which you dictated it.", ".toast")
        page.wait(IDLE)
        assert page.js(FIELD) == ""
        page.js(f"location.hash = {json.dumps(place)}")
        page.wait(f"{FIELD} === 'hello'")
        page.js("document.querySelector('.toast').remove()")
        page.fill("#chat textarea", "")
    page.expect_no_faults()


def test_a_recording_ends_when_the_page_is_left(page: Page) -> None:
    page.js(STREAMS)
    page.js(ANSWER)
    # The recording may be so short that it has no sound.
    page.js("OfflineAudioContext.prototype.decodeAudioData = async () => new AudioBuffer({length: 16, sampleRate: 16000}); undefined")
    page.click(BUTTON, "Dictate")
    page.wait(RECORDING)
    page.js("location.hash = '#/live'")
    page.wait(CLOSED)
    page.js("location.hash = '#/chat'")
    page.wait(f"{FIELD} === 'hello' && {IDLE}")


def test_nothing_records_behind_another_page(page: Page) -> None:
    """If the user leaves the chat while the browser asks whether the page may use the microphone, nothing is recorded."""
    page.js(STREAMS)
    page.js(ANSWER)
    page.js("""window.ask = navigator.mediaDevices.getUserMedia;
navigator.mediaDevices.getUserMedia = async wanted => {
  await new Promise(allow => { window.allow = allow; });
  return window.ask(wanted);
}""")
    page.click(BUTTON, "Dictate")
    page.wait("window.allow !== undefined")
    page.js("location.hash = '#/live'")
    page.wait("document.querySelector('#chat').hidden")
    page.js("window.allow()")
    page.see("Nothing is recorded, because you left the chat while the browser asked for the microphone.", ".toast")
    page.wait(CLOSED)
    page.js("location.hash = '#/chat'")
    page.wait(IDLE)
    assert page.js("window.models") == [] and page.js(FIELD) == ""
