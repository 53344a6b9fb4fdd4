"""The small chat model that is part of the package."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"  # the folder of its files
NAME = "demo"  # the name of the model in commands
