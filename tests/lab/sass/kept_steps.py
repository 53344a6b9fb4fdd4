"""Steps of models that the tests of several files read, compiled and assembled once. These files share an xdist group."""

from __future__ import annotations

from functools import cache

import pytest

from compiler.frontend.decoder import StepBounds
from deploy.bench.synthetic import synthetic_config
from tests.lab.sass.step import StepCode
from tests.lab.sass.tools import ToolMissing


def kept_step(shape: str, form: str, target: str = "sm_90a") -> StepCode:
    """Return the code of steps of up to 2,048 tokens and 64 sequences. Skip the test if one of NVIDIA's tools is missing."""
    try:
        return _built(shape, form, target)
    except ToolMissing as missing:
        pytest.skip(str(missing))


@cache  # the arguments have no defaults: `cache` would take a call that leaves one out for another call
def _built(shape: str, form: str, target: str) -> StepCode:
    return StepCode(synthetic_config(shape), form, target, StepBounds(2048, 64, 2048))
