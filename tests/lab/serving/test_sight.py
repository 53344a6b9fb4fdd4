"""The benchmark of images: the files of its model, and its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.frontend.registry import parse_config
from tests.lab.serving import sight
from tests.lab.serving.sight import SCALE_FACTOR, Round, configuration, figures_of, tensors

ROUND = Round(first_s=20.0, second_s=0.5, seen_token_s=0.011, read_token_s=0.01, gap_s=0.4, usual_gap_s=0.01)


def test_the_tensors_are_those_of_the_configuration() -> None:
    config, found = parse_config(configuration()), tensors()
    vision = config.vision
    assert vision is not None
    places = {name.split(".layers.")[1].split(".")[0] for name in found if name.startswith("model.vision_model.encoder.layers")}
    assert places == {str(layer) for layer in range(vision.num_layers)}
    assert found["model.vision_model.encoder.layers.11.mlp.fc1.weight"][0] == [vision.intermediate_size, vision.hidden_size]
    assert found["model.text_model.layers.29.self_attn.k_proj.weight"][0] == [config.num_kv_heads * config.head_dim, config.hidden_size]
    assert found["model.connector.modality_projection.proj.weight"][0] == [config.hidden_size, vision.hidden_size * SCALE_FACTOR**2]


def test_figures() -> None:
    first, second, token, gap = figures_of([ROUND, replace(ROUND, second_s=1.0), replace(ROUND, gap_s=1.2)])
    assert (first.value, second.value, token.value) == (20.0, pytest.approx(0.025), pytest.approx(1.1))
    assert (gap.value, gap.goal) == (pytest.approx(1200.0), 1000)  # the longest gap counts


def test_a_stream_that_ends_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the other client's stream ends before the image is encoded, its gaps say nothing about the rest of the time."""
    stream = sight.Stream(0.0, 3, [0.0, 0.1, 0.2])

    async def asked(*_arguments: object) -> sight.Stream:
        return sight.Stream(0.05, 3, [5.0, 5.1, 5.2])

    async def soon(_seconds: float) -> None: ...

    monkeypatch.setattr(sight, "ask", asked)
    monkeypatch.setattr(sight, "_beside", lambda _url: stream)
    monkeypatch.setattr(sight.asyncio, "sleep", soon)
    with pytest.raises(RuntimeError, match="the other stream ended before the image was encoded"):
        sight.asyncio.run(sight.run_round("http://127.0.0.1:1", 0))


def test_the_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "tensors", lambda: {"lm_head.weight": ([4, 4], 0.0)})
    sight.write_model(tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"} <= written
