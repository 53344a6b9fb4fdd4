"""A lazy constraint applies from its trigger until its grammar is complete; all other text is unconstrained.

A lazy constraint helps the model to write optional tool calls correctly; no client demands it. So faults of a lazy constraint never fail a
request: if the constraint cannot be compiled or followed, the text is unconstrained. If the constraint has no process (ConstraintLost),
however, the methods of the matcher that ask a grammar raise the error: whether a process starts depends on the load of the machine, and the
text must not depend on the load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from server.constraints.grammar import Grammar
from server.constraints.isolated import IsolatedMatcher
from server.constraints.matcher import ConstraintError, ConstraintLost, Late, Mask, Matcher
from server.constraints.process.wire import num_mask_words
from server.constraints.rules import only
from server.constraints.tool_selection import ToolSelection
from server.messages import Trigger


class FirstGrammar:
    """The first of several grammars that can be compiled."""

    def __init__(self, grammars: Sequence[Grammar]) -> None:
        self._grammars = deque(grammars)
        self._is_compiled = False

    def poll(self) -> bool:
        """Compile the first grammar. If it cannot be compiled, drop it and go on with the next one. Return True once a grammar is compiled,
        or all were dropped. Raise ConstraintLost if there is no process to compile one."""
        while self._grammars and not self._is_compiled:
            try:
                if not self._grammars[0].poll():
                    return False
                self._is_compiled = True
            except ConstraintLost:
                raise
            except ConstraintError:
                self._grammars.popleft()
        return True

    @property
    def grammar(self) -> Grammar | None:
        """The first grammar that can be compiled, or None if none can be. Valid once `poll` has returned True."""
        return self._grammars[0] if self._grammars else None


class LazyMatcher(Matcher):
    """Follows a sequence that is unconstrained until a trigger. After the trigger token, the model first selects one of the offers (the
    first tokens of a call of each tool), if there are any; then the grammar `marked` applies. After the beginning of a call in plain JSON,
    the grammar `plain` applies. Where no grammar can be compiled, the text is unconstrained. The matcher is never complete: more text may
    always follow."""

    def __init__(self, marked: FirstGrammar, plain: FirstGrammar, trigger: Trigger, vocab_size: int, token_ids: Sequence[int] = ()) -> None:
        self._marked = marked
        self._plain = plain
        self._is_compiled = False  # `marked` and `plain` each have a compiled grammar, or none that can be compiled
        self._trigger = trigger
        self._vocab_size = vocab_size
        self._offers = tuple(offer for offer in trigger.offers if max(offer) < vocab_size)  # the model cannot draw other offers
        self._beginnings: dict[int, list[tuple[int, ...]]] = {}  # token sequences that begin a call in plain JSON, by their last token
        for beginning in trigger.plain:
            self._beginnings.setdefault(beginning[-1], []).append(beginning)
        self._tail: deque[int] = deque(maxlen=max(map(len, trigger.plain), default=0))  # the last unconstrained tokens
        self._thinks = trigger.is_open  # the tokens read so far end inside a think block
        self._at_start = True  # no token has been read yet
        # tokens that wait to be read, because the grammars are not compiled yet or the current grammar is late
        self._unread = deque(token_ids)
        self._selection: ToolSelection | None = None  # the selection of an offer, until one is selected; None: no selection is going on
        # matcher of the grammar that applies now, or None; dropped when the grammar is complete or cannot be followed, and by `let_go`
        self._begun: IsolatedMatcher | None = None
        self._num_begun = 0  # number of tokens with which this grammar began: the selected offer, or the beginning of the plain call

    @property
    def is_late(self) -> bool:
        return bool(self._unread) or (self._begun is not None and self._begun.is_late)

    @property
    def has_mask(self) -> bool:
        return self._begun is not None and self._begun.has_mask

    def poll(self) -> bool:
        """Compile the grammars, receive the answer of the current grammar, and read the tokens that waited. Return whether the matcher is
        compiled and not late."""
        if not self._is_compiled:
            self._is_compiled = all([self._marked.poll(), self._plain.poll()])
            if not self._is_compiled:
                return False
        if self._begun is not None:
            self._follow(self._begun.poll)
        self._read()
        return not self.is_late

    def prefetch_mask(self) -> None:
        if self._begun is not None:
            self._begun.prefetch_mask()

    def prefetch(self, token_id: int) -> None:
        if self._begun is not None:
            self._begun.prefetch(token_id)

    def mask(self) -> Mask | Literal[Late.LATE] | None:
        """If a single token continues all offers of a selection, return a mask that allows only this token. Otherwise return the mask of
        the grammar that applies: LATE if it is late, or None if every token may come next. Drop a grammar that cannot be followed, and
        return None."""
        if self._selection is not None and (forced := self._selection.forced()):
            return only(forced[0], num_mask_words(self._vocab_size))
        if self._begun is None:
            return None
        try:
            return self._begun.mask()
        except ConstraintLost:
            raise
        except ConstraintError:
            self._begun = None
            return None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Pass tokens to the grammar that applies. If none applies, read them as soon as the grammars are compiled."""
        if (begun := self._begun) is not None:
            self._follow(lambda: begun.advance(token_ids))
        else:
            self._unread += token_ids
        if self._is_compiled:
            self._read()

    def forced(self) -> list[int]:
        """Return the tokens that must come next according to all offers, or to the grammar that applies; none if the text is unconstrained.
        Drop a grammar that cannot be followed."""
        if self._selection is not None:
            return self._selection.forced()
        if self._begun is None:
            return []
        try:
            return self._begun.forced()
        except ConstraintLost:
            raise
        except ConstraintError:
            self._begun = None
            return []

    def let_go(self) -> bool:
        governed = self._selection is not None or self._begun is not None
        self._selection = self._begun = None
        return governed

    # --- while the model selects a tool ---------------------------------------------------------------------------------

    @property
    def is_choosing(self) -> bool:
        return self._selection is not None

    def candidates(self) -> list[int]:
        return [] if self._selection is None or self._selection.forced() else self._selection.candidates()

    def weigh(self, logprobs: dict[int, float]) -> None:
        if self._selection is not None:
            self._selection.weigh(logprobs)

    def refuses(self, token_id: int) -> bool:
        return self._selection is not None and token_id not in self._selection.candidates()

    def take_back(self) -> int:
        assert self._selection is not None
        num_tokens = len(self._selection.draft)
        self._selection = self._selection.without_draft()
        return num_tokens

    # --- reading tokens --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the unread tokens. Stop while the grammar is late."""
        while self._unread and not (self._begun is not None and self._begun.is_late):
            if self._begun is not None:
                begun, token_ids = self._begun, list(self._unread)
                self._unread.clear()
                self._follow(lambda begun=begun, token_ids=token_ids: begun.advance(token_ids))
            else:
                self._read_free(self._unread.popleft())

    def _read_free(self, token_id: int) -> None:
        """Read a token that no grammar governs."""
        if self.refuses(token_id):
            self._selection = None  # the worker that drew this token had dropped the selection before
        if self._selection is not None:
            self._say(self._selection, token_id)
        elif self._thinks:
            self._thinks = token_id != self._trigger.close_id
        elif self._at_start and token_id == self._trigger.open_id:
            self._thinks = True  # a think block comes first or not at all, as in the parser of answers
        else:
            self._read_trigger(token_id)
        self._at_start = False

    def _read_trigger(self, token_id: int) -> None:
        """Read a token outside thoughts while no grammar applies. After the trigger token, the model selects an offer; without offers, the
        grammar `marked` applies at once. If the last tokens begin a call in plain JSON, the grammar `plain` applies from the first of these
        tokens on. Any other token changes nothing."""
        if token_id == self._trigger.token_id:
            if self._offers and self._marked.grammar is not None:
                self._selection = ToolSelection(self._offers)
            else:
                self._begin(self._marked, [])
            return
        self._tail.append(token_id)
        if (ending_so := self._beginnings.get(token_id)) is None:
            return
        tail = tuple(self._tail)
        if (beginning := next((one for one in ending_so if tail[-len(one) :] == one), None)) is not None:
            self._begin(self._plain, beginning)

    def _begin(self, first: FirstGrammar, token_ids: Sequence[int]) -> None:
        """Begin a grammar with tokens that are drawn already. If none of `first` can be compiled, the text stays unconstrained."""
        self._tail.clear()
        if first.grammar is None:
            return
        begun = self._begun = IsolatedMatcher(first.grammar)
        self._num_begun = len(token_ids)
        if token_ids:
            self._follow(lambda: begun.advance(token_ids))

    def _say(self, selection: ToolSelection, token_id: int) -> None:
        """Add a token to the selection of a tool. If this completes the selection, begin the grammar."""
        selection.say(token_id)
        if selection.is_made:
            self._selection = None
            self._begin(self._marked, selection.draft)

    def _follow(self, step: Callable[[], object]) -> None:
        """Call `step`, which passes tokens to the grammar or polls it. Drop the grammar once it is complete, or if it cannot be followed.
        For example, the grammar may refuse a token that another worker has sampled before, without the grammar."""
        begun = self._begun
        assert begun is not None
        try:
            step()
        except ConstraintLost:
            raise
        except ConstraintError:
            # If the grammar refuses a token with which it began, skip this token: reading it again would begin the same grammar again. Any
            # other refused token is unconstrained text: it was drawn after the grammar was complete, or by a worker that had dropped the
            # grammar.
            is_skipped = begun.num_followed < self._num_begun and not begun.is_complete
            self._free(begun.refused[is_skipped:])
        else:
            if begun.is_complete and not begun.is_late:
                self._free([])

    def _free(self, token_ids: Sequence[int]) -> None:
        """Drop the grammar. `token_ids` are the last tokens passed to it, which are read again as unconstrained text."""
        self._begun = None
        self._unread.extendleft(reversed(token_ids))
