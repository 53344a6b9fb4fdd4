"""Weights of small random models, drawn from a seed: the checkout has a recipe (`weights.json`) instead of a model's weights. Tests draw
the weights that they use; `python -m tests.golden.drawn` draws those of all models.

A recipe names a seed, the SHA-256 of all numbers, and for each tensor its shape, scale and shift. The numbers of a tensor have the standard
deviation `scale` around `shift`. They are the same on every machine and in every version of NumPy: each is a sum of the four 16-bit parts
of a number of PCG64, whose stream NumPy keeps, and is scaled by operations that IEEE 754 defines exactly.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

RECIPE, WEIGHTS = "weights.json", "model.safetensors"
MADE_BY = "recipe"  # in the metadata of a file of weights: the SHA-256 of its recipe
MEAN = 4 * 65_535 // 2  # mean of a sum of four numbers below 65,536
SPREAD = 65_536 / math.sqrt(3)  # its standard deviation


@dataclass(frozen=True, slots=True)
class Draw:
    """How the numbers of a tensor are drawn. With a scale of 0, all of them are `shift`."""

    shape: tuple[int, ...]
    scale: float
    shift: float = 0.0


def draw(seed: int, name: str, how: Draw) -> NDArray[np.float32]:
    """Return the numbers of a tensor."""
    bits = np.random.PCG64([seed, *name.encode()]).random_raw(math.prod(how.shape))
    sums = bits.view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    return (how.scale * ((sums - MEAN) / SPREAD) + how.shift).astype(np.float32).reshape(how.shape)


def write_recipe(folder: Path, seed: int, draws: Mapping[str, Draw]) -> None:
    """Write the recipe of a model's weights, a tensor a line."""
    digest = _digest(draw(seed, name, how) for name, how in draws.items())
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps([how.shape, how.scale, how.shift])}" for name, how in draws.items())
    (folder / RECIPE).write_text(f'{{"seed": {seed}, "sha256": "{digest}", "tensors": {{\n{lines}\n}}}}\n')


def with_weights(folder: Path) -> Path:
    """Draw the weights of a model into its folder, unless its file of weights was made by the same recipe. Return the folder. Without a
    recipe, the checkout has the weights."""
    if not (folder / RECIPE).exists():
        return folder
    with (folder / RECIPE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes that run tests wait instead of writing the file again
        recipe = file.read()
        made_by = hashlib.sha256(recipe).hexdigest()
        if _made_by(folder / WEIGHTS) != made_by:
            _write_weights(folder, json.loads(recipe), made_by)
    return folder


def _made_by(weights: Path) -> str:
    """Return the SHA-256 of the recipe from which a file of weights was made; an empty text if there is no file."""
    if not weights.exists():
        return ""
    with safe_open(weights, "np") as file:
        return (file.metadata() or {}).get(MADE_BY, "")


def _write_weights(folder: Path, recipe: dict[str, object], made_by: str) -> None:
    seed, tensors = recipe["seed"], recipe["tensors"]
    assert isinstance(seed, int) and isinstance(tensors, dict)
    found = {name: draw(seed, name, Draw(tuple(shape), scale, shift)) for name, (shape, scale, shift) in tensors.items()}
    if (digest := _digest(found.values())) != recipe["sha256"]:
        raise ValueError(
            f"{folder / RECIPE}: the drawn weights have the SHA-256 {digest}, expected {recipe['sha256']}: "
            f"NumPy {np.__version__} or `draw` differs from the one that made the golden; make the golden again"
        )
    new = folder / f"{WEIGHTS}.tmp"
    save_file(found, new, {MADE_BY: made_by})  # safetensors writes several fields in a random order
    os.replace(new, folder / WEIGHTS)


def _digest(arrays: Iterable[NDArray[np.float32]]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.astype("<f4").tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    for found in sorted(Path(__file__).parent.glob(f"*/*/{RECIPE}")):
        print(with_weights(found.parent))
