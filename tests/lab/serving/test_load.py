"""The benchmark of loading: its figures for the demo model, and the model files that it generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from compiler.frontend.weights import open_safetensors
from deploy import demo
from tests.lab.serving import load


def test_a_load_stays_within_its_plan(capsys: pytest.CaptureFixture[str]):
    load.main(["--model", str(demo.MODEL), "--quantize", "int8", "--starts", "1", "--json"])
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}
    serving, peak = figures["resident memory while serving"], figures["peak of resident memory while loading"]
    assert serving["reached"] and peak["reached"]
    assert min(peak["value"], serving["value"]) > 10, "a Python process takes more than 10 MB"
    assert peak["goal"] > serving["goal"], "the peak may exceed the memory while serving by one shard"
    assert figures["time to first token, later start"]["value"] > 0
    assert 0 < figures["share of the packed weights read before the first token, cold start"]["value"] <= 1


def test_the_page_cache_holds_the_pages_that_were_read(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 16))
    assert load.cached_share(file) == 1, "written pages stay in the cache"


def test_shards_hold_what_the_file_held(tmp_path: Path):
    shutil.copy(demo.MODEL / "model.safetensors", tmp_path)
    whole = open_safetensors(demo.MODEL)
    load.shard(tmp_path, 3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    sharded = open_safetensors(tmp_path)
    assert sharded.tensors == whole.tensors
    for name in whole.tensors:
        np.testing.assert_array_equal(sharded.read(name), whole.read(name))
