"""Two pages of the console in a browser: the models page (list, load with progress, unload, aliases) and the live page, which draws
metrics."""

from __future__ import annotations

import msgspec
import pytest

from server import history
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.metrics import IDLE
from tests.doubles.library import Shelf
from tests.doubles.plans import EndlessPlan

pytestmark = pytest.mark.xdist_group("console")


def test_models_and_their_memory_are_shown(page, site):
    page.open(f"{site('writer', 'seeded').url}/#/models")
    page.see("at most 6.1 MiB of 64.0 MiB")
    page.see("KV cache up to 1.0 MiB", "#models article[aria-label=writer] dd")
    page.see("Memory without requests", "#models article[aria-label=writer] dt")
    assert page.js("[...document.querySelectorAll('#models article h2')].map(title => title.textContent)") == ["writer", "seeded"]
    widths = page.js("[...document.querySelectorAll('.memory-bar i')].map(piece => piece.getBoundingClientRect().width)")
    assert widths[1] / widths[0] == pytest.approx((3 + 1 + 1 / 16) / (1 + 1 + 1 / 16), rel=0.05)


def test_the_page_says_what_models_read(page, site):
    page.open(f"{site('writer', 'looker', 'listener').url}/#/models")
    page.see("text, images", "#models article[aria-label=looker] dd")
    page.see("text, audio", "#models article[aria-label=listener] dd")
    names = "[...document.querySelectorAll('#models article[aria-label=writer] dt')].map(name => name.textContent)"
    assert "Reads" not in page.js(names)


def test_a_model_is_planned_loaded_and_unloaded(page, site):
    """The dry run shows how much memory a model needs, a load shows its stages, and afterwards the chat offers the model."""
    server = site("writer")
    page.open(f"{server.url}/#/models")
    page.fill("#models .load input", "other")
    page.click("#models button", "What would it take?")
    page.see("other fits.", ".verdict")
    assert "6.1 MiB" in page.text(".verdict") and "4.0 MiB" in page.text(".verdict")
    page.click("#models .load button", "Load")
    page.see("compile", ".stages li")
    page.see("other is loaded.", ".toast")
    assert server.registry.find("other").spec.quantize == "auto", "weights stay as in the checkpoint unless another format is chosen"
    page.wait("[...document.querySelectorAll('#model option')].some(option => option.value === 'other')")
    page.click("#models article[aria-label=other] button", "Load log")
    page.see("warm-up", "dialog .stages li")
    page.click("dialog button", "Close")
    page.click("#models article[aria-label=other] button", "Unload")
    page.click("dialog button", "Unload")
    page.see("other is unloaded.", ".toast")
    page.wait("!document.querySelector('#models article[aria-label=other]')")
    assert [model["id"] for model in server.http().get("/v1/models").json()["data"]] == ["writer"]


def test_what_a_load_takes_is_told_as_one_types(page, site, tmp_path):
    """Once the source is one that the server offers, the formats have their bytes and quality, and the plan follows without a click."""
    page.open(f"{site('writer', is_cached=lambda _spec: True).url}/#/models")
    page.see(f"1 of 1 models below {(tmp_path / 'models').resolve()} can be loaded")
    assert page.js("document.querySelector('#models .load select').value") == "auto"
    page.fill("#models .load input", "other")
    page.see("other fits.", ".verdict")
    labels = page.js("[...document.querySelectorAll('#models .load select option')].map(option => option.text)")
    assert labels[0] == "auto: 3.0 MiB, exact" and "4bit: 1.0 MiB, error of weights 8.3 %" in labels and "bf16" in labels
    page.fill("#models .load input", "others")
    page.wait("!document.querySelector('.verdict')")


def test_nothing_is_compiled_before_it_is_asked_for(page, site):
    """A model that is not in the cache is compared as one types. Its plan, which compiles it, waits for a click, and ends when the page is
    left."""
    preflight = EndlessPlan()
    page.open(f"{site('writer', preflight=preflight).url}/#/models")
    page.see("1 of 1 models")
    page.fill("#models .load input", "other")
    page.see("Its code is not in the cache", "#models .load")
    assert page.js("document.querySelector('#models .load select option').text") == "auto: 3.0 MiB, exact"
    assert not preflight.begun.is_set()
    page.click("#models button", "What would it take?")
    assert preflight.begun.wait(60) and not preflight.ended.is_set()
    page.js("location.hash = '#/live'")
    assert preflight.ended.wait(60)


def test_the_form_is_above_the_models_and_they_are_searched(page, site):
    page.open(f"{site('writer', 'seeded').url}/#/models")
    page.see("writer", "#models article h2")
    tops = "['.load', 'article'].map(name => document.querySelector(`#models ${name}`).getBoundingClientRect().top)"
    form, card = page.js(tops)
    assert form < card
    page.fill("#models [aria-label='Search models']", "SEED")
    visible = "[...document.querySelectorAll('#models article')].filter(card => card.checkVisibility()).map(card => card.ariaLabel)"
    page.wait(f"{visible}.length === 1")
    assert page.js(visible) == ["seeded"]


def test_a_model_is_downloaded_stopped_and_continued(page, site):
    shelf = Shelf()
    shelf.pause_s = 600.0
    page.open(f"{site('writer', library=shelf, allow_hub=True).url}/#/models")
    page.click("#models .card > summary", "Download a model")
    page.click("#models .catalogue button", "Download known")
    page.see("Waiting for the size", "article[aria-label='Download of known']")
    shelf.pause_s = 0.0
    page.click("article[aria-label='Download of known'] button", "Stop")
    page.see("The download of known is stopped.", ".toast")
    page.click(".toast button", "Continue")
    page.see("known is downloaded.", ".toast")
    page.see("here", "#models .catalogue .pill")
    page.click("#models .catalogue button", "Load known")
    assert page.js("document.querySelector('#models .load input').value") == "known"


def test_a_failed_download_says_why_and_is_continued(page, site):
    shelf = Shelf()
    shelf.error = LoadError(ErrorCode.FETCH_FAILED, "the hub does not answer")
    page.open(f"{site('writer', library=shelf, allow_hub=True).url}/#/models")
    page.click("#models .card > summary", "Download a model")
    page.fill("#models input[aria-label='Name on the hub']", "org/name")
    page.press("Enter")
    page.see("the hub does not answer", ".fault-text")
    shelf.error = None
    page.click("article[aria-label='Failed download of org/name'] button", "Continue")
    page.see("org/name is downloaded.", ".toast")


def test_a_server_that_downloads_nothing_names_the_switch(page, site):
    page.open(f"{site('writer', library=Shelf()).url}/#/models")
    page.see("This server downloads no models: start it with --allow-hub")
    page.click("#models .card > summary", "Download a model")
    page.see("relaxserve pull NAME", "#models .notice")
    assert page.js("[...document.querySelectorAll('#models .catalogue button')].length") == 0
    assert page.js("document.querySelector('#models .load input').placeholder") == "folder or file"


def test_a_load_is_cancelled(page, site):
    server = site("writer")
    server.scripts["other"].load_s = 600.0
    page.open(f"{server.url}/#/models")
    page.fill("#models .load input", "other")
    page.click("#models .load button", "Load")
    page.click("#models article[aria-label='Load of other'] button", "Cancel")
    page.wait("!document.querySelector(\"#models article[aria-label='Load of other']\")")
    assert [model["id"] for model in server.http().get("/admin/models").json()["data"]] == ["writer"]


def test_a_failed_load_stays_visible(page, site):
    server = site("writer")
    server.scripts["other"].load_error = LoadError(ErrorCode.LOAD_FAILED, "its layers are upside down")
    page.open(f"{server.url}/#/models")
    page.fill("#models .load input", "other")
    page.click("#models .load button", "Load")
    page.see("its layers are upside down", ".fault-text")
    page.click("#models button", "Load again")
    assert page.js("document.querySelector('#models .load input').value") == "other"


def test_aliases_come_and_go(page, site):
    server = site("writer")
    page.open(f"{server.url}/#/models")
    page.fill("#models .aliases input", "poet")
    page.press("Enter")
    page.see("poet", ".pill")
    assert server.http().get("/admin/aliases").json() == {"poet": "writer"}
    page.click("#models button", "Remove alias poet")
    page.wait("!document.querySelector('.pill.with-button')")
    assert server.http().get("/admin/aliases").json() == {}


def test_a_source_that_is_absent_is_told(page, site):
    page.excuse("status of 4")
    page.open(f"{site('writer').url}/#/models")
    page.fill("#models .load input", "no-such-model")
    page.click("#models .load button", "Load")
    page.see("no-such-model", "#models .load .fault-box")


def test_the_administration_asks_for_its_key(page, site):
    """The models page asks for an admin key if the user has entered none, or only a client's key."""
    server = site("writer", api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"])
    page.excuse("status of 401", "status of 403")
    page.open(f"{server.url}/#/models")
    page.click("#models .fault-box button", "Enter key")
    page.fill("#key input", "a-key-of-a-client")
    page.press("Enter")
    page.see("needs an admin key", "#models .fault-box")
    page.click("#models .fault-box button", "Enter key")
    page.fill("#key input", "a-key-of-an-admin")
    page.press("Enter")
    page.see("writer", "#models article h2")


def test_the_live_page_draws_what_metrics_say(page, site):
    """The live page shows tokens per second and running requests, for all models together or for a selected one."""
    server = site("writer", "slow")
    page.open(f"{server.url}/#/live")
    page.see("Tokens per second")
    generated = """document.querySelector('.chart[aria-label="Tokens per second"] strong').textContent"""
    page.wait(f"{generated} === '0'")
    server.chat(model="writer")
    page.wait(f"parseFloat({generated}) > 0")
    assert page.js("document.querySelector('.chart .line').getAttribute('d')").startswith("M")
    page.choose("#live select[aria-label=Model]", "slow")
    page.wait(f"{generated} === '0'")


def test_the_list_of_models_of_the_live_page_stays_while_the_models_are_the_same(page, site):
    """A browser closes a list that is open if its entries are replaced, and a screen reader reads them again."""
    page.open(f"{site('writer', 'slow').url}/#/live")
    page.wait(
        "!!(window.entry = [...document.querySelectorAll('#live select[aria-label=Model] option')].find(one => one.value === 'slow'))"
    )
    scrapes = "performance.getEntriesByType('resource').filter(one => one.name.endsWith('/metrics')).length"
    before = page.js(scrapes)
    page.wait(f"{scrapes} > {before} + 1")
    assert page.js("entry.isConnected")


def test_the_live_page_begins_with_the_history_of_the_server(page, site, monkeypatch):
    """The live page draws the last hour at once."""
    monkeypatch.setattr(history, "INTERVAL_S", 0.02)
    server = site("writer")
    http = server.http()
    counted = []
    while len(set(counted)) < 2:  # a sample before and one after the answer
        server.chat(model="writer")
        report = http.get("/admin/history").json()
        (index,) = (str(at) for at, one in enumerate(report["series"]) if one["name"] == "vllm:generation_tokens_total")
        counted = [sample["values"][index] for sample in report["samples"] if index in sample["values"]]
    page.open(f"{server.url}/#/live")
    page.see("Prompt tokens to compute")
    page.wait("document.querySelector('.chart .line').getAttribute('d').length > 20")
    page.choose("#live select[aria-label=Time]", "3600")
    page.reload()
    page.wait("document.querySelector('#live select[aria-label=Time]').value === '3600'")


def test_the_live_page_works_without_the_administration(page, site):
    server = site("writer", api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"])
    page.excuse("status of 401", "status of 403")
    page.open(f"{server.url}/#/live")
    page.click("#live .fault-box button", "Enter key")
    page.fill("#key input", "a-key-of-a-client")
    page.press("Enter")
    page.see("Tokens per second")
    page.wait("document.querySelector('.chart .legend strong').textContent !== '–'")


def test_a_long_prompt_is_seen_on_its_way(page, site):
    server = site("writer")
    page.open(f"{server.url}/#/live")
    left = """document.querySelector('.chart[aria-label="Prompt tokens to compute"] strong').textContent"""
    page.wait(f"{left} === '0'")
    server.workers["writer"].stats = msgspec.structs.replace(IDLE, num_running=1, num_prompt_tokens_left=12_000)
    page.wait(f"{left} === '12,000'")
