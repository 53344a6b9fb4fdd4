"""Count the bytes that realtime sessions hold: all of them together, and the sessions of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from server.errors import AUDIO_MEMORY_FULL, ApiError

MOST_BYTES = 512 << 20  # most bytes that all sessions may hold together
MOST_OF_OWNER_BYTES = MOST_BYTES // 4  # most bytes of the sessions of one key, or of one session on a server without keys


class SessionMemory:
    """The bytes that all sessions hold, and their limits."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_of_owner: int = MOST_OF_OWNER_BYTES) -> None:
        """`most_bytes`: most bytes of all sessions together. `most_of_owner`: most bytes of the sessions of one key, or of one session
        without a key."""
        self.most_bytes, self.most_of_owner = most_bytes, most_of_owner
        self.num_bytes = 0
        self.of_owner = Counter[Hashable]()  # owners that hold nothing are left out


class Share:
    """The bytes of one session."""

    def __init__(self, memory: SessionMemory, owner: str) -> None:
        """`owner` names a key. An empty name means the session itself."""
        self._memory, self._owner = memory, owner or self
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Set the number of bytes that the session holds. If a larger number exceeds a limit, change nothing and raise ApiError."""
        memory, more = self._memory, num_bytes - self._num_bytes
        of_owner = memory.of_owner[self._owner] + more
        for num, most, name in (
            (memory.num_bytes + more, memory.most_bytes, "the sessions of this server"),
            (of_owner, memory.most_of_owner, "the sessions of the key" if isinstance(self._owner, str) else "the session"),
        ):
            if more > 0 and num > most:
                raise ApiError(AUDIO_MEMORY_FULL, f"{name} would hold {num} bytes of audio; expected at most {most}; try again later")
        self._num_bytes = num_bytes
        memory.num_bytes += more
        memory.of_owner[self._owner] = of_owner
        if not of_owner:
            del memory.of_owner[self._owner]
