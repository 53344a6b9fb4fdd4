"""Count the bytes of decoded files that requests hold, and refuse to decode more when they hold too many."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from server.errors import ApiError, ErrorKind


class Held(Protocol):
    """A decoded file, or a part of one."""

    @property
    def num_bytes(self) -> int: ...


class HeldBytes:
    """The pixels or samples that requests hold. A request keeps them while it runs or waits, because they are sent to another worker if its
    worker dies."""

    def __init__(self, most_bytes: int, *, names: str, setting: str, refused: ErrorKind) -> None:
        """`names` says what is held (images or audio), `setting` is the name of the setting with the limit, and `refused` is the kind of
        the error that is raised when the limit is reached."""
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._names, self._setting, self._refused = names, setting, refused

    def require_room(self, param: str) -> None:
        """Raise ApiError if requests hold as much as they may. `param` is the field with the file."""
        if self.num_bytes >= self._most_bytes:
            held = f"the running and waiting requests hold {self.num_bytes >> 20} MiB of {self._names} ({self._setting})"
            raise ApiError(self._refused, f"{param} was not decoded, because {held}; try again later", param=param)

    def hold(self, parts: Sequence[Held], param: str) -> None:
        """Count the parts of a decoded file until they are freed. Raise ApiError if requests hold too much, because other files were
        decoded meanwhile."""
        self.require_room(param)
        for part in parts:
            self._count(part.num_bytes)
            weakref.finalize(part, self._count, -part.num_bytes).atexit = False

    def _count(self, num_bytes: int) -> None:
        """Count bytes that are held from now on, or no longer if the number is negative."""
        self.num_bytes += num_bytes
