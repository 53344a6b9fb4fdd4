"""The small chat model that is part of the package."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
NAME = "demo"
