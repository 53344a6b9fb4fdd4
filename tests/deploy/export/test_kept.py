"""A model is exported only once. Each server that publishes the model gets hard links to the exported files."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

import deploy.export.kept
from deploy.cache import Kept, Part
from deploy.export.kept import export_kept
from deploy.model_loading.servable import Servable
from runtime.whole_files import ABANDONED_S
from tests.deploy.export.test_web import golden

pytestmark = pytest.mark.xdist_group("web")
LEVELS = ["wasm-relaxed"]


@pytest.fixture(scope="module")
def model(demo: Servable) -> Servable:
    return golden("gemma2", demo)


def fail(*_: object, **__: object) -> None:
    raise AssertionError("it is exported again")


def test_an_export_is_made_once(model: Servable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, first, second = Kept(tmp_path / "cache"), tmp_path / "first", tmp_path / "second"
    export_kept(model, "one", first, cache, LEVELS)
    (item,) = (item for item in cache.items() if item.part is Part.EXPORT)
    monkeypatch.setattr(deploy.export.kept, "export_web", fail)
    export_kept(model, "one", second, cache, LEVELS)
    written = {path.relative_to(first) for path in first.rglob("*") if path.is_file()}
    assert {path.relative_to(second) for path in second.rglob("*") if path.is_file()} == written
    assert all((first / path).samefile(second / path) for path in written), "no byte is stored twice"
    with pytest.raises(AssertionError, match="exported again"):
        # the same model under another name needs another export, because the exported files contain the name
        export_kept(model, "two", tmp_path / "third", cache, LEVELS)
    assert [entry.name for entry in item.paths[0].parent.iterdir()] == [item.key], "a failed export leaves nothing"
    assert item not in cache.prune(), "it needs no compiled program"
    (shard,) = item.paths[0].glob("weights-*.bin")
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    assert [(path, fault[: len(shard.name)]) for path, fault in cache.verify() if fault] == [(item.paths[0], shard.name)]
    cache.remove(item.paths[0])
    assert cache.items() == [] and (first / "program.json").exists(), "a server keeps the files that it linked"


def test_what_a_killed_export_left_goes(tmp_path: Path) -> None:
    cache = Kept(tmp_path)
    left = cache.export_of(f".{'a' * 32}.x1y2")
    left.mkdir(parents=True)
    os.utime(left, (then := time.time() - 2 * ABANDONED_S, then))
    assert [item.paths for item in cache.prune()] == [(left,)] and not left.exists()


def test_an_export_whose_removal_is_interrupted_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without some of its files would be published as the export, again and again."""
    cache = Kept(tmp_path)
    place = cache.export_of("a" * 32)
    place.mkdir(parents=True)
    for name in ("program.json", "weights.bin"):
        (place / name).write_bytes(b"1")

    def interrupted(folder: Path) -> None:
        (folder / "weights.bin").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupted)
        cache.remove(place)
    assert not place.exists()
    (left,) = place.parent.iterdir()
    os.utime(left, (then := time.time() - 2 * ABANDONED_S, then))
    assert [item.paths for item in cache.prune()] == [(left,)] and not left.exists()
