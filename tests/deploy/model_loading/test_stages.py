"""A load runs through stages, each a function from what is known to what is known next."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import pytest

from deploy import demo
from deploy.model_loading import program
from deploy.model_loading.files import Formed, Opened
from deploy.model_loading.known import Asked, begin, carried
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import STAGES, advance
from server.interfaces import LoadError
from server.messages import FETCH, Load

LOAD = Load("demo", str(demo.MODEL), max_batch=2)


def test_each_stage_continues_where_the_stage_before_ends() -> None:
    for (before, after), stage in zip(pairwise([Asked, *STAGES]), STAGES.values(), strict=True):
        assert after.__mro__[1] is before
        assert get_type_hints(stage) == {"known": before, "return": after}
        adds = len(fields(after)) > len(fields(before))
        assert adds or after is Formed, f"{after.__name__} adds nothing"  # this stage only replaces the files


def test_a_command_runs_only_the_stages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_compiled", None)
    monkeypatch.setenv("RELAXSERVE_NO_CACHE", "1")
    opened = advance(begin(LOAD), Opened)
    assert type(opened) is Opened
    model = advance(opened, Servable)
    assert type(model) is Servable and model.files is opened.files
    assert advance(model, Servable) is model and advance(model, Opened) is model


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
