"""The file with a model's defaults: where it is, what it decides, and that a load sees it change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from deploy.cli.inspect import _table
from deploy.inspection import inspect_model
from deploy.model_loading.files import Opened
from deploy.model_loading.known import begin
from deploy.model_loading.locate import identity_of
from deploy.model_loading.stages import advance
from deploy.model_loading.tokenizer import load_tokenizer
from server.defaults import FILE
from server.interfaces import LoadError
from server.messages import Load
from tests.deploy.gguf_files import VOCAB, write_gguf

GOLDEN = Path(__file__).parents[2] / "golden" / "models"


def model_in(folder: Path, form: str) -> tuple[Path, Path]:
    """Return a model, and the path of its file with defaults."""
    if form == "gguf":
        write_gguf(folder / "m.gguf")
        return folder / "m.gguf", folder / f"m.{FILE}"
    path = folder / "m"
    shutil.copytree(GOLDEN / "qwen3", path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(VOCAB)}, unk_token="a"))
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path, path / FILE


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_the_file_beside_a_model_is_read(tmp_path: Path, form: str) -> None:
    path, file = model_in(tmp_path, form)
    assert not load_tokenizer(str(path)).defaults.given
    before = identity_of(str(path))
    file.write_text('system = "Be brief."\ntemperature = 0.25\ntemplate = "{{ bos_token }}own"')
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.defaults.given.items() >= {"system": "Be brief.", "temperature": 0.25}.items()
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == "{{ bos_token }}own"
    assert identity_of(str(path)) != before, "a repeated load would keep the old defaults"


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_an_unknown_key_refuses_the_load(tmp_path: Path, form: str) -> None:
    """The message names the model, the file's key and the remedy."""
    path, file = model_in(tmp_path, form)
    file.write_text("temprature = 0.25")
    for read in (lambda: load_tokenizer(str(path)), lambda: advance(begin(Load("m", str(path), "f32")), Opened)):
        with pytest.raises(LoadError, match=rf"{path.name}: 'temprature' in {FILE} is no default \(is temperature meant\?\)") as refused:
            read()
        assert refused.value.code == "load_refused"


def test_a_broken_template_refuses_the_load(tmp_path: Path) -> None:
    path, file = model_in(tmp_path, "folder")
    file.write_text('template = "{% for %}"')
    with pytest.raises(LoadError, match="the chat template is broken"):
        load_tokenizer(str(path))


def test_another_template_can_be_set(tmp_path: Path) -> None:
    path, _ = model_in(tmp_path, "folder")
    tokenizer = load_tokenizer(str(path))
    other = tokenizer.with_template("{{ messages[0].content }}!")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    assert other.chat_template is not None and other.chat_template.render(messages) == "hi!"
    assert tokenizer.chat_template is not None and tokenizer.chat_template.source == "{{ messages }}"
    assert other.encode("a", False) == tokenizer.encode("a", False)


@pytest.mark.parametrize(("asked", "expected"), [(None, 32), (48, 48)])
def test_a_load_has_the_context_of_the_file_unless_it_names_one(tmp_path: Path, asked: int | None, expected: int) -> None:
    path, file = model_in(tmp_path, "folder")
    file.write_text('max_context = 32\nsystem = "Be brief."')
    assert advance(begin(Load("m", str(path), "f32", max_context=asked)), Opened).load.max_context == expected


def test_a_worker_that_replaces_another_keeps_its_context(tmp_path: Path) -> None:
    """Running requests rely on the context; the changed file applies when the model is loaded again."""
    path, file = model_in(tmp_path, "folder")
    file.write_text("max_context = 32")
    again = Load("m", str(path), "f32", restart=True, least_context=64)
    assert advance(begin(again), Opened).load.max_context == 64


def test_inspect_shows_the_file(tmp_path: Path) -> None:
    path, file = model_in(tmp_path, "folder")
    file.write_text('max_context = 32\nsystem = "Be brief."\ntop_k = 5')
    found = inspect_model(Load("m", str(path), "f32", max_batch=4))
    assert found.defaults == "system 'Be brief.', top_k 5" and found.max_context == 32
    column = list(_table(found, []).columns[0].cells)
    assert column[:3] == ["model", "family", "defaults"]
