"""Writes the examples of Ollama's Python and JavaScript clients, as their authors publish them, to one file.

    pip download --no-deps --no-binary :all: ollama==0.6.3 && tar xf ollama-0.6.3.tar.gz
    npm pack ollama@0.6.4 && tar xf ollama-0.6.4.tgz
    python tests/golden/make_ollama_examples.py ollama-0.6.3 package ollama-js

`ollama-js` is a clone of the JavaScript client's repository, at the commit f23d7ee.

`vendors/ollama_examples.json` has for each client its version, its licence, and its programs: the files below `examples`, and the blocks of
code of its README. Blocks that only name a function, such as `ollama.chat(request)`, and blocks for the vendor's own address are left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

FILE = Path(__file__).parent / "vendors" / "ollama_examples.json"
FOREIGN = ("https://ollama.com", "(request)", "-cloud'")


def blocks(readme: Path, language: str) -> dict[str, str]:
    """Return the programs of a README, by their number."""
    found = re.findall(rf"^```{language}\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    kept = [text for text in found if not any(word in text for word in FOREIGN)]
    return {f"README {number}": text for number, text in enumerate(kept, 1)}


def files(folder: Path, *endings: str) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in endings)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def main() -> None:
    python, package, repository = map(Path, sys.argv[1:])
    found = {
        "python": {
            "source": "ollama 0.6.3 of PyPI, its source archive",
            "licence": (python / "LICENSE").read_text(),
            "programs": {**blocks(python / "README.md", "python"), **files(python / "examples", ".py")},
        },
        "javascript": {
            "source": "ollama 0.6.4 of npm, and the repository ollama/ollama-js at f23d7ee",
            "licence": (repository / "LICENSE").read_text(),
            "programs": {**blocks(package / "README.md", "(?:javascript|typescript)"), **files(repository / "examples", ".ts", ".mjs")},
        },
    }
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
