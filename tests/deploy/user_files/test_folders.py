"""Folders as users have them: the hub's cache, folders with parts of a model, with something else, or with nothing that can be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.gguf_files import write_gguf
from tests.deploy.user_files.bring import (
    answers_as,
    change_json,
    in_hub_cache,
    refused,
    save_tensors,
    split_gguf,
    tensors_of,
    write_folder,
)

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def in_shards(folder: Path, *, index: bool) -> Path:
    tensors = tensors_of(write_folder(folder))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = dict.fromkeys(names[:5], NAMES[0]) | dict.fromkeys(names[5:], NAMES[1])
    for shard in NAMES:
        save_tensors(folder, {name: tensors[name] for name in names if places[name] == shard}, shard)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


# --- the hub's cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [".", "snapshots", "snapshots/c0ffee"])
def test_a_repository_in_the_hub_s_cache_is_loaded(named: str, tmp_path: Path) -> None:
    repo = in_hub_cache(tmp_path / "hub", write_folder(tmp_path / "made"))
    brought = answers_as(repo / named, "llama")
    assert brought.spec.name == "Tiny", "the model is called by its repository, not by a commit"


def test_a_gguf_file_in_the_hub_s_cache_keeps_its_name(tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    write_gguf(made / "Tiny-F32.gguf")
    repo = in_hub_cache(tmp_path / "hub", made)
    assert answers_as(repo / "snapshots" / "c0ffee" / "Tiny-F32.gguf", "qwen2").spec.name == "Tiny-F32"
    answers_as(repo, "qwen2")


def test_a_split_model_in_the_hub_s_cache_has_all_its_parts(tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    write_gguf(made / "Tiny.gguf")
    split_gguf(made / "Tiny.gguf", 2)
    repo = in_hub_cache(tmp_path / "hub", made)
    answers_as(repo / "snapshots" / "c0ffee" / "Tiny-00001-of-00002.gguf", "qwen2")


def test_of_several_snapshots_the_main_one_is_loaded(tmp_path: Path) -> None:
    repo = in_hub_cache(tmp_path / "hub", write_folder(tmp_path / "made"), main=False)
    (repo / "snapshots" / "badcafe").mkdir()
    refused(repo, r"models--org--Tiny does not say which of its snapshots to load: badcafe, c0ffee; name the folder of one")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c0ffee\n")
    answers_as(repo, "llama")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_to_a_blob_that_is_gone_is_named(name: str, tmp_path: Path) -> None:
    repo = in_hub_cache(tmp_path / "hub", write_folder(tmp_path / "made"))
    (repo / "snapshots" / "c0ffee" / name).resolve().unlink()
    refused(repo, rf"{name} cannot be read: it is a link to .*blobs/0+\d, which does not exist")


# --- weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_model_with_and_without_an_index(index: bool, tmp_path: Path) -> None:
    answers_as(in_shards(tmp_path / "model", index=index), "llama")


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_shard_is_named(missing: str, index: bool, tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "model", index=index)
    (folder / missing).unlink()
    refused(folder, rf"missing.*: {missing}\. Is the download complete\?")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_to_convert_them(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, rf"{name}: a pickle can run code .*\.save_pretrained\(NEW_DIR\) writes safetensors")


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    (write_folder(tmp_path / "model") / "pytorch_model.bin").write_bytes(b"x")
    answers_as(tmp_path / "model", "llama")


def test_a_folder_with_a_configuration_and_a_gguf_file_is_that_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    write_gguf(folder / "m.gguf")
    answers_as(folder, "qwen2")


# --- something else -----------------------------------------------------------------------------------------------------


def adapter(folder: Path) -> str:
    folder.mkdir()
    change_json(folder / "adapter_config.json", base_model_name_or_path="org/base", peft_type="LORA")
    return r"it is an adapter \(LoRA\) for 'org/base', .*merge_and_unload"


def nothing(folder: Path) -> str:
    folder.mkdir()
    return r"model has no config\.json; expected a model directory as downloaded from a hub, or a \.gguf file"


def several_models(folder: Path) -> str:
    for name in ("one", "two"):
        write_folder(folder / name)
    return r"model has no config\.json; name one of the models in it: one, two"


def several_files(folder: Path) -> str:
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        write_gguf(folder / name)
    return r"model has several models: a\.gguf, b\.gguf; name one of the files"


def image_encoder(folder: Path) -> str:
    folder.mkdir()
    write_gguf(folder / "mmproj-Tiny.gguf")
    return r"model has no config\.json"


def no_weights(folder: Path) -> str:
    (write_folder(folder) / "model.safetensors").unlink()
    return r"model has no weights; expected model\.safetensors"


def unknown(folder: Path) -> str:
    change_json(write_folder(folder) / "config.json", model_type="unheard_of")
    return "model_type 'unheard_of' is not known"


def publisher_s_format(folder: Path) -> str:
    folder.mkdir()
    change_json(folder / "params.json", dim=64)
    return r"params\.json belongs to a publisher's own format; take the model's files for transformers"


@pytest.mark.parametrize("make", [adapter, nothing, several_models, several_files, image_encoder, no_weights, unknown, publisher_s_format])
def test_a_folder_that_cannot_be_loaded_is_refused(make: Callable[[Path], str], tmp_path: Path) -> None:
    said = make(tmp_path / "model")
    refused(tmp_path / "model", said)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_file_of_a_folder_is_refused_with_the_folder(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    refused(folder / name, rf"{name} is one of the files of a model; name its folder, {folder}$")


def test_nothing_is_written_beside_a_model(tmp_path: Path) -> None:
    """A model may be in a folder that is read-only."""
    folder = write_folder(tmp_path / "model")

    def state() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}

    before = state()
    answers_as(folder, "llama")
    assert state() == before


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = write_folder(tmp_path / "model"), Path.open

    def denied(self: Path, *args: object, **options: object) -> object:
        if self.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", denied)
    refused(folder, r"model\.safetensors cannot be read: Permission denied")
