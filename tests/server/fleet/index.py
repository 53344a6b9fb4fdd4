"""An index of a replica's prefix cache that knows nothing but its events, as a router's. It reads vLLM's wire format with msgspec alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Index:
    def __init__(self) -> None:
        self.pages: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = {}  # by group and hash: the parent, and the page's tokens
        self.sizes: dict[int, int] = {}
        self.number = 0  # of the next batch

    def feed(self, number: int, batch: bytes) -> None:
        assert number == self.number, "a batch is missing"
        self.number += 1
        time_s, events, rank = msgspec.msgpack.decode(batch)
        assert time_s > 0 and rank == 0
        for event in events:
            match event:
                case ["BlockStored", hashes, parent, tokens, size, None, "GPU", *more]:
                    group = more[2] if more else 0
                    self.sizes[group] = size
                    assert len(tokens) == size * len(hashes)
                    pages = self.pages.setdefault(group, {})
                    for i, page in enumerate(hashes):
                        pages[page] = parent, tuple(tokens[i * size : (i + 1) * size])
                        parent = page
                case ["BlockRemoved", hashes, "GPU", *more]:
                    for page in hashes:
                        del self.pages[more[0] if more else 0][page]
                case ["AllBlocksCleared"]:
                    self.pages.clear()
                case _:
                    raise AssertionError(event)

    def num_found(self, token_ids: Sequence[int], most: int) -> int:
        """Return how many of the first `most` tokens are in full pages, for a model of one group and prompts without salts."""
        pages, size = self.pages.get(0, {}), self.sizes.get(0, 16)
        by_content = {entry: page for page, entry in pages.items()}
        parent, num = None, 0
        while num + size <= most and (page := by_content.get((parent, tuple(token_ids[num : num + size])))) is not None:
            parent, num = page, num + size
        return num
