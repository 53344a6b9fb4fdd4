"""Apply the restrictions that a request's parameters set without a grammar: allowed and banned tokens, banned token sequences, the length
of think blocks, and the minimum number of tokens. Their masks are computed in this process, so they are never late."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from server.constraints.matcher import LATE, Late, Mask, Matcher
from server.constraints.process.wire import num_mask_words
from server.messages import SamplingParams

ALL = np.int32(-1)  # a word of a mask that allows all its 32 tokens


class Bans:
    """The restrictions that all choices of a request have in common. They are computed once, since a request may name hundreds of thousands
    of tokens."""

    def __init__(self, params: SamplingParams, ender_ids: frozenset[int], vocab_size: int) -> None:
        allowed, banned = params.allowed_token_ids, params.banned_token_ids
        self.params = params
        self.num_words = num_mask_words(vocab_size)
        self.mask: Mask | None = None  # the mask of allowed and banned tokens; None: there are neither
        if allowed or banned:
            self.mask = np.full(self.num_words, 0 if allowed else ALL, np.int32)
            _set(self.mask, allowed)
            _clear(self.mask, banned)
        self.ender_ids = sorted(ender_ids) if params.min_tokens else []  # banned until `min_tokens` tokens are drawn
        self.endings = _Endings(params.banned_sequences)
        # whether any restriction is about which tokens may come, not only about where the text may end
        self.restrict_text = self.mask is not None or bool(params.banned_sequences) or params.thinking is not None
        self.exist = self.restrict_text or bool(self.ender_ids)  # whether there is any restriction


class _Endings:
    """The tokens that would complete a banned sequence. A request may ban 2,048 sequences of hundreds of tokens each, and a prompt may make
    the model draw the tokens that these sequences have in common. So sequences that end alike are compared together."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        # The sequences are sorted by their tokens before the last one, read backwards, so that sequences in which these tokens end alike
        # are adjacent. The tokens are compared as big-endian bytes: comparing tuples that begin alike takes ten times as long.
        self._sorted = sorted(sequences, key=lambda sequence: struct.pack(f">{len(sequence) - 1}I", *sequence[-2::-1]))

    def after(self, drawn: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a sequence after the tokens `drawn`."""
        ordered, found = self._sorted, list[int]()
        # Each of ordered[low:high] has more than `depth` tokens before its last one; the last `depth` of these are the tokens drawn last.
        low, high = 0, len(ordered)
        for depth, token_id in enumerate(reversed(drawn)):
            if low == high:
                break
            at = -2 - depth  # index, from the end of a sequence, of the token that is compared
            if not ordered[low][at] == token_id == ordered[high - 1][at]:
                low = bisect_left(ordered, token_id, low, high, key=itemgetter(at))
                high = bisect_right(ordered, token_id, low, high, key=itemgetter(at))
            while low < high and len(ordered[low]) == -at:
                found.append(ordered[low][-1])
                low += 1
        return found


class Rules(Matcher):
    """Follows the tokens of one sequence and restricts its next token."""

    def __init__(self, bans: Bans, token_ids: Sequence[int] = ()) -> None:
        """`token_ids`: the tokens that the sequence has already."""
        self._bans = bans
        self._restart()
        self.advance(token_ids)

    @property
    def restrict_text(self) -> bool:
        """True if the rules restrict which tokens may come, not only where the text may end."""
        return self._bans.restrict_text

    def mask(self, grammar: Mask | None = None) -> Mask | None:
        """Return the mask of the next token, or None if every token may come. The mask excludes banned tokens, tokens that are not among
        the allowed ones, and tokens that would complete a banned sequence or, once the budget of thoughts is spent, open another think
        block. Before `min_tokens` tokens, it also excludes the tokens that end the text. If a think block has to close now, it excludes
        every token but the one that closes the block, unless `grammar`, the mask of the sequence's grammar, excludes that token: within a
        character, or before the label with which a block of some models begins. The block then ends as soon as the grammar allows it."""
        banned, closing = self._bans.endings.after(self._token_ids) + self._reopening(), self._closing()
        if closing is not None and grammar is not None and not _has(grammar, closing):
            closing = None
        if len(self._token_ids) < self._bans.params.min_tokens:
            banned += self._bans.ender_ids
        if not banned and closing is None:
            return self._bans.mask
        mask = np.full(self._bans.num_words, ALL, np.int32) if self._bans.mask is None else self._bans.mask.copy()
        _clear(mask, banned)
        if closing is not None:
            mask &= only(closing, self._bans.num_words)
        return mask

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow further tokens, and count the tokens in think blocks if the length of these blocks is limited."""
        thinking = self._bans.params.thinking
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if thinking is None:
                continue
            if self._thinks:
                self._thinks = token_id != thinking.close_id
                self._num_thought += self._thinks
            else:
                self._thinks = tuple(self._token_ids[-len(thinking.open_ids) :]) == thinking.open_ids

    def drop(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens."""
        token_ids = self._token_ids[: len(self._token_ids) - num_tokens]
        self._restart()
        self.advance(token_ids)

    def _restart(self) -> None:
        """Forget all tokens."""
        thinking = self._bans.params.thinking
        self._token_ids: list[int] = []
        self._thinks = thinking is not None and thinking.is_open
        self._num_thought = 0  # tokens in think blocks

    def _closing(self) -> int | None:
        """Return the token that closes the think block, if it must come now because the thoughts have spent their budget; otherwise
        None."""
        thinking = self._bans.params.thinking
        return thinking.close_id if thinking is not None and self._thinks and self._num_thought >= thinking.budget else None

    def _reopening(self) -> list[int]:
        """Return a list, which may be empty, of the token to ban now so that no other think block opens after the budget is spent. If
        several tokens open a block, ban the second one after the first, since a call or the content may also begin with the first."""
        thinking = self._bans.params.thinking
        if thinking is None or self._thinks or self._num_thought < thinking.budget:
            return []
        first, *others = thinking.open_ids
        if not others:
            return [first]
        return [others[0]] if self._token_ids[-1:] == [first] else []


class RuledMatcher(Matcher):
    """Combines a grammar and rules: a token is allowed if the grammar and the rules allow it."""

    def __init__(self, rules: Rules, grammar: Matcher) -> None:
        self._rules = rules
        self._grammar = grammar
        self.reads_logits = grammar.reads_logits

    def restrict(self, mask: Mask, logits: NDArray[np.float32]) -> Mask:
        return self._grammar.restrict(mask, logits)

    @property
    def is_complete(self) -> bool:
        return self._grammar.is_complete

    @property
    def is_late(self) -> bool:
        return self._grammar.is_late

    @property
    def has_mask(self) -> bool:
        return self._grammar.has_mask

    def poll(self) -> bool:
        return self._grammar.poll()  # rules are never late

    def prefetch_mask(self) -> None:
        self._grammar.prefetch_mask()

    def prefetch(self, token_id: int) -> None:
        self._grammar.prefetch(token_id)

    def mask(self) -> Mask | Literal[Late.LATE] | None:
        """Return the mask of the tokens that the rules and the grammar allow, LATE if the grammar's mask is late, or None if every token
        may come."""
        mask = self._grammar.mask()
        if mask is LATE:
            return LATE
        own = self._rules.mask(mask)
        return mask if own is None else own if mask is None else mask & own

    def advance(self, token_ids: Sequence[int]) -> None:
        self._rules.advance(token_ids)
        self._grammar.advance(token_ids)

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces, or none if rules restrict the text, because a forced token may be banned."""
        return [] if self._rules.restrict_text else self._grammar.forced()

    @property
    def is_choosing(self) -> bool:
        return self._grammar.is_choosing

    def candidates(self) -> list[int]:
        return self._grammar.candidates()

    def weigh(self, logprobs: dict[int, float]) -> None:
        self._grammar.weigh(logprobs)

    def refuses(self, token_id: int) -> bool:
        return self._grammar.refuses(token_id)

    def take_back(self) -> int:
        """Drop the drafted tokens from the grammar and from the rules. Return their number."""
        num_tokens = self._grammar.take_back()
        self._rules.drop(num_tokens)
        return num_tokens

    def let_go(self) -> bool:
        return self._grammar.let_go()


def matcher_of(bans: Bans, grammar: Matcher | None, token_ids: Sequence[int] = ()) -> Matcher | None:
    """Return a matcher for a sequence that has the tokens `token_ids` already, or None if every token is always allowed."""
    if not bans.exist:
        return grammar
    rules = Rules(bans, token_ids)
    return rules if grammar is None else RuledMatcher(rules, grammar)


def only(token_id: int, num_words: int) -> Mask:
    """Return the mask that allows one token."""
    mask = np.zeros(num_words, np.int32)
    _set(mask, [token_id])
    return mask


def _has(mask: Mask, token_id: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)


def _set(mask: Mask, ids: Sequence[int]) -> None:
    """Set the bits of tokens in a mask."""
    at = np.asarray(ids, np.int32)
    np.bitwise_or.at(mask.view(np.uint32), at >> 5, np.uint32(1) << (at & 31).astype(np.uint32))


def _clear(mask: Mask, ids: Sequence[int]) -> None:
    """Clear the bits of tokens in a mask."""
    at = np.asarray(ids, np.int32)
    np.bitwise_and.at(mask.view(np.uint32), at >> 5, ~(np.uint32(1) << (at & 31).astype(np.uint32)))
