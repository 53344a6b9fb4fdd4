"""Fingerprints are equal if, and only if, the program, the files and the numeric class are."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy import demo
from deploy.model_loading import fingerprint
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.fingerprint import content_digest, fingerprint_of
from deploy.model_loading.known import begin
from deploy.model_loading.stages import advance
from server.interfaces import LoadError
from server.messages import Load
from tests.unreadable import make_unreadable

ROOT = Path(__file__).parents[3]
LOAD = Load("m", str(ROOT / "tests/golden/models/llama"), "int8", max_context=64, max_batch=2)


def known(**fields: Any) -> Compiled:
    return advance(begin(msgspec.structs.replace(LOAD, **fields)), Compiled)


def test_a_copy_of_the_files_has_the_same_fingerprint(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(LOAD.source, copy)
    assert fingerprint_of(known()) == fingerprint_of(known(source=str(copy)))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert fingerprint_of(known()) != fingerprint_of(known(source=str(copy)))


def test_the_target_does_not_matter_but_the_numbers_do() -> None:
    assert known().numeric_class == "portable"
    assert fingerprint_of(known()) == fingerprint_of(known(target="x86-64-v3"))
    others = {fingerprint_of(known(**fields)) for fields in ({}, {"quantize": "f32"}, {"quantize": "bf16"}, {"kv_dtype": "int8"})}
    assert len(others) == 4


def test_portable_numbers_are_those_of_a_portable_program() -> None:
    exact, fast = (known(quantize="bf16", numerics=numerics, target="x86-64-v3") for numerics in ("portable", "fast"))
    assert exact.numeric_class == fast.numeric_class == "portable"  # no unit of this target rounds
    assert fingerprint_of(exact) != fingerprint_of(fast)


def test_numerics_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LoadError, match="numerics is 'exact'; expected one of auto, portable, fast"):
        known(numerics="exact")


def test_files_are_digested_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    found = fingerprint_of(known())
    monkeypatch.setattr(fingerprint, "content_digest", lambda _: pytest.fail("the digest is in the cache"))
    assert fingerprint_of(known()) == found


def test_a_file_beside_the_weights_that_changes_is_digested_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache must not return the digest of the former files if only a file beside the weights has changed."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    shutil.copytree(LOAD.source, copy)
    found = [fingerprint_of(known(source=str(copy)))]
    for text in ("{}", '{"temperature": 0.5}', '{"temperature": 0.6}'):
        (copy / "generation_config.json").write_text(text)
        os.utime(copy / "generation_config.json", (1, 1))  # images that are built reproducibly give all files one time
        found.append(fingerprint_of(known(source=str(copy))))
    assert len(set(found)) == 4


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise all models would have one digest of their files, and would take each other's pages."""
    copy = tmp_path / "copy"
    shutil.copytree(LOAD.source, copy)
    make_unreadable(monkeypatch, copy)
    with pytest.raises(PermissionError):
        content_digest(copy)


def test_a_folder_below_that_this_user_may_not_read_has_no_part_in_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as lost+found, if a volume has only the model. Whatever else keeps a folder from being read fails."""
    (tmp_path / "config.json").write_text("{}")
    found = content_digest(tmp_path)
    (tmp_path / "lost+found").mkdir()
    with monkeypatch.context() as one:
        make_unreadable(one, tmp_path / "lost+found")
        assert content_digest(tmp_path) == found
    make_unreadable(monkeypatch, tmp_path / "lost+found", errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        content_digest(tmp_path)


def test_the_name_of_a_file_matters_only_in_a_folder(tmp_path: Path) -> None:
    """A file in a folder has its meaning by its name. A GGUF file has all that it says within it."""
    for name in ("generation_config.json", "generation_config.old.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / name).write_text('{"temperature": 0.5}')
    assert content_digest(tmp_path / "generation_config.json") != content_digest(tmp_path / "generation_config.old.json")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(bytes(1000))
    assert content_digest(tmp_path / "a.gguf") == content_digest(tmp_path / "b.gguf")


def test_pieces_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(bytes(range(256)) * 1000)
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 1 << 12)
    found = content_digest(tmp_path / "a.gguf")
    monkeypatch.setattr(fingerprint.os, "sched_getaffinity", lambda _: {0})
    assert content_digest(tmp_path / "a.gguf") == found
    assert content_digest(demo.MODEL) != found
