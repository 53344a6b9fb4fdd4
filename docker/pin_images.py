"""Pin the images of other projects that the Dockerfiles and compose.yaml use.

`python docker/pin_images.py` writes behind each tag the digest that the registry has for it now. A digest names the content, so nobody can
replace the image behind the tag. It needs docker with buildx, and the network.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("docker/cpu.Dockerfile", "docker/cuda.Dockerfile", "deploy/compose.yaml")
# a name with a tag, and maybe a digest; images without a tag are built from this project
REFERENCE = re.compile(r"^(?P<start>ARG BASE=|\s+image: )(?P<name>[\w./-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?$", re.MULTILINE)


def unpinned(root: Path = ROOT) -> set[str]:
    """Return the images that are named by a tag alone."""
    return {found["name"] for file in FILES for found in REFERENCE.finditer((root / file).read_text()) if not found["digest"]}


def pin(root: Path = ROOT) -> None:
    for file in FILES:
        text = (root / file).read_text()
        (root / file).write_text(REFERENCE.sub(lambda found: f"{found['start']}{found['name']}@{digest_of(found['name'])}", text))


def digest_of(name: str) -> str:
    command = ["docker", "buildx", "imagetools", "inspect", name, "--format", "{{.Manifest.Digest}}"]
    digest = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise SystemExit(f"docker gave {digest!r:.80} as the digest of {name}; expected sha256: and 64 hexadecimal digits")
    return digest


if __name__ == "__main__":
    pin()
