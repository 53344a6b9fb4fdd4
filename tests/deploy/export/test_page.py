"""chat.html in headless Chromium: it loads, answers, keeps the weights, and asks nobody for anything afterwards."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from deploy.export.web import export_web
from deploy.generate import Prompt, encode
from deploy.model_loading.servable import Servable
from tests.browser.chromium import Page
from tests.deploy.export.test_web import ANSWER, QUESTION, in_node

pytestmark = pytest.mark.xdist_group("web")


class Files(SimpleHTTPRequestHandler):
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        pass

    def log_request(self, *_: object) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


class Stalling(Files):
    """The first download of the weights stops in the middle; a later one gets the part that it asks for."""

    def do_GET(self) -> None:
        if "weights-" not in self.path:
            super().do_GET()
            return
        asked = self.headers.get("range", "")
        self.log_request()
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        content = Path(self.translate_path(self.path)).read_bytes()[int(asked.removeprefix("bytes=").removesuffix("-") or 0) :]
        self.send_response(206 if asked else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content if asked else content[: len(content) // 2])
        if not asked:
            self.rfile.read(1)  # until the page is closed


@pytest.fixture
def served(site: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    with serving(site, getattr(request, "param", Files)) as found:
        yield found


@contextmanager
def serving(folder: Path, files: type[Files] = Files) -> Generator[tuple[str, list[str]]]:
    """The address of a folder, and the paths asked for so far."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(files, directory=str(folder))) as server:
        server.asked = asked = list[str]()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("served", [Stalling], indirect=True)
def test_a_page_closed_in_a_download_goes_on_at_its_next_visit(page: Page, served: tuple[str, list[str]]) -> None:
    address, asked = served
    page.open(f"{address}/chat.html")
    page.wait("document.getElementById('progress').value > 0.2")
    page.reload()
    page.see("Ready, wasm-relaxed", "#status")
    parts = [path for path in asked if path == "" or path.startswith("bytes=")]
    assert parts[0] == "" and len(parts) == 2 and int(parts[1].removeprefix("bytes=").removesuffix("-")) > 1_000_000


LOGITS = """(async () => {
  const { fetched, loadModel } = await import('./loader.mjs');
  const { network } = await loadModel({ ...fetched(location.href), target: TARGET, threads: 1 });
  const rows = [];
  for (let next = PROMPT, count = 0; count < COUNT; count++) {
    network.append(next);
    rows.push(...network.program.view(network.logits, Uint8Array));
    next = [network.draw({ temperature: 0 }).token];
  }
  const digest = await crypto.subtle.digest('SHA-256', new Uint8Array(rows));
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, '0')).join('');
})()"""


def digest_in_chromium(page: Page, folder: Path, target: str, prompt: list[int], count: int) -> str:
    """The SHA-256 of the logits."""
    ask = LOGITS.replace("TARGET", repr(target)).replace("PROMPT", json.dumps(prompt)).replace("COUNT", str(count))
    with serving(folder) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready", "#status")
        return page.js(ask)


def test_chromium_gives_the_bytes_of_node(page: Page, demo: Servable, site: Path) -> None:
    """All logits of a prompt and the tokens behind it."""
    prompt = encode(demo.tokenizer, Prompt(QUESTION, False, 1, 0, 0))
    logits, _ = in_node(site, "wasm-relaxed", prompt)
    assert digest_in_chromium(page, site, "wasm-relaxed", prompt, len(logits)) == hashlib.sha256(logits.tobytes()).hexdigest()


@pytest.mark.slow
def test_engines_without_relaxed_simd_give_the_same_bytes(page: Page, demo: Servable, tmp_path: Path) -> None:
    """Node, Chromium and wasmtime."""
    if find_spec("wasmtime") is None:
        pytest.skip("needs wasmtime: pip install 'relaxserve[reach]'")
    from tests.deploy.export.in_wasmtime import Decoder

    target, prompt = "wasm-simd128", encode(demo.tokenizer, Prompt(QUESTION, False, 1, 0, 0))
    export_web(demo, "demo", tmp_path, levels=[target])
    logits, ids = in_node(tmp_path, target, prompt)
    assert digest_in_chromium(page, tmp_path, target, prompt, len(logits)) == hashlib.sha256(logits.tobytes()).hexdigest()
    decoder = Decoder(tmp_path, target)
    rows = [decoder.append(tokens) for tokens in (prompt, *([token] for token in ids[:-1]))]
    assert np.stack(rows).tobytes() == logits.tobytes()


def test_the_page_chats(page: Page, served: tuple[str, list[str]]) -> None:
    address, asked = served
    page.open(f"{address}/chat.html")
    page.see("Ready, wasm-relaxed", "#status")
    loaded = len(asked)
    page.fill("#prompt", QUESTION)
    page.click("#send")
    page.see(ANSWER, ".assistant")
    page.see("per second", "#status")
    assert asked[loaded:] == [], "after loading, nothing is asked for"
    refused = page.js(
        "import('./relaxserve.mjs').then(({ RelaxServe }) => RelaxServe.load({ threads: 2 })).catch((error) => error.message)"
    )
    assert "a page that is not isolated from other origins has 1" in refused
    page.reload()
    page.see("Ready, wasm-relaxed, one thread", "#status")
    assert sum("weights-" in path for path in asked) == 1, "the second visit takes the weights from the browser's files"
