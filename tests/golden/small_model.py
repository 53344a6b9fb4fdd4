"""A small random model whose golden another program has made: its folder, its weights, and the arrays of its golden."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tests.golden.drawn import with_weights


@dataclass(frozen=True)
class SmallModel:
    """A small model of a family."""

    kind: ClassVar[str]  # the folder of all models of this kind

    name: str

    @property
    def place(self) -> Path:
        """The folder of the model, where its weights may be missing."""
        return Path(__file__).parent / self.kind / self.name

    @property
    def folder(self) -> Path:
        """The folder of the model, with its weights."""
        return with_weights(self.place)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that the other program has computed."""
        return dict(np.load(self.place / "golden.npz"))
