"""Synthetic models of some families cannot be written as files. They are refused, and the error names the command that measures them."""

from __future__ import annotations

import pytest

from deploy.bench.checkpoint import PREFIX, model_folder
from server.settings import SettingsError


@pytest.mark.parametrize(("name", "family"), [("0.6b-mamba", "granitemoehybrid"), ("16b-latent", "deepseek_v2")])
def test_models_whose_files_cannot_be_written_are_refused(name: str, family: str) -> None:
    refused = pytest.raises(SettingsError, match=f"family {family} are not written as files; `relaxserve bench model` measures them")
    with refused, model_folder(PREFIX + name):
        pass
