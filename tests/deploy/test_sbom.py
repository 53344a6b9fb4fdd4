"""The bill of materials lists every installed package with the fields that the schema of CycloneDX 1.6 requires."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.sbom import document

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy.sbom", "constraints.txt"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_the_bill_has_the_required_fields(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    for component in [bill["metadata"]["component"], *bill["components"]]:
        assert component["type"] in ("application", "library") and component["name"] and component["version"]
        assert re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", component["purl"])
        for licence in component.get("licenses", []):
            assert licence.keys() == {"expression"} or licence["license"].keys() == {"name"}
        assert [
            one for one in component.get("hashes", []) if one["alg"] != "SHA-256" or not re.fullmatch("[0-9a-f]{64}", one["content"])
        ] == []


def test_references_are_unique_and_lead_somewhere(bill: dict[str, Any]) -> None:
    references = [component["bom-ref"] for component in [bill["metadata"]["component"], *bill["components"]]]
    assert len(set(references)) == len(references)
    assert {one["ref"] for one in bill["dependencies"]} == set(references)
    assert {target for one in bill["dependencies"] for target in one["dependsOn"]} <= set(references)
    needed = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}[bill["metadata"]["component"]["bom-ref"]]
    assert any(target.startswith("pkg:pypi/numpy@") for target in needed)


def test_all_that_is_installed_has_a_licence_and_hashes(bill: dict[str, Any]) -> None:
    # in a new process: some packages add folders with further packages to the search path of a process that imports them
    names = "from importlib.metadata import distributions; print(*(one.name for one in distributions()))"
    found = subprocess.run([sys.executable, "-c", names], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(bill["components"]) == len({re.sub(r"[-_.]+", "-", name).lower() for name in found}) - 1
    numpy = next(component for component in bill["components"] if component["name"] == "numpy")
    assert numpy["licenses"] and len(numpy["hashes"]) > 10


def test_an_environment_without_relaxserve_is_refused() -> None:
    with pytest.raises(SystemExit, match="relaxserve is not installed for"):
        document([], "")
