"""A load runs through stages, each a function from what is known to what is known next."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from deploy import demo
from deploy.model_loading import program
from deploy.model_loading.files import Opened
from deploy.model_loading.known import Asked, begin, carried
from deploy.model_loading.load import loaded
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import STAGES, advance
from deploy.quantizing.kept import Result
from server.interfaces import LoadError
from server.messages import FETCH, Load

LOAD = Load("demo", str(demo.MODEL), max_batch=2)


def test_each_stage_continues_where_the_stage_before_ends() -> None:
    for (before, after), stage in zip(pairwise([Asked, *STAGES]), STAGES.values(), strict=True):
        assert after.__mro__[1] is before
        assert get_type_hints(stage) == {"known": before, "return": after}
        assert len(fields(after)) > len(fields(before)), f"{after.__name__} adds nothing"


def test_a_command_runs_only_the_stages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_compiled", None)
    monkeypatch.setenv("RELAXSERVE_NO_CACHE", "1")
    opened = advance(begin(LOAD), Opened)
    assert type(opened) is Opened
    model = advance(opened, Servable)
    assert type(model) is Servable and model.files is opened.files
    assert advance(model, Servable) is model and advance(model, Opened) is model


def test_a_load_looks_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a stage has found out is a field of its result. Later stages do not look again, neither for the cache nor at the files."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    looks: list[str] = []

    def counted(place: str) -> None:
        module, _, name = place.rpartition(".")
        looked = getattr(import_module(module), name)
        monkeypatch.setattr(place, lambda *args: looks.append(name) or looked(*args))

    for place in (
        "deploy.model_loading.known.kept",
        "deploy.model_loading.files.open_files",
        "deploy.quantizing.kept.read_text",
        "deploy.model_loading.description.fingerprint_of",
        "deploy.model_loading.costs.step_costs",
    ):
        counted(place)
    monkeypatch.setattr("deploy.quantizing.quantize.quantise", lambda *_: Result({}, {}))
    loaded(begin(msgspec.structs.replace(LOAD, quantize="4bit")))
    assert sorted(looks) == ["fingerprint_of", "kept", "open_files", "read_text", "step_costs"]


def test_an_unsafe_cache_refuses_a_load_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match=str(tmp_path)):
        begin(LOAD)


def test_a_stage_runs_again_with_something_else_in_place_of_what_was_known() -> None:
    model = advance(begin(LOAD), Servable)
    other = advance(Opened(**carried(model, Opened, load=Load("demo", str(demo.MODEL), "f32", max_batch=2))), Servable)
    assert other.files is model.files
    assert [m.mode.format.bits for m in (model, other)] == [16, 32]


def test_the_front_hears_that_files_are_there_only_if_they_can_be_opened(tmp_path: Path) -> None:
    """The front reads the tokenizer as soon as it hears of another part than fetching. A model that cannot be opened must be refused by its
    own message, not by the tokenizer's."""
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    told: list[str] = []
    with pytest.raises(LoadError, match="model_type 'unheard_of' is not known"):
        advance(begin(Load("m", str(tmp_path)), lambda part, _: told.append(part)), Opened)
    assert told == [FETCH]
