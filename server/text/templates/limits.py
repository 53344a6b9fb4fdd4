"""Define the limits of rendering a chat template, and the variables that clients may not define. This module does not import Jinja, so that
the front can import it: only the processes of `server.isolated` compile and render templates, and need Jinja."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one rendering, with all its tries."""

    time_s: float  # CPU time
    memory_bytes: int  # bytes of all texts and lists that a rendering makes, also of those that it no longer holds

    @property
    def search_chars(self) -> int:
        """The number of character comparisons allowed in one search. They take half of `time_s` in the worst case."""
        return int(self.time_s * (1 << 29))


LIMITS = Limits(time_s=2.0, memory_bytes=256 << 20)

GLOBAL_NAMES = frozenset({"range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"})  # defined in `sandbox.py`
RESERVED = GLOBAL_NAMES | {"messages", "tools", "add_generation_prompt", "continue_final_message", "self"}
