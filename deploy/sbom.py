"""Print a bill of materials of the installed packages in the format CycloneDX 1.6: `python -m deploy.sbom constraints.txt`.

The hashes of a package are those of its files that constraints.txt accepts. The output depends only on constraints.txt and on the installed
packages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:\w{64})+)", re.MULTILINE)


def document(installed: Iterable[Distribution], constraints: str, root: str = "relaxserve") -> dict[str, Any]:
    """Return the bill of materials of these packages. `constraints` is the text of constraints.txt, and `root` the package that needs the
    others. End the program with a message if `root` is not installed."""
    found = {_normal(one.name): one for one in installed}
    if root not in found:
        raise SystemExit(f"{root} is not installed for {sys.executable}; expected an environment made by `make setup`")
    hashes = {(_normal(name), version): re.findall(r"sha256:(\w+)", lines) for name, version, lines in _PIN.findall(constraints)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(found[root], "application", [])},
        "components": [
            _component(one, "library", hashes.get((name, one.version), [])) for name, one in sorted(found.items()) if name != root
        ],
        "dependencies": [{"ref": _url(one), "dependsOn": _needed(one, found)} for _, one in sorted(found.items())],
    }


def _component(one: Distribution, kind: str, hashes: list[str]) -> dict[str, Any]:
    """Describe a package. `kind` is CycloneDX's type of the component, and `hashes` are SHA-256 digests of its files."""
    component: dict[str, Any] = {"type": kind, "bom-ref": _url(one), "name": one.name, "version": one.version, "purl": _url(one)}
    if licences := _licences(one):
        component["licenses"] = licences
    if hashes:
        component["hashes"] = [{"alg": "SHA-256", "content": content} for content in hashes]
    return component


def _licences(one: Distribution) -> list[dict[str, Any]]:
    """Return the SPDX expression, or else the names in the package's classifiers, or else the field License unless it is a whole text.
    Return [] if the package gives none of them."""
    if expression := "".join(one.metadata.get_all("License-Expression") or []):
        return [{"expression": expression}]
    classifiers = [text.rpartition(" :: ")[2] for text in one.metadata.get_all("Classifier") or [] if text.startswith("License :: ")]
    given = "".join(one.metadata.get_all("License") or [])
    names = classifiers or ([given] if given and len(given) < 100 and "\n" not in given else [])
    return [{"license": {"name": name}} for name in names]


def _needed(one: Distribution, found: dict[str, Distribution]) -> list[str]:
    """Return the URLs of the installed packages that the package names as its requirements, except those that only an extra needs."""
    names = {_normal(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in one.requires or [] if "extra ==" not in text}
    return sorted(_url(found[name]) for name in names & found.keys())


def _url(one: Distribution) -> str:
    """Return the package URL (purl) of a package."""
    return f"pkg:pypi/{_normal(one.name)}@{one.version}"


def _normal(name: str) -> str:
    """Return a package's name in the form in which names that mean the same package are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print(json.dumps(document(distributions(), Path(sys.argv[1]).read_text()), indent=2))
