"""Measure exports in headless Chromium, and peers in the same page with the same weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.weights import WeightSource
from deploy.bench.gguf_file import write_gguf
from deploy.bench.synthetic import RandomWeights, shapes_of
from server.settings import SettingsError
from tests.lab.chromium import Chromium, Page, installed
from tests.lab.onnx_file import write_onnx
from tests.lab.site import serving

PATIENCE_S = 600.0  # long, because a page loads a model of half a gigabyte and one thread prefills
CONTEXT = 256  # maximum length of a sequence in tokens; browser.mjs prefills 128
EXPORT, DEMO, GGUF, ONNX = "model", "demo", "model.gguf", "onnx-model"  # names of files and folders in the site's folder


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine for browsers."""

    package: str  # name on npm
    folders: tuple[str, ...]  # folders of packages whose scripts the page loads
    model: str  # name of the model in the site's folder
    write_model: Callable[[Path, ModelConfig, WeightSource], None]


def _write_gguf(path: Path, config: ModelConfig, weights: WeightSource) -> None:
    write_gguf(path, config, weights, "Q4_0")


PEERS: Mapping[str, Peer] = {
    "wllama": Peer("@wllama/wllama", ("@wllama/wllama/esm",), GGUF, _write_gguf),
    "transformers.js": Peer("@huggingface/transformers", ("@huggingface/transformers/dist", "onnxruntime-web/dist"), ONNX, write_onnx),
}


@dataclass(frozen=True, slots=True)
class Tab:
    """A page that measures the models of its site."""

    page: Page
    asked: list[str]  # paths that were requested from the site

    def open(self, name: str, *given: str) -> None:
        self._call("open", name, *given)

    def prefill_s(self, name: str) -> float:
        return self._call("prefill", name)

    def decode_s(self, name: str) -> float:
        return self._call("decode", name)

    def first_token_s(self, folder: str) -> float:
        return self._call("firstToken", folder)

    def _call(self, function: str, *given: str) -> Any:
        return self.page.js(f"import('./browser.mjs').then((bench) => bench.{function}({', '.join(map(json.dumps, given))}))")


@contextmanager
def open_tab(site: Path) -> Generator[Tab]:
    """Serve a folder and open it in Chromium. Copy the script that measures into the folder."""
    program = installed()
    if program is None:
        raise SettingsError("Chromium is not installed; install it, on Debian with: apt install chromium")
    shutil.copy(Path(__file__).with_name("browser.mjs"), site)
    (site / "index.html").write_text('<!doctype html><link rel="icon" href="data:,"><title>bench</title>')
    with (
        tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as profile,
        serving(site) as (address, asked),
        closing(Chromium(program, Path(profile), patience_s=PATIENCE_S)) as chromium,
    ):
        page = chromium.new_page()
        page.open(f"{address}/index.html")
        yield Tab(page, asked)


def first_token_s(site: Path) -> float:
    """Return the seconds from opening the page to the demo's first token, if the browser has cached the files. A first visit fills the
    cache."""
    with open_tab(site) as tab:
        times: list[float] = []
        for _ in range(4):
            times.append(tab.first_token_s(DEMO))
            tab.page.reload()
        return min(times[1:])


def check_peer(name: str, modules: Path) -> None:
    """Raise SettingsError if a peer is not installed in the folder `modules`."""
    peer = PEERS[name]
    if missing := [folder for folder in peer.folders if not (modules / folder).is_dir()]:
        raise SettingsError(
            f"peer {name!r} is not in {modules}, which lacks {', '.join(missing)}; install it with: npm install {peer.package}, and name "
            "the folder with --node-modules"
        )


def write_peer(name: str, modules: Path, site: Path, config: ModelConfig) -> None:
    """Copy a peer's scripts into the site's folder `name`, and write the model in the peer's format."""
    peer = PEERS[name]
    for folder in peer.folders:
        shutil.copytree(modules / folder, site / name, dirs_exist_ok=True)
    peer.write_model(site / peer.model, config, RandomWeights(shapes_of(config)))


def compare(tab: Tab, peer: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per token of the export and of the peer, measured alternately: {"prefill": {name: [...]}, "decode": ...}."""
    tab.open("relaxserve", EXPORT)
    tab.open(peer, peer, PEERS[peer].model)
    names = ("relaxserve", peer)
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in ("prefill", "decode")}
    for number in range(rounds + 1):
        for name in names:
            times = {"prefill": tab.prefill_s(name), "decode": tab.decode_s(name)}
            if number:  # do not count the first round, in which the engines compile
                for kind, seconds in times.items():
                    found[kind][name].append(seconds)
    return found
