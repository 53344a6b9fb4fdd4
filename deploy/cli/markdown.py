"""Render an answer as Markdown in the terminal while it is generated.

A complete block is printed once. The last block may still grow, so it is drawn again while pieces of the answer arrive. While the last
block is taller than the terminal, only its end is shown.
"""

from __future__ import annotations

import itertools
import re
import time
from types import TracebackType
from typing import Self

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

BETWEEN_DRAWS_S = 0.08  # least time between two drawings of the last block, unless a line ends
LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+$")  # a line as Markdown defines it; Python's splitlines also splits at other characters


class MarkdownWriter:
    """Prints one answer, piece by piece."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._parser = MarkdownIt().enable("table").enable("strikethrough")  # the extensions that rich enables
        self._rest = ""  # text of the incomplete last block
        self._has_printed = False  # whether a block was printed, which an empty line separates from the next one
        self._drawn_s = 0.0  # when the last block was last drawn
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Print the last block of the answer, even after an interrupt."""
        self._settle()
        self._live.update("")
        self._live.stop()
        self._print(self._rest)

    def write(self, piece: str) -> None:
        """Add a piece of the answer. Print the blocks that are complete, and draw the last block, unless the piece ends no line and the
        last drawing was less than BETWEEN_DRAWS_S ago: then only store the piece."""
        self._rest += piece
        now_s = time.monotonic()
        if "\n" not in piece and now_s - self._drawn_s < BETWEEN_DRAWS_S:
            return
        self._drawn_s = now_s
        self._settle()
        self._live.update(_End(self._rest), refresh=True)

    def _settle(self) -> None:
        """Print all blocks except the last, because only the last one can still change."""
        tokens = self._parser.parse(self._rest)
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None and token.nesting >= 0]
        if len(starts) < 2:
            return
        lines = LINE.findall(self._rest)
        self._live.update("", refresh=True)
        for start, end in itertools.pairwise(starts):
            self._print("".join(lines[start:end]))
        self._rest = "".join(lines[starts[-1] :])

    def _print(self, text: str) -> None:
        """Print a block. Print nothing if it has only white space."""
        if not text.strip():
            return
        if self._has_printed:
            self._console.print()
        self._has_printed = True
        self._console.print(_rendered(text))


class _End:
    """The last lines of a text that fit on the terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_rendered(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def _rendered(text: str) -> Markdown:
    return Markdown(text, code_theme="ansi_dark", inline_code_theme="ansi_dark")
