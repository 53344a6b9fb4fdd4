"""Relative links in the documents lead to existing files, and their anchors to headings in these files."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*#*$", re.MULTILINE)


def documents() -> list[str]:
    """Return the Markdown files that git lists. Outside a git checkout, return the Markdown files of the folders that contain documents."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return listed.stdout.split()
    found = [*ROOT.glob("*.md"), *(path for top in ("docs", "deploy", "tests", "runtime") for path in (ROOT / top).rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def prose(text: str) -> str:
    return CODE.sub("", FENCED.sub("", text))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    found: dict[str, int] = {}
    names = set[str]()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def broken(page: Path, text: str) -> list[str]:
    """Return the links in `text`, a part of `page`, that lead to no existing file or heading."""
    found = list[str]()
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", documents())
def test_links_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page, (ROOT / page).read_text()) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n\n## A\n\n## A\n\n```sh\n# not a heading\n```\n")
    good = "[a](#a-b-c) [b](page.md) [c](page.md#a-1) ![d](page.md) [e](https://f.g/#h) `[i](j)`"
    assert broken(page, good) == []
    bad = "[a](#a-b) [b](pages.md) [c](page.md#not-a-heading) ![d](d.png)"
    assert broken(page, bad) == ["#a-b", "pages.md", "page.md#not-a-heading", "d.png"]
