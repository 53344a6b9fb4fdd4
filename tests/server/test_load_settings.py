"""The front's specification of a model and the message to its worker share the settings of a load, and hold them to different ranges."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deploy.serve import load_of
from server.load_settings import LoadSettings
from server.messages import Load
from server.models.state import ModelSpec

OUTSIDE = {"max_context": 8, "max_batch": 0, "max_gap_ms": 0, "kv_cache_bytes": 0, "device": "tpu"}


@pytest.mark.parametrize("field", OUTSIDE)
def test_a_file_is_held_to_the_ranges_and_a_worker_refuses_itself(field: str) -> None:
    """A value of the command line reaches the worker as it is: if the worker could not read its message, it would end without a reason."""
    outside: dict[str, Any] = {"name": "m", "source": "org/m", field: OUTSIDE[field]}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(outside, ModelSpec)
    load = load_of(ModelSpec(**outside))
    assert getattr(load, field) == OUTSIDE[field] and msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=Load) == load


def test_a_worker_gets_every_setting() -> None:
    others: dict[type, Any] = {str: "x", bool: True}
    given = {name: others.get(type(value), 7) for name, value in msgspec.structs.asdict(LoadSettings("m", "s")).items()}
    load = load_of(ModelSpec(**given), "secret")
    assert {name: getattr(load, name) for name in given} == given and load.hub_token == "secret"
