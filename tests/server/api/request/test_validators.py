"""The validators of bodies are built after the start, and not by it."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

from server.api.openai.responses.body import ResponseBody
from server.api.request import validators

PROGRAM = """
from server.api import endpoints
from server.api.openai.responses.body import ResponseBody
endpoints.shapes()
print(ResponseBody.__pydantic_complete__)
print(ResponseBody.model_validate({"input": "hi"}).input)
"""


def test_imports_build_no_validator_and_the_first_body_does() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[4], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "hi"]


def test_all_validators_are_built_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(validators, "AFTER_S", 0.0)
    monkeypatch.setattr(validators, "PAUSE_S", 0.0)
    asyncio.run(validators.build_validators())
    assert ResponseBody.__pydantic_complete__


def test_a_validator_that_cannot_be_built_hinders_no_other(monkeypatch, caplog) -> None:
    class Broken:
        __pydantic_complete__ = False

        @staticmethod
        def model_rebuild() -> None:
            raise RecursionError("too deep")

    class Sound(Broken):
        @staticmethod
        def model_rebuild() -> None:
            Sound.__pydantic_complete__ = True

    monkeypatch.setattr(validators, "AFTER_S", 0.0)
    monkeypatch.setattr(validators, "_below", lambda _parent: iter([Broken, Sound]))
    with caplog.at_level(logging.ERROR):
        asyncio.run(validators.build_validators())
    assert Sound.__pydantic_complete__
    assert [record.getMessage() for record in caplog.records] == ["the validator of Broken cannot be built"]
