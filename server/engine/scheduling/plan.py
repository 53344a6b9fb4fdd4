"""The plan of a step: which tokens it runs, and what is encoded before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from server.engine.request import Sequence
from server.engine.scheduling.cache_pool import Copy
from server.engine.step_model import Excerpts, Heard
from server.messages import IDLE

FADES = 0.98  # the estimate of the longest part of an encoding is multiplied by this factor with each briefer part


class Item(Struct, eq=False):
    """Tokens start .. start + count - 1 of a sequence in a plan. The last `num_rows` of them give rows of logits: one row to draw the next
    token from, more if log-probabilities of the prompt are requested, or none. Tokens of a text to embed give rows of hidden states
    instead."""

    seq: Sequence
    start: int
    count: int
    num_rows: int
    draws: bool  # a token is drawn from the last row; for a text to embed: its last token is among these tokens
    is_prefill: bool  # the tokens are of a prompt, or of a preempted sequence that is computed again
    num_context: int  # cost of reading the context before this chunk, in prompt tokens

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(slots=True, eq=False)
class Encoding:
    """The excerpts, or the audio, for which a sequence waits, and how far their encoding is."""

    seq: Sequence
    work: Excerpts | Heard  # excerpts are encoded together
    cost: int  # number of prompt tokens whose prefill takes about as long
    priority: int = field(init=False)  # of the sequence or, if better, of the encoding for which the parts of this one were dropped
    has_begun: bool = False  # a part has run since the encoding was chosen, or since its parts were dropped
    is_done: bool = False  # all parts have run
    longest_s: float = 0.0  # about the duration of the longest recent part; 0: no part has run

    def __post_init__(self) -> None:
        self.priority = self.seq.rank[0]

    @property
    def is_idle(self) -> bool:
        return self.priority == IDLE

    def observe(self, part_s: float) -> None:
        """Note that a part has run, which took `part_s` seconds."""
        self.has_begun = True
        self.longest_s = max(part_s, self.longest_s * FADES)


@dataclass(slots=True, eq=False)
class Plan:
    """What a step runs, and what is copied and encoded before it."""

    items: dict[Sequence, Item] = field(default_factory=dict[Sequence, Item])
    copies: list[Copy] = field(default_factory=list[Copy])  # pages to copy before the step
    num_tokens: int = 0
    num_rows: int = 0
    num_prefill: int = 0  # tokens of the items with `is_prefill`, which num_tokens includes
    num_context: int = 0  # sum of `num_context` of the items with `is_prefill`
    num_idle: int = 0  # tokens of idle sequences, which num_tokens includes
    encodings: list[Encoding] = field(default_factory=list[Encoding])  # encodings to run before the step, for as long as the pace allows
    needed: frozenset[bytes] = frozenset()  # keys of the excerpts that this step reads, or that the next chunk of a running prompt may read
    num_changes: int = 0  # how often items were added, removed or changed

    def add(self, item: Item) -> None:
        """Add an item, and count it."""
        self.items[item.seq] = item
        self.num_changes += 1
        self.num_tokens += item.count
        self.num_rows += item.num_rows
        self.num_idle += item.count * item.seq.is_idle
        if item.is_prefill:
            self.num_prefill += item.count
            self.num_context += item.num_context

    def remove(self, item: Item) -> None:
        """Remove an item, and subtract it from the counts."""
        del self.items[item.seq]
        self.num_changes += 1
        self.num_tokens -= item.count
        self.num_rows -= item.num_rows
        self.num_idle -= item.count * item.seq.is_idle
        if item.is_prefill:
            self.num_prefill -= item.count
            self.num_context -= item.num_context

    @property
    def num_decode(self) -> int:
        """The number of tokens of decoding sequences."""
        return self.num_tokens - self.num_prefill

    @property
    def has_work(self) -> bool:
        return bool(self.items or self.encodings)

    @property
    def encodes_idle(self) -> bool:
        """Whether the encodings before the step are for idle sequences. They are either all for idle sequences or all for others."""
        return any(encoding.is_idle for encoding in self.encodings)

    @property
    def in_order(self) -> list[Item]:
        """The items in their order in the batch: those with the most tokens in this step first, single tokens last. An item begins where a
        tile of attention begins if the number of tokens of each item before it is a multiple of a tile's tokens, as is always true of the
        first item. If a tile has tokens of several sequences, the CPU's kernel of attention computes them one by one."""
        return sorted(self.items.values(), key=lambda item: item.count, reverse=True)
