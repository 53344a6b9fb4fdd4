"""The small chat model that comes with the package."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
NAME = "demo"
