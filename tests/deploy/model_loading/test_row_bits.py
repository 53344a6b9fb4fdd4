"""Before a load, a GPU is checked: the bits of a row must not depend on the number of rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from compiler.machine.products import product_tiles
from compiler.machine.target import NAMED, get
from deploy.model_loading.load import load_model
from deploy.model_loading.row_bits import RESULTS, Trusted, differences, trusted
from server.messages import Load
from tests.conftest import GOLDEN
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

HEIGHTS = product_tiles(get("sm_90a")).shapes_of_rows


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))


@needs_pycuda
def test_a_gpu_whose_shapes_agree_keeps_its_target(software_gpu: SoftwareGpu) -> None:
    assert trusted(get("sm_90a"), 0, None, "model") == Trusted(get("sm_90a"))


@needs_pycuda
def test_shapes_that_disagree_are_named_and_not_used(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """If instructions of 32 rows and more add in another order, the rows of smaller batches differ from those of the largest one: with 32
    rows, two warpgroups multiply 16 each. The model then runs code whose products have one shape."""
    from tests.gpu.driver.card import machine

    monkeypatch.setattr(machine, "uneven", 32)
    assert differences(get("sm_90a"), HEIGHTS, 0, None, "model") == [f"{count} rows by {name}" for count in (8, 32) for name in RESULTS]
    found = trusted(get("sm_90a"), 0, None, "model")
    assert found.target is get("sm_89")
    assert found.note.startswith("on this GPU the bits of a row depend on the number of rows (8 rows by bf16, 8 rows by int8, 32 ")


@needs_pycuda
def test_a_load_says_that_it_runs_other_code(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.gpu.driver.card import machine

    folder = shutil.copytree(GOLDEN / "models" / "llama", tmp_path / "llama")
    words = {f"w{i}": i for i in range(json.loads((folder / "config.json").read_text())["vocab_size"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(machine, "uneven", 32)
    loaded = load_model(Load("m", str(folder), "bf16", max_context=16, max_batch=1, device="cuda"), lambda _stage, _fraction: None)
    assert "so the model runs code for sm_89" in loaded.ready.device_note
    assert loaded.ready.card.num_graphs > 0


@pytest.mark.parametrize("name", [name for name in NAMED if name != "sm_90a"])
def test_targets_whose_products_have_one_shape_are_not_checked(name: str) -> None:
    """There is no card in this test, so a check would fail."""
    assert trusted(get(name), 0, None, "model").target is get(name)
