"""The page chat.html of an export in headless Chromium: it loads, answers and caches the weights. After that it makes no request."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from deploy.export.web import export_web
from deploy.generate import Prompt, encode
from deploy.model_loading.servable import Servable
from server.settings import SettingsError
from tests.deploy.export.test_web import ANSWER, QUESTION, in_node
from tests.lab.browser import DEMO, PATIENCE_S, check_peer, open_tab
from tests.lab.chromium import Chromium, Page
from tests.lab.site import Files, Site, serving

pytestmark = pytest.mark.xdist_group("web")


class Stalling(Files):
    """A server that stops in the middle of the first download of the weights. Later downloads ask for a range of bytes and get it."""

    def do_GET(self) -> None:
        if "weights-" not in self.path:
            super().do_GET()
            return
        asked = self.headers.get("range", "")
        self.log_request()
        assert isinstance(self.server, Site)
        self.server.asked.append(asked)
        content = Path(self.translate_path(self.path)).read_bytes()[int(asked.removeprefix("bytes=").removesuffix("-") or 0) :]
        self.send_response(206 if asked else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content if asked else content[: len(content) // 2])
        if not asked:
            self.rfile.read(1)  # block until the page is closed


@pytest.fixture
def served(site: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    with serving(site, getattr(request, "param", Files)) as found:
        yield found


@pytest.mark.parametrize("served", [Stalling], indirect=True)
def test_a_page_closed_in_a_download_goes_on_at_its_next_visit(page: Page, served: tuple[str, list[str]]) -> None:
    address, asked = served
    page.open(f"{address}/chat.html")
    page.wait("document.getElementById('progress').value > 0.2")
    page.reload()
    page.see("Ready, wasm-relaxed", "#status")
    parts = [path for path in asked if path == "" or path.startswith("bytes=")]
    assert parts[0] == "" and len(parts) == 2 and int(parts[1].removeprefix("bytes=").removesuffix("-")) > 1_000_000


FLIPPED = """(async () => {
  const root = await navigator.storage.getDirectory(), found = [];
  for await (const [, folder] of root.entries()) {
    for await (const [name, handle] of folder.entries()) if (name.startsWith('weights-')) found.push(handle);
  }
  const [shard] = found, bytes = new Uint8Array(await (await shard.getFile()).arrayBuffer());
  const sink = await shard.createWritable({ keepExistingData: true });
  await sink.write({ type: 'write', position: 5000, data: new Uint8Array([bytes[5000] ^ 1]) });
  await sink.close();
  return found.map(({ name }) => name);
})()"""
DAMAGED = """import('./relaxserve.mjs').then(async ({ RelaxServe }) => {
  const damaged = [];
  (await RelaxServe.load({ onDamage: (file) => damaged.push(file) })).close();
  return damaged;
})"""


def test_a_flipped_bit_in_a_cached_shard_is_named_and_fetched_again(page: Page, served: tuple[str, list[str]], site: Path) -> None:
    address, asked = served
    [shard] = site.glob("weights-*.bin")
    page.open(f"{address}/chat.html")
    page.see("Ready, wasm-relaxed", "#status")
    page.excuse("favicon.ico")
    page.open(f"{address}/chat.css")  # this is a page of the same origin that does not load the model
    assert page.js(FLIPPED) == [shard.name]
    assert [page.js(DAMAGED) for _ in range(2)] == [[shard.name], []]
    assert sum("weights-" in path for path in asked) == 2


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
    """Return the SHA-256 of all logits that Chromium computes for a prompt and then for `count` - 1 generated tokens."""
    ask = LOGITS.replace("TARGET", repr(target)).replace("PROMPT", json.dumps(prompt)).replace("COUNT", str(count))
    with serving(folder) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready", "#status")
        return page.js(ask)


def test_chromium_gives_the_bytes_of_node(page: Page, demo: Servable, site: Path) -> None:
    """The logits of a prompt and of the generated tokens have the same bytes in Chromium as in Node."""
    prompt = encode(demo.tokenizer, Prompt(QUESTION, False, 1, 0, 0))
    logits, _ = in_node(site, "wasm-relaxed", prompt)
    assert digest_in_chromium(page, site, "wasm-relaxed", prompt, len(logits)) == hashlib.sha256(logits.tobytes()).hexdigest()


@pytest.mark.slow
def test_engines_without_relaxed_simd_give_the_same_bytes(page: Page, demo: Servable, tmp_path: Path) -> None:
    """Without relaxed SIMD, the logits have the same bytes in Node, Chromium and wasmtime."""
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


def test_the_snippet_of_the_documents_runs(page: Page, served: tuple[str, list[str]]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text()
    snippet = text.partition("```js\n")[2].partition("```")[0]
    script = snippet.replace("import { RelaxServe } from './relaxserve.mjs';", "const { RelaxServe } = await import(URL_OF_IT);")
    assert script != snippet
    address, _ = served
    page.open(f"{address}/chat.html")
    script = script.replace("URL_OF_IT", "new URL('relaxserve.mjs', location.href)")
    assert page.js(f"(async () => {{ {script} return answer.choices[0].message.content; }})()").strip()


def test_the_page_chats(page: Page, served: tuple[str, list[str]]) -> None:
    address, asked = served
    page.open(f"{address}/chat.html")
    page.see("Ready, wasm-relaxed", "#status")
    loaded = len(asked)
    page.fill("#prompt", QUESTION)
    page.click("#send")
    page.see(ANSWER, ".assistant")
    page.see("per second", "#status")
    assert asked[loaded:] == [], "the page must make no requests after loading"
    refused = page.js(
        "import('./relaxserve.mjs').then(({ RelaxServe }) => RelaxServe.load({ threads: 2 })).catch((error) => error.message)"
    )
    assert "expected 1, since this page is not isolated from other origins" in refused
    page.reload()
    page.see("Ready, wasm-relaxed, one thread", "#status")
    assert sum("weights-" in path for path in asked) == 1, "the second visit takes the weights from the browser's files"


def test_a_page_without_vision_names_itself(page: Page, served: tuple[str, list[str]]) -> None:
    address, _ = served
    page.open(f"{address}/chat.html")
    page.see("Ready, wasm-relaxed", "#status")
    page.js("""const given = new DataTransfer();
      given.items.add(new File(['x'], 'a.png', { type: 'image/png' }));
      document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: given, cancelable: true }));""")
    page.see("a.png cannot be used: demo reads no images in the browser", "#status")
    assert page.js("document.getElementById('seeing').hidden")


UNTOUCHED = """(() => {
  const given = (...items) => {
    const data = new DataTransfer();
    for (const item of items) data.items.add(...item);
    return data;
  };
  const text = ['some text', 'text/plain'], file = [new File(['x'], 'a.png', { type: 'image/png' })];
  const isLeft = (event) => document.getElementById('prompt').dispatchEvent(event);   // to the browser
  const paste = (...items) => isLeft(new ClipboardEvent('paste', { clipboardData: given(...items), bubbles: true, cancelable: true }));
  const drag = (kind, ...items) => isLeft(new DragEvent(kind, { dataTransfer: given(...items), bubbles: true, cancelable: true }));
  const left = [paste(text), paste(text, file), drag('dragover', text), drag('drop', text)];
  return [left, [paste(file), drag('dragover', file), drag('drop', file)]];
})()"""


def test_text_that_is_pasted_or_dragged_is_left_to_the_browser(page: Page, served: tuple[str, list[str]]) -> None:
    """Text that is pasted with a picture of it is left to the browser, too."""
    address, _ = served
    page.open(f"{address}/chat.html")
    page.see("Ready, wasm-relaxed", "#status")
    assert page.js(UNTOUCHED) == [[True] * 4, [False] * 3]


def test_the_bench_measures_an_export_in_chromium(chromium: Chromium, site: Path, tmp_path: Path) -> None:
    """The benchmark measures the time to the first token with cached weights: reloading the page does not download the weights again."""
    shutil.copytree(site, tmp_path / DEMO)
    with open_tab(tmp_path) as tab:
        assert tab.first_token_s(DEMO) > 0
        tab.page.reload()
        assert tab.first_token_s(DEMO) > 0
        assert sum("weights-" in path for path in tab.asked) == 1
        tab.open("relaxserve", DEMO)
        assert 0 < tab.decode_s("relaxserve") < PATIENCE_S
        tab.page.expect_no_faults()


@pytest.mark.parametrize(("peer", "package"), [("wllama", "@wllama/wllama"), ("transformers.js", "@huggingface/transformers")])
def test_a_peer_that_is_not_installed_is_named_with_its_remedy(tmp_path: Path, peer: str, package: str) -> None:
    with pytest.raises(SettingsError, match=f"npm install {package}, and name the folder with --node-modules"):
        check_peer(peer, tmp_path)
