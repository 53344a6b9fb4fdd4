"""The weights of small random models are the same wherever they are drawn, and are drawn once."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.golden.drawn import RECIPE, WEIGHTS, Draw, draw, with_weights, write_recipe

FOLDERS = sorted(Path(__file__).parent.glob("*_models/*"))
STORED = ("qwen2_5_omni",)  # models whose weights the checkout has
DRAWS = {"a.weight": Draw((3, 5), 0.2), "a.norm.weight": Draw((5,), 0.1, 1.0), "a.scalar": Draw((), 0.5), "a.ones": Draw((2, 3), 0.0, 1.0)}


def test_numbers_are_those_of_every_other_machine() -> None:
    found = draw(7, "model.norm.weight", Draw((4,), 0.2, 1.0))
    assert found.view(np.uint32).tolist() == [1_058_403_995, 1_064_182_095, 1_066_926_949, 1_067_318_520]
    assert draw(7, "other", Draw((), 0.2)).shape == ()


def test_numbers_have_the_mean_and_the_spread_that_are_asked_for() -> None:
    found = draw(0, "x", Draw((400, 500), 0.25, 3.0))
    assert found.dtype == np.float32 and abs(found.mean() - 3) < 0.01 and abs(found.std() - 0.25) < 0.01
    assert len(np.unique(found)) > 100_000, "they are no few repeated numbers"
    assert (draw(0, "x", Draw((3, 4), 0.0, -1.5)) == -1.5).all()


def test_each_seed_and_each_name_has_numbers_of_its_own() -> None:
    how = Draw((100,), 1.0)
    drawn = [draw(*key, how).tobytes() for key in ((0, "a"), (1, "a"), (0, "b"), (0, "ab"), (0, "ba"))]
    assert len(set(drawn)) == len(drawn) and draw(0, "a", how).tobytes() == drawn[0]


def test_weights_are_drawn_once_and_again_if_the_recipe_changes(tmp_path: Path) -> None:
    write_recipe(tmp_path, 1, DRAWS)
    assert with_weights(tmp_path) == tmp_path
    first, tensors = (tmp_path / WEIGHTS).stat(), load_file(tmp_path / WEIGHTS)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {name: how.shape for name, how in DRAWS.items()}
    assert all((tensors[name] == draw(1, name, how)).all() for name, how in DRAWS.items())
    with_weights(tmp_path)
    assert (tmp_path / WEIGHTS).stat() == first
    write_recipe(tmp_path, 2, DRAWS)
    with_weights(tmp_path)
    assert (load_file(tmp_path / WEIGHTS)["a.weight"] == draw(2, "a.weight", DRAWS["a.weight"])).all()
    assert {path.name for path in tmp_path.iterdir()} == {RECIPE, WEIGHTS}


def test_processes_that_begin_together_write_the_weights_once(tmp_path: Path) -> None:
    write_recipe(tmp_path, 1, {"x": Draw((500, 1000), 1.0)})

    def inode(_: int) -> int:
        return (with_weights(tmp_path) / WEIGHTS).stat().st_ino

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(inode, range(8)))) == 1


def test_other_numbers_than_those_of_the_golden_are_refused(tmp_path: Path) -> None:
    write_recipe(tmp_path, 1, DRAWS)
    recipe = json.loads((tmp_path / RECIPE).read_text())
    (tmp_path / RECIPE).write_text(json.dumps({**recipe, "seed": 3}))
    with pytest.raises(
        ValueError, match=r"weights\.json: the drawn weights have the SHA-256 .*, expected .*: NumPy .* make the golden again"
    ):
        with_weights(tmp_path)
    assert not (tmp_path / WEIGHTS).exists()


def test_each_model_has_a_recipe_or_weights() -> None:
    assert len(FOLDERS) > 20
    assert [folder.name for folder in FOLDERS if not (folder / RECIPE).exists()] == [*STORED]
    assert all((folder / WEIGHTS).exists() for folder in FOLDERS if folder.name in STORED)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.name not in STORED], ids=lambda folder: folder.name)
def test_the_weights_of_each_golden_can_be_drawn_here(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / RECIPE, tmp_path)
    tensors = load_file(with_weights(tmp_path) / WEIGHTS)
    first = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).unlink()
    assert (with_weights(tmp_path) / WEIGHTS).read_bytes() == first
    assert tensors and all(np.isfinite(tensor).all() for tensor in tensors.values())
