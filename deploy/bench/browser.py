"""Measure exports in headless Chromium, and peers in the same page with the same weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compiler.frontend.config import ModelConfig
from deploy.bench.chromium import Chromium, Page, installed
from deploy.bench.gguf_file import write_gguf
from deploy.bench.site import serving
from deploy.bench.synthetic import RandomWeights, shapes_of
from server.settings import SettingsError

PATIENCE_S = 600.0  # a model of half a gigabyte is loaded, and prefilled by one thread
CONTEXT = 1024  # tokens of a sequence: browser.mjs prefills 512
EXPORT, DEMO, GGUF = "model", "demo", "model.gguf"  # in the folder of the site
PEERS: Mapping[str, str] = {"wllama": "@wllama/wllama"}  # packages on npm


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
    """Serve a folder and open it in Chromium. The folder gets the script that measures."""
    program = installed()
    if program is None:
        raise SettingsError("Chromium is not installed; install it, on Debian with: apt install chromium")
    with as_file(files("deploy.bench") / "browser.mjs") as script:
        shutil.copy(script, site)
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
    """Return the seconds from the browser's cache to the demo's first token. The first visit fills the cache."""
    with open_tab(site) as tab:
        times: list[float] = []
        for _ in range(4):
            times.append(tab.first_token_s(DEMO))
            tab.page.reload()
        return min(times[1:])


def package_of(peer: str, modules: Path) -> Path:
    """Return the folder of a peer's package, or raise SettingsError."""
    if find_spec("deploy.bench.peers") is None:
        raise SettingsError(f"peer {peer!r} is measured from a source tree, which the installed package is not; clone the repository")
    folder = modules / PEERS[peer]
    if not (folder / "package.json").exists():
        raise SettingsError(
            f"peer {peer!r} is not in {modules}; install it with: npm install {PEERS[peer]}, and name the folder with --node-modules"
        )
    return folder


def write_peer(package: Path, peer: str, site: Path, config: ModelConfig) -> None:
    """Copy a peer's files into the site, and write the model in its format."""
    shutil.copytree(package / "esm", site / peer)
    write_gguf(site / GGUF, config, RandomWeights(shapes_of(config)), "Q4_0")


def compare(tab: Tab, peer: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per token of the export and of the peer, measured by turns: {"prefill": {name: [...]}, "decode": ...}."""
    tab.open("relaxserve", EXPORT)
    tab.open(peer, peer, GGUF)
    names = ("relaxserve", peer)
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in ("prefill", "decode")}
    for number in range(rounds + 1):
        for name in names:
            times = {"prefill": tab.prefill_s(name), "decode": tab.decode_s(name)}
            if number:  # in the first round engines still compile
                for kind, seconds in times.items():
                    found[kind][name].append(seconds)
    return found
