"""Audio in the chat for models that hear: recorded with the microphone, pasted, dropped or chosen, played in the message, and sent as the
samples that were heard. The microphone of this file's browser hears a file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.spectrogram import RATE
from tests.lab.chromium import NAMES, Chromium, Page, installed
from tests.server.audio.files import encoded, tone, wav
from tests.server.console.conftest import idle, send
from tests.server.images.files import encoded as encoded_image
from tests.server.images.files import image

pytestmark = pytest.mark.xdist_group("console")
HERTZ = 700.0
BUTTON = "#chat [data-action=record]"
ATTACHED = "document.querySelectorAll('.attached audio').length"
SHOWN = "[...document.querySelectorAll('article.user audio')].filter(found => found.duration > 0).length"
RECORDING = f"document.querySelector('{BUTTON}').title === 'Stop and attach' && !document.querySelector('{BUTTON}').disabled"
IDLE = f"document.querySelector('{BUTTON}').title === 'Record' && !document.querySelector('{BUTTON}').disabled"
SOUNDS = "parseFloat(document.querySelector('.recording .track i').style.width) > 20"
LASTS = "document.querySelector('.recording .number').textContent >= '0:01'"  # a file of less time may have no sound
CLOSED = "window.streams.length > 0 && window.streams.every(stream => stream.getTracks().every(track => track.readyState === 'ended'))"
# Keep the streams that the page opens.
KEEP_STREAMS = """window.streams = [];
window.opened = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
navigator.mediaDevices.getUserMedia = async wanted => {
  const stream = await window.opened(wanted);
  window.streams.push(stream);
  return stream;
}"""
# Let the browser ask until `allow` is called.
ASK = """window.ask = navigator.mediaDevices.getUserMedia;
navigator.mediaDevices.getUserMedia = async wanted => {
  await new Promise(allow => { window.allow = allow; });
  return window.ask.call(navigator.mediaDevices, wanted);
}"""
# Let the browser read audio only after `go` was called.
READ_LATE = """window.went = new Promise(go => { window.go = go; });
window.decode = OfflineAudioContext.prototype.decodeAudioData;
OfflineAudioContext.prototype.decodeAudioData = async function (data) {
  await window.went;
  return window.decode.call(this, data);
}; undefined"""
GIVE = """(how, name, type, data) => {
  const given = new DataTransfer(), bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
  given.items.add(new File([bytes], name, {type}));
  const field = document.querySelector("#chat textarea"), options = {bubbles: true, cancelable: true};
  if (how === "pasted") field.dispatchEvent(new ClipboardEvent("paste", {clipboardData: given, ...options}));
  else if (how === "dropped") field.dispatchEvent(new DragEvent("drop", {dataTransfer: given, ...options}));
  else {
    HTMLInputElement.prototype.click = function () { this.files = given.files; this.dispatchEvent(new Event("change")); };
    document.querySelector("#chat [data-action=attach]").click();
  }
}"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = installed()
    if program is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed")
    folder = tmp_path_factory.mktemp("hearing")
    sound = folder / "tone.wav"
    sound.write_bytes(wav(tone(48_000, HERTZ, seconds=5.0), 48_000))
    browser = Chromium(program, folder, sound=sound)
    yield browser
    browser.close()


def opened(page: Page, server: Any, model: str = "listener") -> None:
    page.open(f"{server.url}/")
    page.see(model, ".empty h2")


def give(page: Page, how: str, name: str, type: str, file: bytes) -> None:
    page.js(f"({GIVE})({json.dumps(how)}, {json.dumps(name)}, {json.dumps(type)}, {json.dumps(base64.b64encode(file).decode())})")


def record(page: Page) -> None:
    """Record until something is heard, and attach the recording."""
    before = page.js(ATTACHED)
    page.click(BUTTON, "Record")
    page.wait(RECORDING)
    page.wait(f"{SOUNDS} && {LASTS}")
    page.click(BUTTON, "Stop and attach")
    page.wait(f"{ATTACHED} === {before + 1}")


def pitch(clip: Any) -> float:
    """Return the strongest frequency of a clip."""
    samples = np.frombuffer(clip.samples, "<f4")
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(power.argmax() * RATE / len(samples))


def test_what_the_microphone_hears_is_sent(page: Page, site: Any) -> None:
    server = site("listener")
    opened(page, server)
    page.js(KEEP_STREAMS)
    record(page)
    page.wait(CLOSED)
    assert page.js("document.querySelector('.recording').hidden")
    send(page, "What do you hear?")
    (clip,) = server.workers["listener"].submits[-1].excerpts
    assert pitch(clip) == pytest.approx(HERTZ, abs=5) and clip.num_hops >= 40
    page.see("I hear a tone.")
    page.wait(f"{SHOWN} === 1")
    page.js("{ const sound = document.querySelector('article.user audio'); sound.muted = true; sound.play(); }")
    page.wait("document.querySelector('article.user audio').currentTime > 0")


def test_recordings_alone_are_a_message_and_stay_in_the_conversation(page: Page, site: Any) -> None:
    server = site("listener")
    opened(page, server)
    for _ in range(3):
        record(page)
    page.click(".attached button", "Remove Recording 2")
    page.wait(f"{ATTACHED} === 2")
    page.click("#chat .send")
    page.see("I hear a tone.")
    idle(page)
    first = server.workers["listener"].submits[-1].excerpts
    assert len(first) == 2
    page.reload()
    page.see("I hear a tone.")
    page.wait(f"{SHOWN} === 2")
    send(page, "And now?")
    assert [clip.digest for clip in server.workers["listener"].submits[-1].excerpts] == [clip.digest for clip in first]


def test_a_recording_is_discarded(page: Page, site: Any) -> None:
    opened(page, site("listener"))
    page.js(KEEP_STREAMS)
    page.fill("#chat textarea", "What do you hear?")
    page.click(BUTTON, "Record")
    page.wait(RECORDING)
    assert page.js("document.querySelector('#chat .send').disabled")  # what is recorded would be missing from the message
    page.click(".recording button", "Discard the recording")
    page.wait(f"{CLOSED} && document.querySelector('.recording').hidden && !document.querySelector('#chat .send').disabled")
    assert page.js(ATTACHED) == 0


def test_a_recording_ends_when_the_page_is_left(page: Page, site: Any) -> None:
    opened(page, site("listener"))
    page.js(KEEP_STREAMS)
    page.click(BUTTON, "Record")
    page.wait(f"{RECORDING} && {SOUNDS} && {LASTS}")
    page.js("location.hash = '#/live'")
    page.wait(CLOSED)
    page.js("location.hash = '#/chat'")
    page.wait(f"{ATTACHED} === 1")


def test_nothing_records_behind_another_page(page: Page, site: Any) -> None:
    """If the user leaves the chat while the browser asks whether the page may use the microphone, nothing is recorded."""
    opened(page, site("listener"))
    page.js(KEEP_STREAMS)
    page.js(ASK)
    page.click(BUTTON, "Record")
    page.wait("window.allow !== undefined")
    page.js("location.hash = '#/live'")
    page.wait("document.querySelector('#chat').hidden")
    page.js("window.allow()")
    page.see("Nothing is recorded, because you left the chat while the browser asked for the microphone.", ".toast")
    page.wait(CLOSED)
    page.js("location.hash = '#/chat'")
    page.wait(IDLE)
    assert page.js(ATTACHED) == 0
    page.js("navigator.mediaDevices.getUserMedia = window.ask; undefined")
    record(page)


def test_a_recording_belongs_to_the_model_for_which_it_began(page: Page, site: Any) -> None:
    opened(page, site("listener", "writer"), "listener")
    page.click(BUTTON, "Record")
    page.wait(f"{RECORDING} && {SOUNDS}")
    page.choose("#model", "writer")
    page.click(BUTTON, "Stop and attach")
    page.wait(f"{ATTACHED} === 1")


def test_a_recording_gets_the_room_that_the_message_has_left(page: Page, site: Any) -> None:
    """A file that is attached meanwhile could leave too little room for the recording, which would be lost."""
    opened(page, site("listener"))
    page.js(KEEP_STREAMS)
    page.js(READ_LATE)
    file = wav(tone(RATE), RATE)
    give(page, "pasted", "first.wav", "audio/wav", file)
    page.wait(f"document.querySelector('{BUTTON}').disabled")
    page.js("window.go()")
    page.wait(f"{ATTACHED} === 1 && {IDLE}")
    page.js(ASK)
    page.click(BUTTON, "Record")
    page.wait("window.allow !== undefined")
    give(page, "pasted", "second.wav", "audio/wav", wav(np.zeros(8000 * 20, np.float32), 8000, sample_bytes=1))
    page.wait(f"{ATTACHED} === 2")
    page.js("window.allow()")
    page.see("Nothing is recorded, because the message changed while the browser asked for the microphone.", ".toast")
    page.wait(f"{CLOSED} && {IDLE}")
    page.js("navigator.mediaDevices.getUserMedia = window.ask; undefined")
    page.click(BUTTON, "Record")
    page.wait(f"{RECORDING} && {SOUNDS}")
    give(page, "pasted", "third.wav", "audio/wav", file)
    page.see("The recording takes the room that is left in the message: end it, then attach files.", ".toast")
    page.click(BUTTON, "Stop and attach")
    page.wait(f"{ATTACHED} === 3")


def test_a_message_with_all_its_files_takes_no_recording(page: Page, site: Any) -> None:
    opened(page, site("listener"))
    for number in range(16):
        give(page, "pasted", f"{number}.txt", "text/plain", b"text")
    page.wait("document.querySelectorAll('.attached li').length === 16")
    page.click(BUTTON, "Record")
    page.see("The message takes no further recording: send it, or remove something.", ".toast")


def test_a_recording_ends_when_the_message_takes_no_more(page: Page, site: Any) -> None:
    opened(page, site("listener"))
    page.js("window.later = window.setTimeout; window.setTimeout = (run, ms) => window.later(run, ms === 150000 ? 700 : ms); undefined")
    page.click(BUTTON, "Record")
    page.see("The recording ended after 150 s, because a message takes no more.", ".toast")
    page.wait(f"{ATTACHED} === 1")
    page.click(".attached button", "Remove Recording 1")
    long = wav(np.zeros(8000 * 81, np.float32), 8000, sample_bytes=1)
    for number in range(2):
        give(page, "pasted", f"{number}.wav", "audio/wav", long)
        page.wait(f"{ATTACHED} === {number + 1}")
    page.click(BUTTON, "Record")
    page.see("The message takes no further recording: send it, or remove something.", ".toast")
    give(page, "pasted", "more.wav", "audio/wav", long)
    page.see("more.wav is too much: the images and the audio have", ".toast")
    assert page.js(ATTACHED) == 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("throw new DOMException('x', 'NotAllowedError')", "the browser does not allow this page to use it; allow it in the settings"),
        ("throw new DOMException('x', 'NotFoundError')", "there is none; connect one"),
        ("throw new DOMException('x', 'NotReadableError')", "the system does not give it to the browser; another program may use it"),
        ("throw new Error('Out of order')", "Out of order"),
        ("return new MediaStream()", ""),  # which the recorder refuses in its own words
    ],
)
def test_a_microphone_that_cannot_be_used_is_named(page: Page, site: Any, script: str, said: str) -> None:
    opened(page, site("listener"))
    page.js(f"navigator.mediaDevices.getUserMedia = async () => {{ {script}; }}; undefined")
    page.click(BUTTON, "Record")
    page.see(f"The microphone cannot be used: {said}", ".toast")
    page.wait(IDLE)
    assert page.js("document.querySelector('.recording').hidden") and page.js(ATTACHED) == 0


def test_a_page_without_tls_says_why_it_cannot_record(page: Page, site: Any) -> None:
    opened(page, site("listener"))
    page.js("Object.defineProperty(navigator, 'mediaDevices', {value: undefined}); undefined")
    page.click(BUTTON, "Record")
    page.see("The microphone cannot be used: browsers open it only for pages from this machine or over TLS.", ".toast")


@pytest.mark.parametrize("how", ["pasted", "dropped", "chosen"])
@pytest.mark.parametrize("kind", ["WAV", "MP3"])
def test_a_file_of_audio_is_sent_with_the_question(page: Page, site: Any, how: str, kind: str) -> None:
    server = site("listener")
    opened(page, server)
    sound = tone(44_100, HERTZ, seconds=1.0)
    file, type = (wav(sound, 44_100), "audio/wav") if kind == "WAV" else (encoded(sound, 44_100, kind), "audio/mpeg")
    give(page, how, "tone", type, file)
    page.wait(f"{ATTACHED} === 1")
    send(page, "What do you hear?")
    (clip,) = server.workers["listener"].submits[-1].excerpts
    assert pitch(clip) == pytest.approx(HERTZ, abs=5) and clip.num_hops == pytest.approx(100, abs=10)


def test_files_that_cannot_be_sent_are_named(page: Page, site: Any) -> None:
    opened(page, site("listener"))
    give(page, "pasted", "noise.wav", "audio/wav", b"noise")
    page.see("noise.wav cannot be read as audio.", ".toast")
    give(page, "pasted", "long.wav", "audio/wav", wav(np.zeros(8000 * 200, np.float32), 8000, sample_bytes=1))
    page.see("long.wav lasts 200 s; expected at most 150 s.", ".toast")
    give(page, "pasted", "river.png", "image/png", encoded_image(image()))
    page.see("river.png is of type image/png; only texts and audio can be attached.", ".toast")
    assert page.js(ATTACHED) == 0


def test_models_that_do_not_hear_get_no_recording(page: Page, site: Any) -> None:
    opened(page, site("writer", "listener"), "writer")
    assert page.js(f"document.querySelector('{BUTTON}').hidden")
    give(page, "pasted", "tone.wav", "audio/wav", wav(tone(RATE), RATE))
    page.see("tone.wav is of type audio/wav; only texts can be attached.", ".toast")
    page.choose("#model", "listener")
    page.wait(f"!document.querySelector('{BUTTON}').hidden")
    assert page.js("document.querySelector('[data-action=attach]').title") == "Attach text files and audio"


def test_a_conversation_with_a_recording_is_a_file_and_back(page: Page, site: Any) -> None:
    server = site("listener")
    opened(page, server)
    page.js("""window.exchange = (async () => {
      const {asJson, asMarkdown, parseConversation} = await import('./console/chat/exchange.js');
      const {add, newConversation} = await import('./console/chat/conversation.js');
      const conversation = newConversation({}), audio = 'data:audio/wav;base64,UklGRg==';
      add(conversation, null, {role: 'user', content: 'Listen', files: [{name: 'a[b]', audio}]});
      const found = Object.values(parseConversation(asJson(conversation)).nodes)[0].files;
      const foreign = asJson(conversation).replace('data:audio/wav', 'https://evil.example/');
      let fault = '';
      try { parseConversation(foreign); } catch (error) { fault = error.message; }
      return {found, markdown: asMarkdown(conversation), fault};
    })(); undefined""")
    found = page.js("window.exchange")
    assert found["found"] == [{"name": "a[b]", "audio": "data:audio/wav;base64,UklGRg=="}]
    assert "[ab](data:audio/wav;base64,UklGRg==)" in found["markdown"]
    assert found["fault"] == 'the recording "a[b]" is not the URL of a WAV file'
