"""`covering` leaves out combinations of parameters whose parts other combinations contain."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.covering import covering
from tests.plain_pytest import plain_pytest


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (3, 17, 6), (2, 2, 2, 2, 2), (1, 5, 1)], ids=str)
@pytest.mark.parametrize("together", [1, 2, 3])
def test_every_part_is_in_a_chosen_combination(sizes: tuple[int, ...], together: int) -> None:
    given = list(product(*map(range, sizes)))
    chosen = [given[number] for number in covering(given, together)]

    def parts(some: list[tuple[int, ...]]) -> set[object]:
        return {part for one in some for part in combinations(enumerate(one), min(together, len(sizes)))}

    assert parts(chosen) == parts(given)
    least = max(len(set(product(*(range(size) for size in some)))) for some in combinations(sizes, min(together, len(sizes))))
    assert least <= len(chosen) <= 1.5 * least + 2


def test_a_combination_that_alone_has_a_pair_is_kept() -> None:
    assert covering([(0, 0), (0, 1), (1, 0)]) == {0, 1, 2}
    assert covering([(0, 0), (1, 1), (0, 1), (1, 0)], together=1) == {0, 1}


TEST = """
import pytest

@pytest.fixture(params="pq")
def made(request):
    return request.param

@pytest.mark.covering("a", "made", together=TOGETHER)
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("a", [[], {}, None])
def test_it(a, b, made):
    pass
"""
CONFTEST = """
import pytest
from tests.covering import mark_uncovered

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_uncovered(items)
"""


def run(folder: Path, text: str, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    done = plain_pytest(folder, "--collect-only", *options, folder / "test_it.py")
    return done.stdout + done.stderr


def test_named_parameters_are_covered_for_each_value_of_the_others(tmp_path: Path) -> None:
    """Values of parameters need not be hashable. A fixture's parameters count like those of a test."""
    text = TEST.replace("TOGETHER", "1")
    assert "6/12 tests collected" in run(tmp_path, text, "-m", "not slow")
    assert "12 tests collected" in run(tmp_path, text, "-m", "")
    assert "12 tests collected" in run(tmp_path, TEST.replace("TOGETHER", "2"), "-m", "not slow")


def test_a_parameter_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    said = run(tmp_path, TEST.replace("TOGETHER", "1").replace('"made", t', '"maid", t'))
    assert "covering names ['maid']; the test's parameters are ['a', 'b', 'made']" in said
