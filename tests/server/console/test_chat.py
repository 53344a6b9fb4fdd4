"""The chat of the console in a browser: answers, saved conversations, branches, options, tools, keyboard."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.doubles.mcp_server import Behaviour, serving, tool
from tests.doubles.worker import ByteTokenizer
from tests.server.console.conftest import MARKDOWN, TOOLS, ask, idle, press_send, send

pytestmark = pytest.mark.xdist_group("console")


def test_an_answer_is_shown_as_markdown(page, site):
    """Headings, lists, tables, task lists and coloured code in an answer become elements of the page. HTML in an answer is shown as plain
    text."""
    page.open(f"{site('writer').url}/")
    send(page, "Tell me about rivers")
    assert page.text("article .prose h3") == "Rivers"
    assert page.js("[...document.querySelectorAll('article ol > li > ul > li')].map(item => item.textContent)") == ["in Brazil", "in Peru"]
    assert page.js("[...document.querySelectorAll('article td.right')].map(cell => cell.textContent)") == ["6650", "6400"]
    assert page.js("document.querySelector('article a').href") == "https://example.com/a_(b)"
    assert page.text("article .is-keyword") == "def" and page.text("article .is-comment") == "# in kilometres"
    assert page.text("article blockquote") == "Rivers flow <b>downhill</b>."
    assert page.js("document.querySelectorAll('article b').length") == 0
    assert page.js("[...document.querySelectorAll('article .task input')].map(box => box.checked)") == [True, False]


def test_a_model_without_a_chat_template_continues_texts(page, site):
    """The page says so before the first message. The text is continued as it is, and a further message begins a line of it."""
    server = site("seeded", tokenizer=ByteTokenizer(chat=False))
    page.open(f"{server.url}/")
    page.see("seeded has no chat template", ".empty p")
    assert page.js("document.querySelector('#chat textarea').placeholder") == "Begin a text"
    send(page, "Rivers are")
    send(page, "Lakes are")
    first, second = (bytes(each.prompt_ids[1:]).decode() for each in server.workers["seeded"].submits)
    assert first == "Rivers are" and re.fullmatch(r"Rivers areMy seed is \d+\.\nLakes are", second)
    page.open(page.js("location.origin") + "/#/compare")
    page.see("seeded has no chat template", "#compare .empty p")


def test_code_and_answers_are_copied_as_they_were_written(page, site):
    page.open(f"{site('writer').url}/")
    page.chromium.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], browserContextId=page.context
    )
    send(page, "Tell me about rivers")
    page.click("article.assistant figure button", "Copy code")
    page.wait("navigator.clipboard.readText().then(text => text.startsWith('def length') && text.endsWith('[name]'))")
    page.click("article.assistant footer button", "Copy")
    page.wait(f"navigator.clipboard.readText().then(text => text === {json.dumps(MARKDOWN)})")


def test_a_conversation_lasts(page, site):
    """A conversation survives a reload of the page. A search for its text finds it, and the user can rename, delete and restore it."""
    server = site("writer", "seeded")
    page.open(f"{server.url}/")
    send(page, "Tell me about rivers")
    page.click("#new-chat")
    page.see("writer", ".empty h2")
    page.choose("#model", "seeded")
    send(page, "And now something else")
    page.reload()
    page.see("My seed is")
    assert page.js("document.querySelector('#model').value") == "seeded"
    page.fill("#search", "downhill")  # a word that occurs in the answer
    page.wait("document.querySelectorAll('.talk-link').length === 1")
    page.click(".talk-link a", "Tell me about rivers")
    page.see("in Brazil")
    page.click(".talk-link button", "Rename")
    page.call("Input.insertText", text="All rivers")
    page.press("Enter")
    page.see("All rivers", ".talk-link a")
    page.reload()
    page.see("All rivers", ".talk-link a")
    page.click(".talk-link a", "All rivers")
    page.click(".talk-link:has([aria-current]) button", "Delete")
    page.wait("![...document.querySelectorAll('.talk-link a')].some(link => link.textContent === 'All rivers')")
    page.click(".toast button", "Undo")
    page.see("All rivers", ".talk-link a")


RENAME = """title => {
  [...document.querySelectorAll(".talk-link button")].find(button => button.title === "Rename").click();
  const field = document.querySelector("#conversations input");
  field.value = title;
  field.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
}"""


def test_a_title_lasts_if_the_page_is_reloaded_at_once(page, site):
    """While the page is busy, the browser cannot tell it that the change has arrived; about every third reload then comes first."""
    page.open(f"{site('writer').url}/")
    send(page, "Tell me about rivers")
    busy = "const end = performance.now() + 300; while (performance.now() < end);"
    for number in range(12):
        page.js(f"window.isBeforeReload = true; (() => {{ ({RENAME})('Title {number}'); location.reload(); {busy} }})()")
        page.wait("!window.isBeforeReload && document.readyState === 'complete'")
        page.wait("document.querySelectorAll('.talk-link').length === 1")
        assert page.text(".talk-link a") == f"Title {number}"


def test_tabs_lose_nothing_of_each_other(page, tab, site):
    """A tab shows the messages that another tab stores, and does not overwrite them with an older copy."""
    url = f"{site('writer', 'seeded').url}/"
    page.open(url)
    send(page, "Tell me about rivers")
    tab.to_front()
    tab.open(page.js("location.href"))
    tab.see("in Brazil")
    tab.choose("#model", "seeded")
    send(tab, "And your seed?")
    page.to_front()
    page.see("My seed is", "article.assistant")
    page.js(f"({RENAME})('All rivers')")
    tab.to_front()
    tab.see("All rivers", ".talk-link a")
    send(tab, "Once more")
    page.to_front()
    page.reload()
    page.see("All rivers", ".talk-link a")
    page.wait("document.querySelectorAll('article.assistant').length === 3")
    page.click("#new-chat")
    page.see("seeded", ".empty h2")
    ask(page, "Something else")
    tab.see("Something else", ".talk-link a")
    page.see("My seed is", "article.assistant")


STORED = """new Promise((done, fail) => {
  const opened = indexedDB.open("relaxserve");
  opened.onerror = fail;
  opened.onsuccess = () => {
    const conversations = opened.result.transaction("conversations", "readwrite").objectStore("conversations");
    conversations.getAll().onsuccess = ({target: {result: [one]}}) => (ACT)(one, conversations, done);
  };
})"""
OLDER = {
    "without the answer": "delete one.nodes[node.id]",
    "with the beginning of the answer": "Object.assign(node, {content: node.content.slice(0, 12), finish: null})",
    "with an answer that seems interrupted": "Object.assign(node, {content: node.content.slice(0, 12), finish: 'interrupted'})",
}


@pytest.mark.parametrize("older", OLDER)
def test_a_tab_stores_again_what_another_has_overwritten(page, site, older):
    """The other tab changes its copy before it hears that there is a newer one."""
    page.open(f"{site('writer').url}/")
    send(page, "Tell me about rivers")
    overwrite = """(one, conversations, done) => {
      one.title = "Older";
      for (const node of Object.values(one.nodes)) if (node.role === "assistant") CHANGE;
      conversations.put(one).onsuccess = () => {
        new BroadcastChannel("relaxserve").postMessage(one.id);
        done(true);
      };
    }""".replace("CHANGE", OLDER[older])
    assert page.js(STORED.replace("ACT", overwrite))
    page.see("Older", ".talk-link a")
    whole = "Object.values(one.nodes).some(({finish, content}) => finish === 'stop' && content.includes('in Brazil'))"
    page.wait(STORED.replace("ACT", f"(one, _, done) => done({whole})"), timeout_s=10)
    page.see("in Brazil")


def test_a_tab_stays_at_its_branch(page, tab, site):
    """Another tab may show another branch of the conversation, and store that it does."""
    page.open(f"{site('seeded').url}/")
    send(page, "first question")
    page.click("article.assistant button", "Ask again")
    page.see("2/2", "article.assistant .branches")
    idle(page)
    tab.to_front()
    tab.open(page.js("location.href"))
    tab.see("2/2", "article.assistant .branches")
    tab.click("article.assistant button", "Previous version")
    tab.see("1/2", "article.assistant .branches")
    page.to_front()
    page.js(f"({RENAME})('First')")
    tab.see("First", ".talk-link a")
    assert tab.text("article.assistant .branches") == "1/2"
    tab.js(f"({RENAME})('Second')")
    page.see("Second", ".talk-link a")
    assert page.text("article.assistant .branches") == "2/2"
    send(page, "a follow-up")
    tab.wait(STORED.replace("ACT", "(one, _, done) => done(Object.keys(one.nodes).length === 5)"))
    assert tab.text("article.assistant .branches") == "1/2"


def test_results_of_tools_stay_typed_when_another_tab_stores(page, tab, site):
    page.open(f"{site('caller').url}/")
    page.click("[data-action=options]")
    page.fill("#options [name=tools]", TOOLS)
    send(page, "How is the weather in Oslo?")
    page.see("The model waits for a tool", ".answers")
    tab.to_front()
    tab.open(page.js("location.href"))
    tab.fill(".answers textarea", "4 degrees")
    page.to_front()
    page.js(f"({RENAME})('Weather')")
    tab.to_front()
    tab.see("Weather", ".talk-link a")
    tab.js("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert tab.js("document.querySelector('.answers textarea').value") == "4 degrees"
    tab.click(".answers button", "Send result")
    tab.see("It is cold in Oslo")


def test_a_tab_is_calm_while_another_streams(page, tab, site):
    """The other tab stores its answer every two seconds. The sidebar keeps the focus, and tokens are counted when the answer has ended."""

    def counts():
        tab.chromium.deliver_events()
        return sum(url.endswith("/tokenize") for url in tab.requests)

    length = "document.querySelector('article.assistant .prose').textContent.length"
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    tab.to_front()
    tab.open(page.js("location.href"))
    tab.see("of 4,096 tokens", "#chat .composer")  # the count that entering the conversation began
    begun = counts()
    tab.js("document.querySelector('.talk-link a').focus()")
    for _ in range(2):
        tab.wait(f"{length} > {tab.js(length)}")
    assert tab.js("document.activeElement.matches('.talk-link a')")
    assert counts() == begun
    page.js("document.querySelector('#chat .send').click()")
    until = time.monotonic() + 20
    while counts() == begun:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_tab_takes_over_a_title_while_it_streams(page, tab, site):
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    tab.to_front()
    tab.open(page.js("location.href"))
    tab.see("word word")
    tab.js(f"({RENAME})('A new title')")
    page.to_front()
    page.see("A new title", ".talk-link a")
    page.click("#chat .send")
    idle(page)
    tab.wait("document.querySelector('article.assistant .figures').textContent.includes('stopped')")
    page.reload()
    page.see("A new title", ".talk-link a")
    page.see("stopped", "article.assistant .figures")


def test_a_tab_forgets_what_another_deletes(page, tab, site):
    page.open(f"{site('writer').url}/")
    send(page, "Tell me about rivers")
    tab.to_front()
    tab.open(page.js("location.href"))
    tab.see("in Brazil")
    page.to_front()
    page.click(".talk-link button", "Delete")
    tab.to_front()
    tab.see("writer", ".empty h2")
    assert tab.js("document.querySelectorAll('.talk-link').length") == 0
    page.to_front()
    page.click(".toast button", "Undo")
    tab.see("Tell me about rivers", ".talk-link a")


def test_a_conversation_is_exported(page, site):
    page.open(f"{site('writer').url}/")
    send(page, "Tell me about rivers")
    page.js("""(() => {
      window.saved = [];
      URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return "#"; };
      HTMLAnchorElement.prototype.click = () => {};  // what would be downloaded is in `saved`
    })()""")
    for way in ("Save as Markdown", "Save as JSON"):
        page.click("#share")
        page.click("dialog .pick", way)
    page.wait("saved.length === 2")
    markdown, exported = page.js("saved")
    assert markdown == f"# Tell me about rivers\n\n## You\n\nTell me about rivers\n\n## writer\n\n{MARKDOWN}\n"
    assert [node["role"] for node in json.loads(exported)["nodes"].values()] == ["user", "assistant"]


def test_answers_and_questions_have_versions(page, site):
    """Asking again and editing a question both create a branch of the conversation. Each branch keeps its own later messages."""
    server = site("seeded")
    page.open(f"{server.url}/")
    send(page, "first question")
    page.click("article.assistant button", "Ask again")
    page.see("2/2", "article.assistant .branches")
    idle(page)
    send(page, "a follow-up")
    page.click("article.user button", "Edit")
    page.fill("article.user textarea", "another question")
    page.press("Enter")
    page.see("2/2", "article.user .branches")
    idle(page)
    assert page.js("document.querySelectorAll('article').length") == 2
    page.click("article.user .branches button", "Previous version")
    page.wait("document.querySelectorAll('article').length === 4")
    page.see("a follow-up")
    prompts = [bytes(token for token in submit.prompt_ids if token < 256).decode() for submit in server.workers["seeded"].submits]
    assert prompts[-1] == "<|user|>another question\n<|assistant|>" and prompts[2].startswith(
        "<|user|>first question\n<|assistant|>My seed"
    )


def test_a_question_that_is_edited_while_an_answer_streams_can_be_sent_later(page, site):
    """The conversation stays as it is, and the edited text stays in its field."""
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.click("article.user button", "Edit")
    page.fill("article.user textarea", "another question")
    page.press("Enter")
    page.see("An answer is still being written", ".toast")
    assert page.js("document.querySelector('article.user textarea').value") == "another question"
    page.click("#chat .send")
    idle(page)
    page.click("article.user form button", "Send")
    page.see("2/2", "article.user .branches")
    page.see("another question", "article.user .said")
    page.press("Escape")
    idle(page)
    assert page.js("document.querySelectorAll('article').length") == 2


def test_the_key_up_leads_back_to_a_question_that_is_being_edited(page, site):
    page.open(f"{site('writer').url}/")
    send(page, "Tell me about rivers")
    page.click("article.user button", "Edit")
    page.click("#chat .composer textarea")
    page.press("ArrowUp")
    assert page.js("document.activeElement.getAttribute('aria-label')") == "Edited message"


def test_keys_that_end_a_composition_do_nothing_else(page, site):
    """With an input method, Enter and Escape end a composition, such as that of a Japanese word."""
    compose = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'KEY', isComposing: true, bubbles: true}))"
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.js(compose.replace("KEY", "Escape"))
    page.click(".talk-link button", "Rename")
    for key in ("Enter", "Escape"):
        page.js(compose.replace("KEY", key))
        assert page.js("document.activeElement.getAttribute('aria-label')") == "Title"
    page.press("Enter")
    assert page.js("document.querySelector('#chat .send').title") == "Stop", "Escape has not stopped the answer"
    page.click("#chat .send")
    idle(page)
    page.click("article.user button", "Edit")
    page.js(compose.replace("KEY", "Escape"))
    assert page.js("document.activeElement.getAttribute('aria-label')") == "Edited message"


def test_an_answer_that_ends_leaves_the_focus_to_who_writes_elsewhere(page, site):
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.click("#chat [data-action=options]")
    page.click("#options [name=system]")
    page.js("window.matchMedia = () => ({matches: true})")  # a mouse is there
    page.js("document.querySelector('#chat .send').click()")  # stops the answer; a click by script moves no focus
    idle(page)
    assert page.js("document.activeElement.name") == "system"


def test_escape_stops_an_answer(page, site):
    """The Escape key stops the answer: the server stops generating, and the partial answer stays on the page."""
    server = site("slow")
    page.open(f"{server.url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.press("Escape")
    idle(page)
    assert "stopped" in page.text("article.assistant .figures") and "word word" in page.text("article.assistant .prose")
    until = time.monotonic() + 60
    while not server.workers["slow"].aborted:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_answer_goes_on_while_another_conversation_is_shown(page, site):
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.press("Control+Shift+o")
    page.see("slow", ".empty h2")
    page.wait("document.querySelector('#chat .send').title === 'Send'")
    page.click(".talk-link a", "Go on and on")
    page.wait("document.querySelector('#chat .send').title === 'Stop'")
    page.press("Escape")
    idle(page)


def test_an_answer_that_its_page_left_behind_is_kept_as_far_as_it_came(page, site):
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.wait("""new Promise((done, fail) => {
      const opened = indexedDB.open("relaxserve");
      opened.onerror = fail;
      opened.onsuccess = () => {
        const read = opened.result.transaction("conversations").objectStore("conversations").getAll();
        read.onsuccess = () => done(JSON.stringify(read.result).includes("word word"));
      };
    })""")
    page.reload()
    page.see("interrupted", "article.assistant .figures")
    assert "word word" in page.text("article.assistant .prose")


def test_a_title_is_not_lost_when_an_answer_ends_meanwhile(page, site):
    page.open(f"{site('slow').url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.click(".talk-link button", "Rename")
    page.call("Input.insertText", text="A new")
    page.js("document.querySelector('#chat .send').click()")  # stops the answer; a click by script moves no focus
    idle(page)
    page.js("document.querySelector('#conversations input').focus()")
    page.call("Input.insertText", text=" title")
    page.press("Enter")
    page.see("title", ".talk-link a")


def test_a_tool_is_answered_by_hand(page, site):
    """The page shows a tool call with its arguments. The user types the result of the tool, and the model continues with this result."""
    server = site("caller")
    page.open(f"{server.url}/")
    page.click("#chat [data-action=options]")
    page.fill("#options [name=tools]", TOOLS)
    send(page, "What is the weather in Oslo?")
    assert "weather" in page.text(".call header") and '"city": "Oslo"' in page.text(".call pre")
    page.fill(".answers textarea", '{"celsius": -4}')
    page.click(".answers button", "Send result")
    page.see("It is cold in Oslo.")
    idle(page)
    assert '{"celsius": -4}' in page.text("article.tool .said")
    assert page.js("document.querySelectorAll('.answers').length") == 0


def test_what_is_entered_for_a_tool_stays_when_another_model_is_chosen(page, site):
    page.open(f"{site('caller', 'writer').url}/")
    page.click("#chat [data-action=options]")
    page.fill("#options [name=tools]", TOOLS)
    send(page, "What is the weather in Oslo?")
    page.fill(".answers textarea", '{"celsius": -4}')
    page.choose("#model", "writer")
    page.wait("document.querySelector('#chat .send').title === 'Send'")
    assert page.js("document.querySelector('.answers textarea').value") == '{"celsius": -4}'


def test_calls_of_mcp_servers_are_approved(page, site):
    """The page shows a call before it is made. The server makes it once the user approves, and the model continues with the result."""
    behaviour = Behaviour(tools=[tool("weather", city={"type": "string"})])
    with serving(behaviour) as url:
        page.open(f"{site('caller', mcp_servers=(f'home={url}',)).url}/")
        page.click("#chat [data-action=options]")
        page.fill("#options [name=mcp]", "home")
        send(page, "What is the weather in Oslo?")
        assert page.text(".call header") == "wants to call\nhome: weather" and '"city": "Oslo"' in page.text(".call pre")
        assert page.text(".answers strong") == "Shall weather of home be called?"
        assert not [seen for seen in behaviour.seen if seen["method"] == "tools/call"]
        page.click(".answers button", "Approve")
        page.see("It is cold in Oslo.")
        idle(page)
        assert page.text("article:last-of-type .call [aria-label=Result]") == "cold in Oslo"
        assert page.js("document.querySelectorAll('.answers').length") == 0
        num_seen = len(behaviour.seen)
        send(page, "And now?")  # the tools are not listed again
        assert len(behaviour.seen) == num_seen and page.text("article:last-of-type .prose") == "It is cold in Oslo."


def test_a_refused_call_is_not_made(page, site):
    behaviour = Behaviour(tools=[tool("weather", city={"type": "string"})])
    with serving(behaviour) as url:
        server = site("caller", mcp_servers=(f"home={url}",))
        page.open(f"{server.url}/")
        page.click("#chat [data-action=options]")
        page.fill("#options [name=mcp]", "home")
        send(page, "What is the weather in Oslo?")
        page.click(".answers button", "Refuse")
        page.see("It is cold in Oslo.")
        idle(page)
        assert not [seen for seen in behaviour.seen if seen["method"] == "tools/call"]
        assert b"did not approve this call" in bytes(token for token in server.workers["caller"].submits[-1].prompt_ids if token < 256)
        page.excuse("status of 400")
        page.fill("#options [name=mcp]", "other")
        send(page, "And now?")
        page.see("names no MCP server that this server may call; allowed are, by server_label: home", ".fault-box")


def test_options_reach_the_model(page, site):
    """Sampling parameters, the system prompt and a schema are sent with the request, survive a reload of the page, and can be saved as a
    preset."""
    server = site("seeded")
    page.open(f"{server.url}/")
    page.click("#chat [data-action=options]")
    page.fill("#options [name=system]", "Be brief.")
    for name, value in {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "7",
        "presence_penalty": "0.25",
        "seed": "77",
        "max_tokens": "50",
    }.items():
        page.fill(f"#options [name={name}]", value)
    send(page, "hello")
    page.see("My seed is 77.")
    submit = server.workers["seeded"].submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.presence_penalty) == (0.5, 0.9, 7, 0.25)
    assert bytes(token for token in submit.prompt_ids if token < 256).startswith(b"<|system|>Be brief.\n<|user|>hello")
    page.click("#options button", "Save as preset")
    page.fill("dialog input[aria-label='Name of the preset']", "Mine")
    page.click("dialog button", "Save")
    page.reload()
    page.click("#new-chat")
    page.click("#chat [data-action=options]")
    page.choose("#options select", "Precise")
    assert page.js("['temperature', 'seed'].map(name => document.querySelector(`#options [name=${name}]`).value)") == ["0", ""]
    page.choose("#options select", "own Mine")
    assert page.js("document.querySelector('#options [name=top_k]').value") == "7"


def test_a_preset_may_have_the_name_of_one_that_is_always_there(page, site):
    page.open(f"{site('seeded').url}/")
    page.click("#chat [data-action=options]")
    page.fill("#options [name=temperature]", "0.7")
    page.click("#options button", "Save as preset")
    page.fill("dialog input[aria-label='Name of the preset']", "Precise")
    page.click("dialog button", "Save")
    for number, temperature in ((2, "0"), (4, "0.7")):
        page.js(f"document.querySelector('#options select').selectedIndex = {number}")
        page.js("document.querySelector('#options select').dispatchEvent(new Event('change'))")
        assert page.js("document.querySelector('#options [name=temperature]').value") == temperature
    page.click("#options button", "Delete preset")
    labels = "[...document.querySelectorAll('#options select option')].map(option => option.text)"
    assert page.js(labels) == ["Presets", "Model's own", "Precise", "Creative"]


def test_options_that_are_wrong_are_named(page, site):
    page.open(f"{site('writer').url}/")
    page.click("#chat [data-action=options]")
    page.fill("#options [name=schema]", "{not json")
    page.see("schema is not JSON", "#options .fault")
    send(page, "hello")
    page.see("schema is not JSON", "article .fault-box")


def test_the_oldest_messages_are_left_out_when_the_context_is_full(page, site):
    """If the conversation exceeds the context, the request omits the oldest messages and a notice says so. A meter shows how much of the
    context is used."""
    server = site("small")
    page.open(f"{server.url}/")
    for number in range(3):
        send(page, f"question {number} " + "x" * 80)
    page.see("of 400 tokens", ".context")
    assert "were left out" in page.text("article:last-child .notice") or "was left out" in page.text("article:last-child .notice")
    prompt = bytes(token for token in server.workers["small"].submits[-1].prompt_ids if token < 256).decode()
    assert "question 2" in prompt and "question 0" not in prompt and prompt.startswith("<|user|>question 1")


def test_a_key_is_asked_for_and_kept_in_the_tab(page, site, other_page):
    server = site("writer", api_keys=["a-key-of-a-client"])
    page.excuse("status of 401")
    page.open(f"{server.url}/")
    page.click("button", "Enter key")
    page.fill("#key input", "a-key-of-a-client")
    page.press("Enter")
    page.see("writer", ".empty h2")
    send(page, "hello")
    page.see("in Brazil")
    page.reload()
    page.see("in Brazil")
    other_page.open(f"{server.url}/")
    other_page.see("A key is needed")


def test_an_answer_to_an_older_request_for_the_models_changes_nothing(page, site):
    """A request without the key may be answered after one with it."""
    server = site("writer", api_keys=["a-key-of-a-client"])
    page.excuse("status of 401")
    page.open(f"{server.url}/")
    page.see("A key is needed")
    page.js("""(() => {
      const ask = window.fetch;
      window.fetch = async (path, options) => {
        const answer = await ask(path, options);
        if (path.endsWith("/v1/models") && !options.headers.authorization) await new Promise(done => { window.release = done; });
        return answer;
      };
    })()""")
    page.click("button", "Try again")
    page.wait("window.release !== undefined")
    page.click("button", "Enter key")
    page.fill("#key input", "a-key-of-a-client")
    page.press("Enter")
    page.see("writer", ".empty h2")
    page.js("release(); new Promise(done => setTimeout(done, 100))")
    assert page.text(".empty h2") == "writer"


FORBIDDEN = """for (const name of ["sessionStorage", "localStorage", "indexedDB"]) {
  Object.defineProperty(window, name, {get() { throw new DOMException("denied", "SecurityError"); }});
}"""


def test_a_browser_that_forbids_storage_chats_with_a_key(other_page, site):
    other_page.call("Page.addScriptToEvaluateOnNewDocument", source=FORBIDDEN)
    server = site("writer", api_keys=["a-key-of-a-client"])
    other_page.excuse("status of 401")
    other_page.open(f"{server.url}/")
    other_page.see("This browser stores nothing", ".toast")
    other_page.click(".toast button", "Dismiss")
    other_page.click("button", "Enter key")
    other_page.fill("#key input", "a-key-of-a-client")
    other_page.press("Enter")
    other_page.see("writer", ".empty h2")
    send(other_page, "hello")
    other_page.see("in Brazil")
    other_page.expect_no_faults()


def test_a_conversation_that_the_browser_does_not_store_is_told(page, site):
    """If there is no room, a browser may accept the request, and refuse the transaction."""
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.js("IDBTransaction.prototype.commit = function () { this.abort(); }")
    ask(page, "hello")
    page.see("The conversation could not be saved", ".toast")
    idle(page)


def test_a_conversation_that_cannot_be_deleted_stays(page, site):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    ask(page, "hello")
    idle(page)
    page.js("IDBTransaction.prototype.commit = function () { this.abort(); }")
    page.click(".talk-link button", "Delete")
    page.see("The conversation could not be deleted", ".toast")
    assert page.js("[...document.querySelectorAll('.toast')].every(one => !one.textContent.includes('is deleted'))")
    page.see("hello", "#conversations")


def test_a_count_that_arrives_late_is_not_shown(page, site):
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.js("""(() => {
      const ask = window.fetch;
      let count = 0;
      window.fetch = async (path, ...rest) => {
        const answer = await ask(path, ...rest);
        if (path.endsWith("/tokenize") && ++count === 1) await new Promise(done => { window.release = done; });
        return answer;
      };
    })()""")
    page.fill("#chat textarea", "a long text " * 20)
    page.wait("window.release !== undefined")
    page.fill("#chat textarea", "short")
    page.see("tokens", ".context")
    shown = page.text(".context")
    page.js("release(); new Promise(done => setTimeout(done, 100))")
    assert page.text(".context") == shown


def test_an_address_of_no_page_leads_to_the_chat(page, site):
    url = site("writer").url
    page.open(f"{url}/#/models")
    page.js("location.hash = '#/constructor'")
    page.wait("location.hash === '#/chat'")
    page.see("writer", ".empty h2")
    page.js("history.back()")
    page.wait("location.hash === '#/models'")
    page.open(f"{url}/?#/constructor")
    page.wait("location.hash === '#/chat'")


def test_errors_say_what_happened_and_can_be_tried_again(page, site):
    server = site("writer")
    server.scripts["writer"].fail_after = 3
    page.open(f"{server.url}/")
    send(page, "hello")
    page.see("Try again", "article .fault-box")
    server.scripts["writer"].fail_after = None
    page.click("article .fault-box button", "Try again")
    page.see("in Brazil")


@pytest.mark.parametrize("ending", ["controller.close()", "controller.error(new TypeError('network error'))"])
def test_a_lost_connection_is_told(page, site, ending):
    """If the connection is lost during an answer, the partial answer stays on the page and is marked as incomplete."""
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.js(f"""(() => {{
      const ask = window.fetch, event = 'data: {{"choices": [{{"index": 0, "delta": {{"content": "half an ans"}}}}]}}\\n\\n';
      const start = controller => {{ controller.enqueue(new TextEncoder().encode(event)); setTimeout(() => {{ {ending}; }}, 50); }};
      const answer = async () => new Response(new ReadableStream({{start}}));
      window.fetch = (path, ...rest) => path.includes("completions") ? answer() : ask(path, ...rest);
    }})()""")
    send(page, "hello")
    page.see("The connection was lost", "article .fault-box")
    assert page.text("article.assistant .prose") == "half an ans"


def test_a_conversation_that_is_deleted_is_stopped(page, site):
    server = site("slow")
    page.open(f"{server.url}/")
    ask(page, "Go on and on")
    page.see("word word")
    page.click(".talk-link button", "Delete")
    page.see("slow", ".empty h2")
    until = time.monotonic() + 60
    while not server.workers["slow"].aborted:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_models_are_compared_with_one_seed(page, site):
    """The comparison page asks several models the same question with the same seed. Each answer belongs to a conversation of its own, which
    the user can continue in the chat."""
    server = site("seeded", "writer")
    page.open(f"{server.url}/#/compare")
    ask(page, "Who are you?", "#compare")
    page.see("My seed is")
    page.see("drawn", "#compare")
    page.wait("document.querySelector('#compare .send').title === 'Send'")
    seeds = {server.workers[name].submits[-1].params.seed for name in ("seeded", "writer")}
    assert len(seeds) == 1 and f"seed {seeds.pop()}" in page.text("#compare .below")
    ask(page, "And who else?", "#compare")
    page.wait("document.querySelectorAll('#compare article').length === 8 && document.querySelector('#compare .send').title === 'Send'")
    page.click("#compare .column button", "Continue in the chat")
    page.wait("document.querySelectorAll('#chat article').length === 4")


def test_the_comparison_begins_once_the_key_is_there_and_offers_models_that_are_loaded_later(page, site):
    server = site("seeded", "writer", api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"])
    page.excuse("status of 401")
    page.open(f"{server.url}/#/compare")
    page.see("No model is loaded", "#compare")
    page.click("#open-key")
    page.fill("#key input", "a-key-of-a-client")
    page.press("Enter")
    page.wait("document.querySelectorAll('#compare .column').length === 2")
    admin = server.http(headers={"authorization": "Bearer a-key-of-an-admin"})
    admin.post("/admin/models", json={"source": "other", "wait": True}).raise_for_status()
    page.click("#open-key")
    page.press("Enter")  # asks for the models again, as the page does from time to time
    page.wait("[...document.querySelectorAll('#compare select option')].some(option => option.value === 'other')")


def test_a_column_keeps_a_model_that_is_gone(page, site):
    """Its answer says what is wrong, as the server does."""
    server = site("seeded", "writer")
    page.open(f"{server.url}/#/compare")
    page.wait("document.querySelectorAll('#compare select').length === 2")
    page.open(f"{server.url}/#/models")
    page.click("#models article[aria-label=writer] button", "Unload")
    page.click("dialog button", "Unload")
    page.see("writer is unloaded.", ".toast")
    page.wait("!document.querySelector('#models article[aria-label=writer]')")
    page.open(f"{server.url}/#/compare")
    page.excuse("status of 404")
    ask(page, "Who are you?", "#compare")
    page.see("My seed is", "#compare .column:first-child")
    page.see("'writer'", "#compare .column:last-child .messages")
    assert page.js("[...document.querySelectorAll('#compare select')].map(select => select.value)") == ["seeded", "writer"]


def test_the_keyboard_is_enough(page, site):
    """The chat can be used by keyboard alone, from the first Tab to an answer. The menu and the search have shortcuts."""
    page.open(f"{site('writer').url}/")
    page.see("writer", ".empty h2")
    page.js("document.activeElement.blur()")
    page.press("Tab")
    assert page.js("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(30):
        page.press("Tab")
        seen.add(page.js("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"))
        if page.js("document.activeElement.localName") == "textarea":
            break
    assert {"Chat", "Models", "New chat", "Change theme", "Model", "Options"} <= seen
    page.call("Input.insertText", text="hello")
    press_send(page)
    page.see("in Brazil")
    page.press("Control+k")
    assert page.js("document.activeElement.id") == "search"
    page.click("#chat [data-action=options]")
    assert page.js("document.activeElement.getAttribute('aria-label')") == "Preset"
    page.press("Escape")
    assert page.js("document.activeElement.dataset.action") == "options" and page.js("document.querySelector('#options').hidden")


def test_a_theme_is_chosen_and_kept(page, site):
    page.open(f"{site('writer').url}/")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.js(ground)
    page.click("button", "Change theme")
    page.click("button", "Change theme")
    dark = page.js(ground)
    assert light != dark
    page.reload()
    assert page.js(ground) == dark
