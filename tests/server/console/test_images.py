"""Images in the chat: pasted, dropped, chosen or photographed, shown in the message, and sent to models that see."""

from __future__ import annotations

import base64
import json

import pytest

from tests.server.console.conftest import idle, send
from tests.server.images.files import encoded, image

pytestmark = pytest.mark.xdist_group("console")

GIVE = """(how, name, data) => {
  const given = new DataTransfer(), bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
  given.items.add(new File([bytes], name, {type: "image/png"}));
  const field = document.querySelector("#chat textarea"), options = {bubbles: true, cancelable: true};
  if (how === "pasted") field.dispatchEvent(new ClipboardEvent("paste", {clipboardData: given, ...options}));
  else if (how === "dropped") field.dispatchEvent(new DragEvent("drop", {dataTransfer: given, ...options}));
  else {
    HTMLInputElement.prototype.click = function () { this.files = given.files; this.dispatchEvent(new Event("change")); };
    document.querySelector(`#chat [data-action=${how === "chosen" ? "attach" : "photograph"}]`).click();
  }
}"""
ATTACHED = "document.querySelectorAll('.attached img').length"
SHOWN = "[...document.querySelectorAll('article.user img')].filter(found => found.complete && found.naturalWidth > 0).length"


def give(page, how: str, name: str, file: bytes) -> None:
    page.js(f"({GIVE})({json.dumps(how)}, {json.dumps(name)}, {json.dumps(base64.b64encode(file).decode())})")


def opened(page, server, model: str) -> None:
    page.open(f"{server.url}/")
    page.see(model, ".empty h2")


@pytest.mark.parametrize("how", ["pasted", "dropped", "chosen", "photographed"])
def test_an_image_is_sent_with_the_question(page, site, how):
    server = site("looker")
    opened(page, server, "looker")
    give(page, how, "river.png", encoded(image()))
    page.wait(f"{ATTACHED} === 1")
    send(page, "What is it?")
    (crop,) = server.workers["looker"].submits[-1].excerpts
    assert len(crop.pixels) == 8 * 8 * 3
    page.wait(f"{SHOWN} === 1")
    assert page.text("article.user .said") == "What is it?" and page.js(ATTACHED) == 0


def test_images_alone_are_a_message_and_stay_in_the_conversation(page, site):
    server = site("looker")
    opened(page, server, "looker")
    for number in range(3):
        give(page, "pasted", f"{number}.png", encoded(image(seed=number)))
        page.wait(f"{ATTACHED} === {number + 1}")
    page.click(".attached button", "Remove 1.png")
    page.wait(f"{ATTACHED} === 2")
    page.click("#chat .send")
    page.see("It is a river.")
    idle(page)
    assert len(server.workers["looker"].submits[-1].excerpts) == 2
    page.reload()
    page.see("It is a river.")
    page.wait(f"{SHOWN} === 2")
    send(page, "And now?")
    assert len(server.workers["looker"].submits[-1].excerpts) == 2


def test_images_that_are_pasted_together_are_all_attached(page, site):
    opened(page, site("looker"), "looker")
    one, other = (base64.b64encode(encoded(image(seed=number))).decode() for number in range(2))
    page.js(f"for (const data of {json.dumps([one, other])}) ({GIVE})('pasted', 'image.png', data)")
    page.wait(f"{ATTACHED} === 2")


def test_a_question_waits_until_its_image_is_read(page, site):
    server = site("looker")
    opened(page, server, "looker")
    data = base64.b64encode(encoded(image())).decode()
    page.fill("#chat textarea", "What is it?")
    page.js(f"({GIVE})('pasted', 'river.png', {json.dumps(data)}); document.querySelector('#chat .composer').requestSubmit()")
    page.wait(f"{ATTACHED} === 1")
    assert not server.workers["looker"].submits and page.js("document.querySelector('#chat textarea').value") == "What is it?"
    page.click("#chat .send")
    page.see("It is a river.")
    assert len(server.workers["looker"].submits[-1].excerpts) == 1


def test_exchanges_whose_images_are_too_many_are_left_out(page, site):
    """The images of the whole conversation are more than the server accepts in one request."""
    server = site("looker", max_body_bytes=40_000)
    page.excuse("status of 413")
    opened(page, server, "looker")
    for number in range(2):
        file = encoded(image(100, 80, seed=number).effect_spread(20))
        assert 15_000 < len(file) < 25_000
        give(page, "pasted", "river.png", file)
        page.wait(f"{ATTACHED} === 1")
        send(page, "What is it?")
        page.see("It is a river.", "article.assistant:last-of-type")
    assert [len(submit.excerpts) for submit in server.workers["looker"].submits] == [1, 1]


def test_a_large_image_is_made_smaller(page, site):
    server = site("looker")
    opened(page, server, "looker")
    large = encoded(image(1800, 900).effect_spread(40))
    assert len(large) > 1 << 20
    give(page, "pasted", "large.png", large)
    page.wait(f"{ATTACHED} === 1")
    page.wait("document.querySelector('.attached img').naturalWidth === 1536")
    assert page.js("document.querySelector('.attached img').src").startswith("data:image/jpeg;base64,")
    send(page, "What is it?")
    assert len(server.workers["looker"].submits[-1].excerpts) == 1


def test_what_is_no_image_is_refused_by_name(page, site):
    opened(page, site("looker"), "looker")
    give(page, "pasted", "noise.png", b"noise")
    page.see("noise.png cannot be read as an image.", ".toast")
    assert page.js(ATTACHED) == 0


def test_models_without_vision_show_no_camera(page, site):
    opened(page, site("writer"), "writer")
    assert page.js("document.querySelector('[data-action=photograph]').hidden")
    give(page, "pasted", "river.png", encoded(image()))
    page.see("river.png is of type image/png; only texts can be attached.", ".toast")


def test_without_a_model_that_transcribes_nothing_is_dictated(page, site):
    opened(page, site("looker"), "looker")
    assert page.js("document.querySelector('[data-action=dictate]').hidden")
    assert not page.js("document.querySelector('[data-action=photograph]').hidden")
