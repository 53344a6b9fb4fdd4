"""The benchmark that compares chat APIs, run on the demo model. Speed is not tested."""

from __future__ import annotations

import json

import pytest

from tests.lab.serving.apis import APIS, main


def test_it_measures_every_api_beside_chat(capsys: pytest.CaptureFixture[str]):
    main(["--json", "--streams", "2", "--requests", "1", "--rounds", "1"])
    chat, *others = json.loads(capsys.readouterr().out)
    assert chat["value"] > 0 and [other["name"].removesuffix(" relative to chat") for other in others] == list(APIS)[1:]
    assert all(other["value"] > 0 and "front: " in other["note"] for other in others)
    assert [other["goal"] for other in others] == [0.97, 0.97, None]
