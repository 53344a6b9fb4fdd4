"""Two pages of the console in a browser: the models page (list, load with progress, unload, aliases) and the live page, which draws
metrics."""

from __future__ import annotations

import pytest

from server.interfaces import LoadError
from server.messages import ErrorCode

pytestmark = pytest.mark.xdist_group("console")


def test_models_and_their_memory_are_shown(page, site):
    page.open(f"{site('writer', 'seeded').url}/#/models")
    page.see("at most 6.1 MiB of 64.0 MiB")
    page.see("KV cache up to 1.0 MiB", "#models article[aria-label=writer] dd")
    assert page.js("[...document.querySelectorAll('#models article h2')].map(title => title.textContent)") == ["writer", "seeded"]
    widths = page.js("[...document.querySelectorAll('.memory-bar i')].map(piece => piece.getBoundingClientRect().width)")
    assert widths[1] / widths[0] == pytest.approx((3 + 1 + 1 / 16) / (1 + 1 + 1 / 16), rel=0.05)


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
    page.choose("#live select", "slow")
    page.wait(f"{generated} === '0'")
