"""The mode in which a model is served: what models with an encoder of images serve, and what several GPUs divide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from deploy.model_loading.files import open_files
from deploy.model_loading.known import begin
from deploy.model_loading.modes import Embedder, Encoder, Generator, Mode, mode_of
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from server.interfaces import LoadError
from server.messages import Load
from tests.deploy.gguf_files import write_random
from tests.golden.joint import SUBJECTS as JOINT
from tests.golden.vision import SUBJECTS as VISION


def mode(name: str, **settings: Any) -> Mode:
    folder = JOINT[name].folder
    return mode_of(open_files(folder), Load("m", str(folder), **settings))


def servable(folder: Path, **settings: Any) -> Servable:
    return advance(begin(Load("m", str(folder), **settings)), Servable)


def test_padded_texts_have_all_positions() -> None:
    for settings in ({}, {"max_context": 32}):
        assert mode("siglip", **settings).max_context == JOINT["siglip"].length == 32
    with pytest.raises(LoadError, match="max_context is 16; siglip pads every text to 32 tokens: leave max_context out"):
        mode("siglip", max_context=16)
    assert mode("clip", max_context=16).max_context == 16


def test_encoders_of_texts_and_images_say_that_they_embed_both() -> None:
    known = servable(JOINT["clip"].folder)
    assert isinstance(known.mode, Encoder) and known.serves[0] == "embeddings of texts and images"
    assert known.embedding_note.startswith("texts and images have vectors in one space")


def test_a_decoder_with_vision_that_embeds_says_nothing_of_images(tmp_path: Path) -> None:
    shutil.copytree(VISION["qwen2_vl"].folder, folder := tmp_path / "embedder")
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    known = servable(folder)
    assert isinstance(known.mode, Embedder) and known.serves == ("embeddings", "rerank and score by cosine")
    assert known.embedding_note == "rerank and score compare embeddings by their cosine"


def test_quantised_weights_are_divided_over_gpus_only_if_they_are_decoded(tmp_path: Path) -> None:
    write_random(path := tmp_path / "quantised.gguf", GGMLQuantizationType.Q8_0)
    load = Load("m", str(path), device="cuda", tensor_parallel=2)
    with pytest.raises(LoadError, match="quantised weights, which tensor_parallel does not divide yet: set quantize to bf16 or int8"):
        mode_of(open_files(path), load)
    found = mode_of(open_files(path), msgspec.structs.replace(load, quantize="int8"))
    assert isinstance(found, Generator)
    ranks = found.rank_weights(found.part())
    name = "model.layers.0.self_attn.o_proj.weight"
    parts, whole = [rank.read(name) for rank in ranks], found.weights.read(name)
    assert np.array_equal(np.concatenate(parts), whole) and len(parts) == 2
