"""The files from which Dynamo's frontend makes prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deploy import demo
from deploy.dynamo.card import write_card
from server.interfaces import LoadError
from server.settings import SettingsError
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles


def test_the_card_of_the_demo() -> None:
    card = write_card("demo")
    assert card.has_template
    written = TokenizerFiles.from_dir(card.folder)
    assert Tokenizer(written.contents).chat_template is not None
    assert {file.name: file.read_bytes() for file in card.folder.iterdir() if file.name != "config.json"} == {
        name: content for name, content in TokenizerFiles.from_dir(demo.MODEL).contents.items() if name != "config.json"
    }
    assert json.loads((card.folder / "config.json").read_text()) == json.loads((demo.MODEL / "config.json").read_text())


def test_equal_files_have_one_place(tmp_path: Path) -> None:
    """Folders with equal files get the same card, because Dynamo takes workers whose files have different paths for workers of different
    models."""
    copy = shutil.copytree(demo.MODEL, tmp_path / "copy")
    assert write_card(str(copy)) == write_card("demo")
    (copy / "generation_config.json").write_text('{"eos_token_id": [3]}')
    assert write_card(str(copy)).folder != write_card("demo").folder


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": {"chat_template": None}}, {"chat_template.json": {}}])
def test_a_model_without_a_template_says_so(files: dict[str, object], tmp_path: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    card = write_card(str(tmp_path))
    assert not card.has_template
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    config = json.loads((card.folder / "config.json").read_text())
    assert config.keys() == {"model_type", "architectures", "eos_token_id"}  # as after a GGUF file
    assert config["eos_token_id"] == (ends if isinstance(ends, list) else [ends])


def test_workers_need_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cache, the files of each worker would have another path. Dynamo takes workers whose files have different paths for
    workers of different models."""
    monkeypatch.setenv("RELAXSERVE_NO_CACHE", "1")
    with pytest.raises(SettingsError, match=r"^RELAXSERVE_NO_CACHE is set; .*: unset it$"):
        write_card("demo")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing"):
        write_card(str(tmp_path))
