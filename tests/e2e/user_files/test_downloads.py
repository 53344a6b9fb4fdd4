"""Downloads may leave something else in place of a file, which is refused by name: a Git LFS pointer, a web page, the answer of a server
that refuses, a part of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.gguf_files import write_gguf
from tests.e2e.user_files.bring import answers_as, refused, save_tensors, split_gguf, tensors_of, write_folder

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
REFUSAL = b'{"error":"Access to model org/tiny is restricted and you are not in the authorized list."}'
INDEX = "model.safetensors.index.json"
BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", INDEX)
STAND_INS = [
    (POINTER, "is a Git LFS pointer in place of the file: run `git lfs pull` in its folder"),
    (PAGE, "is a web page in place of the file: download the file again"),
    (REFUSAL, "is the answer of a server that refused the download: download the file again"),
]


@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf", *BESIDE])
@pytest.mark.parametrize(("content", "said"), STAND_INS, ids=["pointer", "page", "refusal"])
def test_what_stands_in_for_a_file_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    source = tmp_path / name if name.endswith(".gguf") else write_folder(tmp_path / "model")
    file = source if source.suffix == ".gguf" else source / name
    file.write_bytes(content)
    refused(source, rf"{name}:? {said}")


@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"Entry not found", r"is a text of 15 bytes that begins with 'Entry not found'; download the file again"),
        (bytes(5000), r"begins with zeros: its download was interrupted; download the file again"),
        (b"", r"is empty; download the file again"),
    ],
    ids=["text", "zeros", "empty"],
)
def test_what_is_no_weights_file_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    source = tmp_path / name if name.endswith(".gguf") else write_folder(tmp_path / "model")
    (source if source.suffix == ".gguf" else source / name).write_bytes(content)
    refused(source, rf"{name} {said}")


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def all_but_a_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def few_bytes(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:30])


@pytest.mark.parametrize("cut", [half, all_but_a_byte, few_bytes])
@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf"])
def test_a_truncated_weights_file_is_refused(name: str, cut: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / name if name.endswith(".gguf") else write_folder(tmp_path / "model")
    if source.suffix == ".gguf":
        write_gguf(source)
    cut(source if source.suffix == ".gguf" else source / name)
    refused(source, rf"{name}.*Is the download complete\?")


@pytest.mark.parametrize("cut", [half, all_but_a_byte, few_bytes])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_truncated_file_beside_the_weights_is_refused(name: str, cut: Callable[[Path], None], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    cut(folder / name)
    refused(folder, rf"{name} is not (JSON|understood): .*; download the file again")


def test_a_truncated_part_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    first, second = split_gguf(tmp_path / "m.gguf", 2)
    half(second)
    refused(first, rf"{second.name}.*Is the download complete\?")


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_tensors(folder, {name: tensors[name] for name in names[:5]}, "model-00001-of-00002.safetensors")
    save_tensors(folder, {name: tensors[name] for name in names[5:]}, "model-00002-of-00002.safetensors")
    answers_as(folder, "llama")
    half(folder / "model-00002-of-00002.safetensors")
    refused(folder, r"model-00002-of-00002\.safetensors.*Is the download complete\?")
