"""GGUF files: split ones, and files that are no model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.deploy.gguf_files import write_gguf
from tests.e2e.user_files.bring import answers_as, refused, split_gguf
from tests.golden.gguf_models import write


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "Tiny.gguf")
    return split_gguf(tmp_path / "Tiny.gguf", 3)


@pytest.mark.parametrize("named", ["first", "last", "folder"])
def test_a_split_model_is_loaded_by_any_part_and_by_its_folder(named: str, parts: list[Path]) -> None:
    source = {"first": parts[0], "last": parts[-1], "folder": parts[0].parent}[named]
    assert answers_as(source, "qwen2").spec.name == (parts[0].parent.name if named == "folder" else "Tiny")


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_missing_part_is_named(missing: int, by_folder: bool, parts: list[Path]) -> None:
    parts[missing].unlink()
    source = parts[0].parent if by_folder else parts[missing - 1]
    refused(source, rf"parts of Tiny.* are missing: {parts[missing].name}\. Is the download complete\?")


def test_parts_under_other_names_are_refused(parts: list[Path]) -> None:
    for number, part in enumerate(parts):
        part.rename(part.with_name(f"part{number}.gguf"))
    refused(parts[0].with_name("part0.gguf"), r"part0\.gguf is one of 3 parts; expected a name that ends as in NAME-00001-of-00003\.gguf")


def test_parts_of_two_models_are_not_mixed(parts: list[Path], tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    write_gguf(other / "Tiny.gguf")
    shutil.copy(split_gguf(other / "Tiny.gguf", 4)[1], parts[1])
    refused(parts[0], r"Tiny-00002-of-00003\.gguf has split\.no 1 and split\.count 4, expected 1 and 3")


def no_model(kind: str, architecture: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_type(kind)
            writer.add_tensor("v.patch_embd.weight", np.ones((4, 32), np.float32))

        write(path, fill, architecture)

    return make


def vocabulary(path: Path) -> None:
    write(path, lambda writer: writer.add_tokenizer_model("gpt2"), "llama")


def unheard_of(path: Path) -> None:
    write(path, lambda writer: writer.add_tensor("a", np.ones((4, 32), np.float32)), "flux")


def encoder(path: Path) -> None:
    write(path, lambda writer: writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32)), "bert")


def older_imatrix(path: Path) -> None:
    path.write_bytes(np.array([3, 19], np.int32).tobytes() + b"blk.0.attn_q.weight" + bytes(400))


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        (
            "lora.gguf",
            no_model("adapter", "llama"),
            r"is an adapter \(LoRA\), .*: merge it into its model with llama\.cpp's llama-export-lora",
        ),
        ("mmproj.gguf", no_model("mmproj", "clip"), "is the image encoder of a model; load the file of the model itself"),
        ("mmproj-old.gguf", no_model("model", "clip"), "is the image encoder of a model; load the file of the model itself"),
        ("m.imatrix.gguf", no_model("imatrix", "llama"), "is an importance matrix, .*; load the file of the model itself"),
        ("steer.gguf", no_model("model", "controlvector"), "is a control vector, .*; load the file of the model itself"),
        ("vocab.gguf", vocabulary, "has no tensors, only a vocabulary; take the file with the model's weights"),
        ("flux.gguf", unheard_of, "general.architecture is 'flux'; known are .*llama"),
        ("bge.gguf", encoder, "general.architecture is 'bert'; .* Encoders are read from their safetensors files"),
        ("imatrix.dat", older_imatrix, r"is no GGUF file: it begins with b'\\x03"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_a_file_that_is_no_model_is_named(name: str, make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    refused(tmp_path / name, rf"{name}:? {said}")


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        block = np.zeros((1, 36), np.uint8)
        writer.add_tensor("blk.0.attn_q.weight", block, raw_dtype=gguf.GGMLQuantizationType.NVFP4)

    write(tmp_path / "m.gguf", fill, "llama")
    refused(tmp_path / "m.gguf", r"m\.gguf, tensor 'blk\.0\.attn_q\.weight': format NVFP4 is not read; .*Take a file in one of these")
