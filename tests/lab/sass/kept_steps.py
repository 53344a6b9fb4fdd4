"""Steps of models that the tests of several files read, compiled and assembled once. These files share an xdist group."""

from __future__ import annotations

from functools import cache

import pytest

from compiler.frontend.decoder import StepBounds
from deploy.bench.synthetic import synthetic_config
from tests.lab.sass.step import StepCode
from tests.lab.sass.tools import ToolMissing


@cache
def kept_step(shape: str, form: str, target: str = "sm_90a") -> StepCode:
    """Return the code of steps of up to 2,048 tokens and 64 sequences. Skip the test if one of NVIDIA's tools is missing."""
    try:
        return StepCode(synthetic_config(shape), form, target, StepBounds(2048, 64, 2048))
    except ToolMissing as missing:
        pytest.skip(str(missing))
