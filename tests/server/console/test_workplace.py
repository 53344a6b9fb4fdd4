"""The chat has a library of prompts, attached files, conversations as links and files, and keyboard shortcuts."""

from __future__ import annotations

import json

import pytest

from tests.server.console.conftest import CHOOSE, ask, idle, send

pytestmark = pytest.mark.xdist_group("console")

KEEP_SAVED = """(() => {
  window.saved = [];
  URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return "#"; };
  HTMLAnchorElement.prototype.click = () => {};
})()"""
SHARED = {
    "title": "From elsewhere",
    "options": {"system": "Be brief.", "temperature": 0, "other": 1},
    "leaf": "b",
    "nodes": {
        "a": {"parent": None, "role": "user", "content": "What?", "created": 1, "files": [{"name": "x.txt", "text": "12"}]},
        "b": {"parent": "a", "role": "assistant", "content": "<b>That</b>", "created": 2, "model": "writer", "calls": []},
    },
}


def choose(page, name: str, text: str, kind: str = "") -> None:
    page.js(f"({CHOOSE})({json.dumps(name)}, {json.dumps(kind)}, {json.dumps(text)})")


def attach(page, name: str, text: str, kind: str = "") -> None:
    choose(page, name, text, kind)
    page.click("#chat [data-action=attach]")


def prompt_of(server, model: str = "writer") -> str:
    return bytes(token for token in server.workers[model].submits[-1].prompt_ids if token < 256).decode()


# --- prompts ---


def test_a_prompt_is_kept_used_changed_and_deleted(page, site):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.fill("#chat textarea", "Translate into French:")
    page.click("#prompts")
    page.fill("dialog input[aria-label='Name of the prompt']", "French")
    page.click("dialog button", "Keep prompt")
    page.see("French", "dialog .prompts")
    page.press("Escape")
    page.reload()
    page.see("writer", ".empty h2")
    page.click("#prompts")
    page.click("dialog .pick", "French")
    assert page.js("document.querySelector('#chat textarea').value") == "Translate into French:"
    page.click("#prompts")
    page.click("dialog button", "Edit French")
    page.fill("dialog textarea", "Translate into Canadian French:")
    page.click("dialog button", "Keep prompt")
    page.see("Canadian", "dialog .prompts")
    assert page.js("document.querySelectorAll('dialog .pick').length") == 1, "a prompt replaces the one of its name"
    page.click("dialog button", "Delete French")
    page.see("No prompt is kept yet", "dialog .prompts")


def test_prompts_go_into_a_file_and_come_back(page, site):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.js(KEEP_SAVED)
    page.click("#prompts")
    choose(page, "prompts.json", '[{"name": "One", "text": "1"}, {"name": "Two", "text": "2"}]')
    page.click("dialog button", "Import")
    page.see("2 prompts are imported.", ".toast")
    page.click("dialog button", "Export")
    page.wait("saved.length === 1")
    assert json.loads(page.js("saved[0]")) == [{"name": "One", "text": "1"}, {"name": "Two", "text": "2"}]


@pytest.mark.parametrize(
    "text, why",
    [("{", "is not JSON"), ("{}", "has no list of prompts"), ('[{"name": "One"}]', "prompt 1"), ("[null]", "prompt 1")],
)
def test_a_file_without_prompts_is_refused(page, site, text, why):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.click("#prompts")
    choose(page, "wrong.json", text)
    page.click("dialog button", "Import")
    page.see("wrong.json cannot be imported", ".toast")
    assert why in page.text(".toast")


# --- attachments ---


def test_attached_texts_are_sent_within_the_message(page, site):
    """The message shows the names of its files; the model reads their texts, each in a fence that the text cannot close."""
    server = site("writer")
    page.open(f"{server.url}/")
    page.see("writer", ".empty h2")
    attach(page, "notes.md", "before\n```\ncode\n```\n")
    page.see("notes.md, 20 B", ".attached")
    attach(page, "other.txt", "never sent")
    page.click(".attached button", "Remove other.txt")
    send(page, "What is this?")
    assert page.text("article.user .files") == "notes.md, 20 B" and page.text("article.user .said") == "What is this?"
    assert "notes.md:\n````\nbefore\n```\ncode\n```\n````\n\nWhat is this?" in prompt_of(server)
    assert "never sent" not in prompt_of(server) and page.text(".attached") == ""


def test_a_file_alone_is_a_message(page, site):
    server = site("writer")
    page.open(f"{server.url}/")
    page.see("writer", ".empty h2")
    attach(page, "notes.md", "alone")
    page.click("#chat .send")
    page.see("in Brazil")
    idle(page)
    assert "notes.md:\n```\nalone\n```" in prompt_of(server)
    assert page.text(".talk-link a") == "notes.md"


@pytest.mark.parametrize(
    ("name", "kind"), [("main.ts", "video/mp2t"), ("main.ts", "video/vnd.dlna.mpeg-tts"), ("drawing.svg", "image/svg+xml")]
)
def test_a_text_of_a_type_with_another_name_is_attached(page, site, name, kind):
    """Systems take TypeScript for a stream of video, and SVG is a picture that is written as text."""
    server = site("writer")
    page.open(f"{server.url}/")
    page.see("writer", ".empty h2")
    attach(page, name, "let x;", kind)
    page.see(name, ".attached")
    send(page, "What is this?")
    assert f"{name}:\n```\nlet x;\n```" in prompt_of(server)


@pytest.mark.parametrize(
    "name, text, kind, why",
    [
        ("photo.png", "x", "image/png", "photo.png is of type image/png; only texts can be attached."),
        ("film.mp4", "x", "video/mp4", "film.mp4 is of type video/mp4; only texts can be attached."),
        ("data.bin", "a\0b", "", "data.bin is not a text: it has zero bytes."),
        ("long.txt", "x" * (513 << 10), "", "long.txt has 513.0 KiB; expected at most 512.0 KiB."),
    ],
)
def test_other_files_are_refused_by_name(page, site, name, text, kind, why):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    attach(page, name, text, kind)
    page.see(why, ".toast")
    assert page.text(".attached") == ""


# --- conversations as links and files ---


def test_a_link_holds_the_conversation(page, site, other_page):
    """Another browser opens the link, and keeps the conversation if its user agrees. Copying the link sends no request with "shared" in its
    URL."""
    server = site("writer")
    page.open(f"{server.url}/")
    page.chromium.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], browserContextId=page.context
    )
    send(page, "Tell me about rivers")
    before = len(page.requests)
    page.click("#share")
    page.click("dialog .pick", "Copy a link")
    page.see("The link is copied.", ".toast")
    link = page.js("navigator.clipboard.readText()")
    assert link.startswith(f"{server.url}/#/shared/")
    assert not [url for url in page.requests[before:] if "shared" in url]
    other_page.open(link)
    other_page.see("Keep the shared conversation “Tell me about rivers” with 2 messages in this browser?", "dialog")
    other_page.click("dialog button", "Cancel")
    other_page.see("writer", ".empty h2")
    assert other_page.js("document.querySelectorAll('.talk-link').length") == 0
    other_page.open(f"{server.url}/")
    other_page.open(link)
    other_page.click("dialog button", "Keep")
    other_page.see("in Brazil")
    assert "#/chat/" in other_page.js("location.href") and other_page.text(".talk-link a") == "Tell me about rivers"
    other_page.expect_no_faults()


def test_a_damaged_link_is_told(page, site):
    url = site("writer").url
    for data in ("AAAA", "%", ""):
        page.open(f"{url}/")
        page.open(f"{url}/#/shared/{data}")
        page.see("The link holds no conversation, or not all of one", ".toast")
        page.js("document.querySelector('.toast').remove()")


def test_a_conversation_is_imported_as_text(page, site):
    """Markup in a file stays text, options that the console does not know are dropped, and the conversation goes on."""
    server = site("writer")
    page.open(f"{server.url}/")
    page.see("writer", ".empty h2")
    choose(page, "conversation.json", json.dumps(SHARED))
    page.click("#import-chat")
    page.see("<b>That</b>", "article.assistant")
    assert page.text("article.user .files") == "x.txt, 2 B" and page.text(".talk-link a") == "From elsewhere"
    send(page, "And now?")
    assert "Be brief." in prompt_of(server) and server.workers["writer"].submits[-1].params.temperature == 0
    page.reload()
    page.see("<b>That</b>", "article.assistant")


def changed(**nodes: object) -> dict:
    return {**SHARED, "nodes": {**SHARED["nodes"], **nodes}}


@pytest.mark.parametrize(
    "wrong, why",
    [
        (1, "it has no messages"),
        ({**SHARED, "nodes": {}}, "it has 0 messages"),
        ({**SHARED, "leaf": "c"}, "its last message is absent"),
        (changed(a={"parent": "z", "role": "user"}), "a message follows one that is absent"),
        (changed(a={"parent": "b", "role": "user"}), "its messages follow each other in a circle"),
        (changed(a={"parent": None, "role": "system"}), 'a message has the role "system"'),
    ],
)
def test_a_file_without_a_conversation_is_refused(page, site, wrong, why):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    choose(page, "wrong.json", json.dumps(wrong))
    page.click("#import-chat")
    page.see("wrong.json holds no conversation", ".toast")
    assert why in page.text(".toast") and page.js("document.querySelectorAll('.talk-link').length") == 0


# --- keys ---


def test_keys_edit_copy_and_repeat(page, site):
    page.open(f"{site('seeded').url}/")
    page.chromium.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], browserContextId=page.context
    )
    send(page, "Which seed?")
    first = page.text("article.assistant .prose")
    page.press("Control+/")
    page.see("Ask again for the last answer", "dialog")
    page.press("Escape")
    page.wait("!document.querySelector('dialog[open]:not(#key)')")
    page.js("document.querySelector('#chat textarea').focus()")
    page.js("dispatchEvent(new KeyboardEvent('keydown', {code: 'Comma', key: '<', ctrlKey: true, shiftKey: true}))")
    page.wait(f"navigator.clipboard.readText().then(text => text === {json.dumps(first)})")
    page.js("dispatchEvent(new KeyboardEvent('keydown', {code: 'Period', key: '>', ctrlKey: true, shiftKey: true}))")
    page.see("2/2", "article.assistant .branches")
    idle(page)
    page.js("document.querySelector('#chat textarea').focus()")
    page.press("ArrowUp")
    assert page.js("document.activeElement.getAttribute('aria-label')") == "Edited message"
    page.press("Escape")
    ask(page, "Another")
    page.see("Another", "article.user")
