"""The quality label of a real model: the default form loses almost nothing, and a damaged file is plainly bad."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from gguf import GGUFReader

from deploy.quality.measure import label_of
from server.messages import Load, QualityLabel
from server.models.quality import POOR, in_words
from tests.real.conftest import MODELS, file_of

DAMAGED = "blk.0.ffn_down.weight"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return a file in which the rows of one tensor are permuted."""
    place = Path(shutil.copy(file_of("smollm2"), tmp_path / "damaged.gguf"))
    (tensor,) = (tensor for tensor in GGUFReader(place).tensors if tensor.name == DAMAGED)
    size = int(tensor.n_bytes) // int(tensor.shape[1])
    content = bytearray(place.read_bytes())
    begin = int(tensor.data_offset)
    rows = [content[at : at + size] for at in range(begin, begin + int(tensor.n_bytes), size)]
    random.Random(0).shuffle(rows)
    content[begin : begin + int(tensor.n_bytes)] = b"".join(rows)
    place.write_bytes(content)
    return place


@pytest.mark.slow  # tests/deploy/quality/test_measure.py measures the demo model
def test_a_damaged_file_is_plainly_bad(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    label = label_of(Load("sound", str(file_of("smollm2"))))
    assert is_near_exact(label) and label.perplexity < 25
    bad = label_of(Load("damaged", str(damaged)))
    assert bad.exact_perplexity > POOR > label.exact_perplexity
    assert "damaged" in in_words(bad) and "damaged" not in in_words(label)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS[1:])
def test_the_default_form_loses_nothing_a_user_could_notice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    assert is_near_exact(label_of(Load(name, str(file_of(name)))))


def is_near_exact(label: QualityLabel) -> bool:
    return label.kl_divergence <= 5e-4 and label.top1_agreement >= 0.985
