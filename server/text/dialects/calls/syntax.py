"""Define the interface of syntaxes, in which calls are written between other text: their fields, parser and grammar."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.messages import Constraint, ConstraintKind
from server.open_values import new_letters
from server.text.dialects.tool import ToolSchema
from server.text.grammar import Specials, fixed
from server.text.parts import Part

MISTRAL_ID_LENGTH = 9  # Mistral's templates refuse ids of any other length


class CallParser(Protocol):
    """Finds calls in text; all other text is content."""

    @property
    def num_calls(self) -> int:
        """The number of calls that were found."""
        ...

    @property
    def done(self) -> bool:
        """True once the allowed number of calls has been made."""
        ...

    def push(self, text: str) -> list[Part]:
        """Read more text. Return the parts that were found in it."""
        ...

    def finish(self) -> list[Part]:
        """Return the text that was held back. A call that was cut off ends where the text ends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax(ABC):
    """How calls are written in an answer. A subclass adds what stands between the markers."""

    opening: str = ""  # marker before a call, or before all calls of an answer
    closing: str = ""  # marker after a call, or after all calls of an answer
    bare: bool = False  # an answer may begin with a call without a marker
    between: str | None = '"\\n"'  # grammar rule of the text from `closing` to the next `opening`; None: an answer has one `opening`
    id_length: int = 24  # number of letters and digits in a new call's id

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be single tokens."""
        return tuple(marker for marker in (self.opening, self.closing, *self.inner_markers) if marker)

    @property
    def inner_markers(self) -> tuple[str, ...]:
        """The markers between the opening and the closing one."""
        return ()

    @property
    def announces(self) -> bool:
        """True if only calls begin with the opening marker. Other text may begin with a word such as `functools`."""
        return bool(self.opening) and not self.opening.isalnum()

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts that distinguish the syntax from other syntaxes whose parsers read the same calls."""
        return self.markers

    @abstractmethod
    def parser(self, tools: Sequence[ToolSchema], max_calls: int | None) -> CallParser:
        """Return a parser for calls of `tools`, at most `max_calls` of them; None: any number."""
        ...

    @abstractmethod
    def inside(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> list[str]:
        """Return the grammar rules of the text after the opening marker, up to and with the closing marker. The first rule is `inside`."""
        ...

    @abstractmethod
    def beginnings(self, name: str) -> tuple[str, ...]:
        """Return the texts with which a call of tool `name` may begin, from the text after the opening marker to a text that ends the name.
        No text may be a prefix of a text of another tool. The result is empty if a call has no such beginning."""
        ...

    def forced(self, tools: Sequence[ToolSchema], specials: Specials, *, several: bool) -> Constraint:
        """Return the constraint for one call of any of `tools`, or for one or more calls if `several`. If `several`, the model may also
        write text after a call, and the parser ends the answer there. If the mask allowed only further calls, the model would call for
        ever."""
        one = "inside" if self.bare else f"{fixed(self.opening, specials)} inside"
        again = f" ({self.between} {one})*" if several and self.between is not None else ""
        rules = [f"start: {one}{again}{' text?' if several else ''}", *self.inside(tools, specials, several=several)]
        if several:
            # The rule `text` takes as many characters as it can. So its text must not begin like a further call, or contain one: that call
            # might name any tool.
            other = re.escape(self.opening[:1])
            rest = rf"[^ \n{other};\[{{](?s:.*)" if self.bare else rf"[^ \n{other}][^{other}]*"
            rules.append(rf"text: /[ \n]{{0,8}}{rest}/")  # a small model would write endless line ends if it could
        return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def own_id(written: str, used: set[str], length: int) -> str:
    """Return the id of a call, and add it to `used`, the ids in the answer so far. It is the id that the model wrote, or a new one if the
    model wrote none or has written it before."""
    call_id = new_call_id(length) if not written or written in used else written
    used.add(call_id)
    return call_id


def new_call_id(length: int = 24) -> str:
    """Return a new id for a call: `length` letters and digits, after the prefix `call_` unless `length` is that of Mistral's ids."""
    token = new_letters("call", length)
    return token if length == MISTRAL_ID_LENGTH else f"call_{token}"
