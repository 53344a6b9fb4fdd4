"""Write models as users have them on their disks, and load them as the front and a worker load them together."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from compiler.frontend.weights import open_safetensors
from deploy.model_loading.files import Opened
from deploy.model_loading.known import begin
from deploy.model_loading.load import loaded
from deploy.model_loading.stages import advance
from deploy.model_loading.tokenizer import load_tokenizer
from deploy.settings import check_models, model_spec
from runtime.cache_groups import PAGE_SIZE
from server.engine.step_model import Places, StepBatch
from server.engine.worker import LoadedModel
from server.interfaces import LoadError
from server.messages import Load
from server.models.state import ModelSpec
from server.settings import SettingsError
from server.text.tokenizer import Tokenizer
from tests.deploy.gguf_files import VOCAB

GOLDEN = Path(__file__).parents[2] / "golden" / "models"


@dataclass(frozen=True)
class Brought:
    spec: ModelSpec
    tokenizer: Tokenizer
    loaded: LoadedModel

    def logits(self, tokens: Any) -> Any:
        """Return the logits after the last of these tokens."""
        model, place = self.loaded.step_model, np.arange(len(tokens), dtype=np.int32)
        assert model is not None
        pages = np.arange(1, 2 + (len(tokens) - 1) // PAGE_SIZE, dtype=np.int32)[None]
        count = np.array([len(tokens)], np.int32)
        places = (Places(place + PAGE_SIZE, pages),) * len(model.limits.groups)
        batch = StepBatch(np.asarray(tokens, np.int32), place, np.append(0, count).astype(np.int32), place * 0, count, places, count - 1)
        return model.download(model.run(batch))[0]


def bring(source: Path | str, **settings: Any) -> Brought:
    """Load a model that is named on the command line. Raise the error with which it is refused."""
    spec = model_spec(str(source))
    check_models([spec])
    asked = Load(spec.name, spec.source, **{"quantize": "f32", "max_batch": 2, **settings})
    opened = advance(begin(asked), Opened)  # the front reads the tokenizer after that
    return Brought(spec, load_tokenizer(spec.source), loaded(opened))


def answers_as(source: Path | str, case: str) -> Brought:
    """Load a model, and require the logits of the golden model `case`."""
    brought, golden = bring(source), np.load(GOLDEN / case / "golden.npz")
    expected = golden["logits"][-1]
    assert np.abs(brought.logits(golden["prompt"]) - expected).max() < 2e-4 * np.abs(expected).max()
    return brought


def refused(source: Path | str, pattern: str) -> None:
    """Require that a model is refused by one line that matches the pattern."""
    with pytest.raises((LoadError, SettingsError)) as caught:
        bring(source)
    message = str(caught.value)
    assert re.search(pattern, message) and "\n" not in message.strip(), message


def write_folder(folder: Path, case: str = "llama", **config: Any) -> Path:
    """Write a golden model with a tokenizer of one token per word. `config` changes fields of its config.json."""
    shutil.copytree(GOLDEN / case, folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(VOCAB)}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    change_json(folder / "config.json", **config)
    return folder


def change_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, or remove those that are None."""
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.unlink(missing_ok=True)  # the copy may be a link
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def tensors_of(folder: Path) -> dict[str, Any]:
    source = open_safetensors(folder)
    return {name: np.array(source.read(name)) for name in source.tensors}


def save_tensors(folder: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> None:
    (folder / name).unlink(missing_ok=True)
    save_file(tensors, folder / name)


def split_gguf(path: Path, count: int) -> list[Path]:
    """Split a GGUF file as llama.cpp's llama-gguf-split does, and return the parts."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path, "qwen2", split_max_tensors=-(-len(reader.tensors) // count))
    for field in reader.fields.values():
        kind = field.types[0] if field.types else None
        if kind is None or field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.unlink()
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def in_hub_cache(cache: Path, files: Path, *, repo: str = "models--org--Tiny", commit: str = "c0ffee", main: bool = True) -> Path:
    """Move files to a repository of the hub's cache, where a snapshot has links to them, and return the folder of the repository."""
    folder = cache / repo
    (snapshot := folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(files.iterdir())):
        blob = folder / "blobs" / f"{number:064x}"
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return folder
