"""Models that embed texts and images give the vectors of transformers (`make_joint.py`), with the same bits in every batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from compiler.frontend.encoder import ENTRY, EncodeBounds, build_encode
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import load_config, parse_config
from compiler.frontend.seeing import ENTRY as SEE
from deploy.model_loading.files import dtypes_of, open_files
from deploy.model_loading.seeing import seeing_limits
from deploy.model_loading.serving import EncoderModel
from runtime.parts import InParts, whole
from runtime.session import Session
from server.engine.step_model import EmbedLimits
from server.messages import Crop
from tests.compiler.frontend.calls import bound_session, interpreted_call
from tests.golden.joint import SIZE, SUBJECTS, TEXTS, Joint
from tests.golden.media import SIZES


class Interpreted:
    """Has the method `call` of a session, but interprets the program."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def in_parts(self, entry: str, *args: Any) -> InParts[Any]:
        yield
        return self.call(entry, *args)


def made(subject: Joint, *, is_compiled: bool) -> EncoderModel:
    files = open_files(subject.folder)
    module = build_encode(files.config, dtypes_of(files.weights), EncodeBounds(512, 32), WeightFormat(32))
    assert files.config.vision is not None
    limits = EmbedLimits(files.config.vocab_size, SIZE, files.config.max_context, 512, 32, seeing_limits(files.config.vision, files.config))
    if is_compiled:
        session = bound_session(module, files.weights, (ENTRY, SEE))
        return EncoderModel(session, limits, files.config.vision, tells_pairs_apart=False)
    call = interpreted_call(module, files.weights)
    return EncoderModel(cast(Session, Interpreted(call)), limits, files.config.vision, tells_pairs_apart=False)


@cache
def model_of(name: str, *, is_compiled: bool) -> EncoderModel:
    return made(SUBJECTS[name], is_compiled=is_compiled)


def crops_of(subject: Joint) -> list[Crop]:
    crops = [subject.arrays[f"crop_{number}"] for number in range(len(SIZES))]
    edges = [(crop.shape[0], crop.shape[1]) if subject.square == 0 else (subject.square, subject.square) for crop in crops]
    return [
        Crop.of(crop.tobytes(), crop.shape[0] // rows, crop.shape[1] // columns) for crop, (rows, columns) in zip(crops, edges, strict=True)
    ]


def tokens_of(subject: Joint) -> list[list[int]]:
    return [subject.arrays[f"tokens_{number}"].tolist() for number in range(len(TEXTS))]


def run(model: EncoderModel, texts: Sequence[Sequence[int]]) -> Any:
    return model.run(texts, [None] * len(texts))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", SUBJECTS)
def test_vectors_are_those_of_transformers(name: str, is_compiled: bool) -> None:
    subject, model = SUBJECTS[name], model_of(name, is_compiled=is_compiled)
    for number, (text, image) in enumerate(zip(run(model, tokens_of(subject)), whole(model.see(crops_of(subject))), strict=True)):
        assert np.abs(text - subject.arrays[f"text_{number}"]).max() < 2e-4
        assert np.abs(image - subject.arrays[f"vector_{number}"]).max() < 2e-4


@pytest.mark.parametrize("name", SUBJECTS)
def test_vectors_are_the_same_bits_alone(name: str) -> None:
    subject, model = SUBJECTS[name], model_of(name, is_compiled=True)
    crops, texts = crops_of(subject) * 2, tokens_of(subject)
    np.testing.assert_array_equal(whole(model.see(crops)), np.concatenate([whole(model.see([crop])) for crop in crops]))
    np.testing.assert_array_equal(run(model, texts), np.concatenate([run(model, [text]) for text in texts]))


def test_texts_are_masked_and_padded_as_in_training() -> None:
    found = {name: load_config(subject.folder).encoder for name, subject in SUBJECTS.items()}
    assert {name: (one.looks_back, one.is_padded) for name, one in found.items() if one} == {
        "clip": (True, False),
        "siglip": (False, True),
        "siglip2": (False, True),
    }


@pytest.mark.parametrize(
    ("name", "part", "field", "value"),
    [
        ("clip", "", "projection_dim", 0),
        ("clip", "text_config", "hidden_act", "xielu"),
        ("clip", "vision_config", "num_attention_heads", 5),
        ("clip", "text_config", "unheard_of", 1),
        ("siglip", "text_config", "projection_size", 12),
        ("siglip", "vision_config", "vision_use_head", False),
        ("siglip", "vision_config", "patch_size", 64),
        ("siglip2", "text_config", "projection_size", 12),
        ("siglip2", "vision_config", "vision_use_head", False),
        ("siglip2", "vision_config", "num_patches", 35),
    ],
)
def test_other_configurations_are_refused(name: str, part: str, field: str, value: object) -> None:
    given = json.loads(json.dumps(SUBJECTS[name].config))
    (given[part] if part else given)[field] = value
    with pytest.raises(ConfigError, match=field if field != "hidden_act" else "xielu"):
        parse_config(given)


def test_older_files_state_sizes_twice() -> None:
    """Older configurations of CLIP state sizes in `text_config` and in `text_config_dict`. The latter takes precedence, and fields that it
    lacks have the defaults of transformers."""
    given = SUBJECTS["clip"].config
    config = parse_config({**given, "text_config_dict": {"hidden_size": 48, "num_hidden_layers": 5}, "vision_config_dict": None})
    assert (config.hidden_size, config.num_layers, config.vocab_size, config.num_heads) == (48, 5, 49_408, 8)
    assert parse_config({**given, "text_config_dict": None}) == parse_config(given)


def test_a_folder_without_the_file_of_the_image_processor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SUBJECTS["clip"].config))
    with pytest.raises(ConfigError, match="has no preprocessor_config"):
        load_config(tmp_path)
