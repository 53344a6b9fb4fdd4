"""A model that a real server publishes, used in headless Chromium. The page is cross-origin isolated, asks for the API key, and resumes
downloads."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.export.web import web_model
from deploy.publication import Wanted, opened
from deploy.serve import export
from deploy.settings import model_spec
from runtime.launch import command
from server.defaults import Defaults
from server.interfaces import LoadError
from server.models.state import ModelSpec
from tests.conftest import greeting
from tests.deploy.export.test_web import ANSWER, QUESTION
from tests.lab.chromium import Chromium, Page
from tests.server.conftest import serve

__all__ = ["serve"]  # a fixture of the server's tests
pytestmark = pytest.mark.xdist_group("web")
KEY = "a-key-of-a-client"


@pytest.fixture
def published(serve: Callable[..., Any], site: Path, page: Page) -> str:
    """Return the address of a server that requires API keys and publishes the exported demo."""
    assert page  # the fixture `page` comes first, so that the page closes before the server stops

    async def copy(_spec: ModelSpec, folder: Path) -> None:
        shutil.copytree(site, folder, dirs_exist_ok=True)

    return serve(export=copy, publish=("null",), api_keys=[KEY], admin_keys=["a-key-of-an-admin"]).url


def test_a_published_model_asks_for_the_key_and_chats(page: Page, published: str) -> None:
    page.excuse("401")
    page.open(f"{published}/web/null/")
    page.see("the API key is missing", "#status")
    page.fill("#secret", KEY)
    page.click("#key button")
    page.see("Ready, wasm-relaxed", "#status")
    assert page.js("crossOriginIsolated") is True
    loaded = len(page.requests)
    page.fill("#prompt", QUESTION)
    page.click("#send")
    page.see(ANSWER, ".assistant")
    page.chromium.deliver_events()
    assert page.requests[loaded:] == [], "the page must make no requests after loading"


def test_a_browser_that_forbids_storage_loads_with_a_key(page: Page, chromium: Chromium, published: str) -> None:
    own = chromium.new_page()  # what is added to a page stays
    try:
        own.call("Page.addScriptToEvaluateOnNewDocument", source=FORBIDDEN)
        own.open(f"{published}/web/null/")
        own.see("the API key is missing", "#status")
        own.fill("#secret", KEY)
        own.click("#key button")
        own.see("Ready, wasm-relaxed", "#status")
    finally:
        chromium.close_page(own)


FORBIDDEN = "Object.defineProperty(window, 'sessionStorage', {get() { throw new DOMException('denied', 'SecurityError'); }});"
LOAD_AND_ASK = """(async () => {
  const { RelaxServe } = await import(new URL('relaxserve.mjs', location.href));
  const client = await RelaxServe.load({ threads: THREADS, headers: { authorization: 'Bearer KEY' } });
  const answer = await client.chat.completions.create({ messages: [{ role: 'user', content: 'QUESTION' }], temperature: 0 });
  client.close();
  return `${client.threads}: ${answer.choices[0].message.content}`;
})()"""


@pytest.mark.parametrize("threads", [1, 2])
def test_an_isolated_page_runs_a_model_on_threads(page: Page, published: str, threads: int) -> None:
    page.excuse("401")
    page.open(f"{published}/web/null/")
    page.see("the API key is missing", "#status")
    load = LOAD_AND_ASK.replace("THREADS", str(threads)).replace("KEY", KEY).replace("QUESTION", QUESTION)
    assert page.js(load) == f"{threads}: {ANSWER}"


def test_the_console_leads_to_it(page: Page, published: str) -> None:
    page.excuse("401")
    page.open(published)
    page.js("sessionStorage.setItem('relaxserve.key', 'a-key-of-an-admin')")
    page.open(f"{published}/#/models")
    page.reload()
    page.click("#models article a", "Run in this browser")
    page.see("Ready, wasm-relaxed", "#status")
    assert page.js("location.pathname") == "/web/null/"


def test_the_process_that_exports_tells_why_it_cannot(tmp_path: Path) -> None:
    spec = ModelSpec("lfm2", str(Path(__file__).parents[2] / "golden/models/lfm2"))
    with pytest.raises(LoadError, match="lfm2"):
        asyncio.run(export(spec, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_page_has_the_defaults_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`serve --default` applies to requests of the page, too: it is the model under the same name."""
    own = Defaults(system="Be brief.", temperature=0.25, template="{{ messages[-1].content }}!")
    asked: list[Any] = []

    async def answer(_who: str, _command: tuple[str, ...], wanted: Any) -> dict[str, Any]:
        asked.append(wanted)
        return {}

    monkeypatch.setattr("deploy.serve._answer_of", answer)
    asyncio.run(export(msgspec.structs.replace(model_spec("demo"), max_context=256, defaults=own), tmp_path))
    sent = msgspec.json.decode(msgspec.json.encode(asked[0]), type=Wanted)
    model = web_model(opened(sent), "demo")
    assert (model.defaults.system, model.sampling["temperature"], model.chat_template) == ("Be brief.", 0.25, own.template)
    assert model.max_context == 256


@pytest.mark.slow
def test_serve_publishes_a_model(cache_folder: Path) -> None:
    """`serve --publish` exports the model in a separate process, and serves every file that program.json of the export names."""
    run = [*command("deploy.cli"), "serve", "--publish", "demo", "--port", "0", "--max-context", "256", "demo"]
    with subprocess.Popen(run, env={**os.environ, "RELAXSERVE_CACHE": str(cache_folder)}, stderr=subprocess.PIPE, text=True) as server:
        try:
            with httpx.Client(base_url=greeting(server)[0], timeout=60) as client:
                while (response := client.get("/web/demo/program.json")).status_code == 503:
                    time.sleep(0.5)
                levels = response.raise_for_status().json()["levels"]
                for file in {name for level in levels for name in (level["module"], *(shard["file"] for shard in level["shards"]))}:
                    assert client.get(f"/web/demo/{file}").status_code == 200
                assert client.get("/v1/models/demo").json()["web"] == "/web/demo/"
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert not (cache_folder / "web").exists()
