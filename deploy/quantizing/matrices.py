"""Quantise matrices with the compiled search (compiler/frontend/quantized/search.py), on all cores of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.quantized.held import Width, two_level_form
from compiler.frontend.quantized.search import ENTRY, WHOLE, build_search
from compiler.ops.tables import INTERPRET
from deploy.model_loading.program import compile_here
from runtime.session import Session

Array = NDArray[Any]
Floats = NDArray[np.float32]
SAMPLED = 8  # every eighth row is quantised to estimate the error of a width


class Search:
    """Quantises matrices. One search program is compiled for each `Width` (a number format) and length of rows."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[Width, int], Session] = {}

    def parts(self, w: Array, importance: Floats, width: Width) -> tuple[dict[str, Array], float]:
        """Return the arrays that represent a matrix in the format of this width, by the names of their parts, and the sum of the errors of
        its rows. `importance` has the weight of each input of the matrix in these errors."""
        *matrices, length = w.shape
        rows, form = w.reshape(-1, length), two_level_form(width, length)
        session = self._session(width, length)
        found: list[tuple[Array, ...]] = []
        for start in range(0, len(rows), step := max(1, WHOLE // length)):
            found.append(session.call(ENTRY, np.ascontiguousarray(rows[start : start + step], np.float32), importance))
        *parts, errors = (np.concatenate(several) for several in zip(*found, strict=True))
        shaped = {name: part.reshape(*matrices, -1) for name, part in zip(form.parts, parts, strict=True)}
        return shaped, float(errors.sum(dtype=np.float64))

    def sampled_error(self, w: Array, importance: Floats, width: Width) -> float:
        """Estimate the sum of the errors of all rows of a matrix from every eighth row."""
        rows = w.reshape(-1, w.shape[-1])
        sample = rows[::SAMPLED]
        return self.parts(sample, importance, width)[1] * len(rows) / len(sample)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _session(self, width: Width, length: int) -> Session:
        if (width, length) not in self._sessions:
            executable = compile_here(build_search(two_level_form(width, length), length))
            self._sessions[width, length] = Session(executable)
        return self._sessions[width, length]


def values_of(parts: Mapping[str, Array], width: Width) -> Floats:
    """Return the matrix in f32 that the quantised parts represent."""
    q, scale, *shift = (parts[name] for name in two_level_form(width, width.group).numbers)
    units = [parts[name] for name in parts if name.endswith("_unit")]
    dequantize = INTERPRET["dequantize"]
    levels = [
        dequantize(level, unit, bits=8, group=level.shape[-1] // unit.shape[-1], shifted=False, dtype="f32", kind="int")
        for level, unit in zip((scale, *shift), units, strict=True)
    ]
    return dequantize(q, *levels, bits=width.bits, group=width.group, shifted=bool(shift), dtype="f32", kind=str(width.kind))
