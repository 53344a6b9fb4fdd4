"""The tokenizer of a source, or what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.vocabulary import load_tokenizer
from server.handle import LoadError


@pytest.mark.parametrize(("content", "complaint"), [(None, "tokenizer.json is missing"), ("{", "tokenizer.json is not understood")])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=complaint) as refused:
        load_tokenizer(str(tmp_path))
    assert refused.value.code == "load_refused"
