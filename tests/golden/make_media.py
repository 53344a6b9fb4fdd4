"""Make the images and recordings for the goldens of models that see or hear.

python -m venv V; V/bin/pip install pillow==13.0.0 numpy; V/bin/python -m tests.golden.make_media
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.golden.media import FOLDER, LENGTHS, RATE, SIZES


def made_picture(number: int) -> bytes:
    """Return a file with smooth colours and some noise."""
    width, height = SIZES[number]
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 90 * np.sin(x / random.uniform(5, 30) + y / random.uniform(5, 30) + random.uniform(0, 6)) for _ in range(3)]
    pixels = np.clip(np.stack(waves, axis=-1) + random.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    if number == 2:
        image.putalpha(Image.fromarray(np.where((x + y) % 50 < 20, 0, 255).astype(np.uint8)))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def made_recording(number: int) -> NDArray[np.int16]:
    """Return samples: tones that glide, with pauses and some noise."""
    random, t = np.random.default_rng(number), np.arange(LENGTHS[number]) / RATE
    tones = sum(np.sin(2 * np.pi * t * (random.uniform(100, 3000) + random.uniform(-200, 200) * t)) for _ in range(4))
    loud = np.sin(2 * np.pi * t * random.uniform(0.7, 2.0)) > -0.6
    return (4000 * tones * loud + random.normal(0, 60, len(t))).clip(-32_000, 32_000).astype(np.int16)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in range(len(SIZES)):
        (FOLDER / f"picture_{one}.png").write_bytes(made_picture(one))
    np.savez_compressed(FOLDER / "recordings.npz", **{f"recording_{one}": made_recording(one) for one in range(len(LENGTHS))})
