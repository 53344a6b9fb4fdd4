"""The tokenizer of a source is loaded, or an error says why it cannot be loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.gguf.tokenizer import tokenizer_files
from deploy import demo
from deploy.cache import Kept, Part
from deploy.model_loading.files import open_files
from deploy.model_loading.locate import locate
from deploy.model_loading.tokenizer import TokenizerSource, load_tokenizer
from server.interfaces import LoadError
from tests.deploy.gguf_files import write_gguf


@pytest.mark.parametrize(("content", "complaint"), [(None, "tokenizer.json is missing"), ("{", "tokenizer.json is not understood")])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=complaint) as refused:
        load_tokenizer(str(tmp_path))
    assert refused.value.code == "load_refused"


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_worker_reads_what_the_tokenizer_says(tmp_path: Path, form: str) -> None:
    """A worker builds no tokenizer, but ends answers at the same tokens and constrains them with the same vocabulary."""
    source = demo.NAME if form == "folder" else str(tmp_path / "m.gguf")
    if form == "gguf":
        write_gguf(tmp_path / "m.gguf")
    tokenizer, files = load_tokenizer(source), open_files(locate(source))
    described = TokenizerSource(files.path, files.gguf)
    assert set(described.eos_ids()) == set(tokenizer.eos_ids) and tokenizer.eos_ids
    assert tokenizers.Tokenizer.from_buffer(described.reader()()).to_str() == tokenizer.to_json()


FRONT = """
import sys
import deploy.serve
before = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
tokenizer = deploy.serve.load_tokenizer(sys.argv[1])
print(tokenizer.vocab_size > 0, sum(name.endswith(".gguf") for name in opened))
print(*(name for name in sys.modules if name.startswith(("compiler.", "llvmlite"))))
"""


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_the_front_reads_a_tokenizer_without_the_compiler(tmp_path: Path, form: str) -> None:
    """To read a tokenizer, the front imports only three parts of the compiler: the cache, the names of targets, and the GGUF reader. It
    opens a GGUF file only once and does not import LLVM."""
    source = demo.NAME if form == "folder" else str(tmp_path / "m.gguf")
    if form == "gguf":
        write_gguf(tmp_path / "m.gguf")
    command = [sys.executable, "-W", "error", "-c", FRONT, source]
    found, modules = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert found == f"True {int(form == 'gguf')}"
    least = {
        "compiler.cache",
        "compiler.report",
        "compiler.frontend",
        "compiler.frontend.errors",
        "compiler.machine",
        "compiler.machine.target",
    }
    vocabulary = ("vocabulary", "vocabulary.pieces", "vocabulary.words")
    files = ("gguf", "gguf.dequantize", "gguf.file", "gguf.tokenizer", "weights", *vocabulary)
    reader = {
        "compiler.ir",
        "compiler.ir.blocks",
        "compiler.ir.coded_blocks",
        "compiler.ir.dtypes",
        "compiler.ir.grids",
        "compiler.ir.numbers",
        *(f"compiler.frontend.{name}" for name in files),
    }
    assert set(modules.split()) == (least | reader if form == "gguf" else least)


def test_the_tokenizer_of_a_gguf_file_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start reads what an earlier one made of the vocabulary. Damage is noticed, and another file has a tokenizer of its own."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    made: list[object] = []
    monkeypatch.setattr(
        "compiler.frontend.gguf.tokenizer.tokenizer_files", lambda metadata: made.append(metadata) or tokenizer_files(metadata)
    )
    write_gguf(tmp_path / "m.gguf")
    source = str(tmp_path / "m.gguf")
    first, again = load_tokenizer(source).to_json(), load_tokenizer(source).to_json()
    assert first == again and len(made) == 1
    (stored,) = (tmp_path / "cache" / "tokenizers").glob("*.tokenizer")
    stored.write_bytes(stored.read_bytes()[:-1] + b"?")
    assert load_tokenizer(source).to_json() == first and len(made) == 2
    write_gguf(tmp_path / "m.gguf", chat_template="{{ messages[0].content }}")
    assert load_tokenizer(source).to_json() == first and len(made) == 3
    cache = Kept(tmp_path / "cache")
    assert [item.part for item in cache.items()] == [Part.TOKENIZER] * 2 and {*dict(cache.verify()).values()} == {""}


def test_a_process_of_its_own_reads_a_large_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process makes the same files as this one would. A file that it cannot read is refused with the reason."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("deploy.model_loading.made_tokenizer.LARGE", 2)
    write_gguf(tmp_path / "m.gguf")
    expected = tokenizer_files(GgufFile(tmp_path / "m.gguf").metadata)["tokenizer.json"]
    with monkeypatch.context() as patch:
        patch.setattr("compiler.frontend.gguf.tokenizer.tokenizer_files", None)  # this process makes nothing
        tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    assert tokenizer.to_json() == tokenizers.Tokenizer.from_buffer(expected).to_str()
    write_gguf(tmp_path / "n.gguf", merges=False)
    with pytest.raises(LoadError, match="merges is a NoneType"):
        load_tokenizer(str(tmp_path / "n.gguf"))


def test_a_cache_that_cannot_be_written_loses_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that reads a large vocabulary gives it to this one. If that process fails, the log says why, and this one reads it."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("deploy.model_loading.made_tokenizer.LARGE", 2)
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "cache").mkdir(0o700)
    (tmp_path / "cache" / "tokenizers").write_text("no folder")
    with monkeypatch.context() as patch:
        patch.setattr("compiler.frontend.gguf.tokenizer.tokenizer_files", None)  # this process makes nothing
        tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    assert "the tokenizer" in caplog.text and "ended early" not in caplog.text
    broken = (sys.executable, "-c", "import sys; print('first', file=sys.stderr); sys.exit('no memory')")
    monkeypatch.setattr("deploy.model_loading.made_tokenizer.COMMAND", broken)
    with caplog.at_level(logging.DEBUG, "deploy.model_loading.made_tokenizer"):
        assert load_tokenizer(str(tmp_path / "m.gguf")).to_json() == tokenizer.to_json()
        monkeypatch.setattr("deploy.model_loading.made_tokenizer.COMMAND", ("/missing/python",))
        assert load_tokenizer(str(tmp_path / "m.gguf")).to_json() == tokenizer.to_json()
    assert f"the vocabulary of {tmp_path / 'm.gguf'} ended early (exit status 1): no memory" in caplog.text
    assert f"the vocabulary of {tmp_path / 'm.gguf'} cannot be started: No such file" in caplog.text
