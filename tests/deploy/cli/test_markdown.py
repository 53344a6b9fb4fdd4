"""While an answer arrives, the terminal shows it as rendered Markdown."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from deploy.cli.markdown import MarkdownWriter, _rendered

ANSWER = """# Rivers

A *short* list with `code` and **bold**:

1. Amazon
   - in Brazil
2. Nile

| River | Length |
|---|---|
| Nile | 6650 |

```python
x = 1

y = 2
```

> They flow
> downhill.

The end.
"""
CONTROL = re.compile(r"\x1b\[(\d*)([AK])|\x1b\[\?25[lh]|\x1b\[[\d;]*m")


def written(pieces: list[str], *, height: int = 40) -> tuple[str, str]:
    """Write the pieces of an answer as Markdown to a fake terminal. Return all output, and what the screen shows at the end."""
    file = io.StringIO()
    with MarkdownWriter(
        Console(file=file, force_terminal=True, width=60, height=height, color_system="standard", legacy_windows=False)
    ) as writer:
        for piece in pieces:
            writer.write(piece)
    return file.getvalue(), screen(file.getvalue())


def screen(text: str) -> str:
    """Return what a terminal of unlimited height shows after this output. The function supports newlines, carriage returns, cursor up and
    erase line."""
    lines, row, column, at = [""], 0, 0, 0
    while at < len(text):
        control = CONTROL.match(text, at)
        if control is not None:
            match control[2]:
                case "A":
                    row = max(0, row - int(control[1] or 1))
                case "K":
                    lines[row] = ""
                case _:
                    pass  # the sequence sets a colour, or hides or shows the cursor
            at = control.end()
            continue
        assert text[at] != "\x1b", f"the terminal of this test does not know {text[at : at + 8]!r}"
        match text[at]:
            case "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            case "\r":
                column = 0
            case char:
                lines[row] = f"{lines[row]:{column}}"[:column] + char + lines[row][column + 1 :]
                column += 1
        at += 1
    return "\n".join(line.rstrip() for line in lines).strip()


def test_markdown_is_rendered() -> None:
    text, shown = written([ANSWER])
    assert "\x1b[1mbold\x1b[0m" in text and "\x1b[3mshort\x1b[0m" in text
    for plain in (
        "Rivers",
        "A short list with code and bold:",
        " 1 Amazon",
        "• in Brazil",
        "Nile",
        "x = 1",
        "They flow downhill.",
        "The end.",
    ):
        assert shown.count(plain) >= 1, plain
    assert not re.search(r"\*\*|```|^#|\|---", shown, re.MULTILINE)


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(1, len(ANSWER) - 1), max_size=40), height=st.sampled_from([5, 12, 40]))
def test_the_screen_is_the_same_for_every_split_of_the_answer(cuts: list[int], height: int) -> None:
    ends = sorted({0, len(ANSWER), *cuts})
    pieces = [ANSWER[a:b] for a, b in itertools.pairwise(ends)]
    assert written(pieces, height=height)[1] == written([ANSWER])[1]


def test_what_has_come_stays_when_an_answer_is_interrupted() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=40, color_system=None)
    with pytest.raises(KeyboardInterrupt), MarkdownWriter(console) as writer:
        writer.write("One.\n\nTwo, and")
        raise KeyboardInterrupt
    assert screen(file.getvalue()) == "One.\n\nTwo, and"
    assert file.getvalue().endswith("\x1b[?25h") or file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex(
        "\x1b[?25l"
    )  # the last escape sequence for the cursor shows it again


def test_a_block_that_is_taller_than_the_terminal_is_printed_once() -> None:
    """If a block is taller than the terminal, only the end of the block is redrawn while the block arrives. Redrawing all of it would leave
    partial copies in the scrollback."""
    lines = [f"line {number}  \n" for number in range(50)]
    shown = written(lines, height=8)[1]
    assert [shown.count(f"line {number}") for number in (20, 49)] == [1, 1]


@pytest.mark.parametrize("char", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_only_line_feeds_and_carriage_returns_end_lines(char: str) -> None:
    """Markdown knows no other ends of lines, so a block is not cut in its middle."""
    text = f"One{char}two{char}three{char}four.\n\n```\na = 1\nb = 2\n```\n\nEnd.\r\n\r\nAfter\rthe end.\n"
    whole = io.StringIO()
    Console(file=whole, force_terminal=True, width=60, height=40, color_system="standard", legacy_windows=False).print(_rendered(text))
    assert words_of(screen(written([text])[0])) == words_of(screen(whole.getvalue()))


def words_of(text: str) -> list[list[str]]:
    """Return the words of each line that is not empty."""
    return [words for line in text.split("\n") if (words := [word for word in line.split(" ") if word])]
