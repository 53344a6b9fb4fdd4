"""Operators that read the memory of several ranks: what they refuse."""

from __future__ import annotations

import pytest

from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import TensorType, tensor
from compiler.ops.ranks import RANK_EMBEDDING

F32, IDS = DType.F32, tensor((3,), DType.I32)
COARSE = TensorType(None, F32)


def test_a_table_of_another_size_is_named_by_its_rank(deduced):
    """The error names the table, also if nothing is known about the tables before it."""
    right = tensor((4, 8), F32)
    with pytest.raises(AnnotationError, match="the number of rows of table 1 is 5, expected 4"):
        deduced(RANK_EMBEDDING, IDS, right, tensor((5, 8), F32), size=8)
    with pytest.raises(AnnotationError, match="the number of rows of table 1 is 5, expected 4"):
        deduced(RANK_EMBEDDING, IDS, COARSE, tensor((5, 8), F32), size=8)
    with pytest.raises(AnnotationError, match="the number of columns of table 3 is 9, expected 8"):
        deduced(RANK_EMBEDDING, IDS, right, COARSE, right, tensor((4, 9), F32), size=16)


def test_tables_of_unknown_size_leave_the_size_unknown(deduced):
    assert deduced(RANK_EMBEDDING, IDS, COARSE, COARSE, size=8) == TensorType(None, F32, 2)
    assert deduced(RANK_EMBEDDING, IDS, COARSE, tensor((4, 8), F32), size=8) == tensor((3, 8), F32)
