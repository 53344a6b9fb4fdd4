"""Image files for tests."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from server.fetching import IMAGES, Fetcher

NOWHERE = Fetcher(IMAGES, (), 1, 1.0)  # fetches nothing
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def image(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(given: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    given.save(out, format, **options)
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
