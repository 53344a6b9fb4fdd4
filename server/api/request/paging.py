"""Cut lists into the pages that clients ask for, as the APIs of OpenAI and Anthropic describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from typing_extensions import TypedDict

from server.api.request.prepare import invalid


class Listed(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...


NO_ID = ""  # first and last id of an empty page in OpenAI's lists, whose documentation has no null there


class Ends(TypedDict):
    """The fields of a page of a list, beside its entries."""

    first_id: str | None
    last_id: str | None
    has_more: bool


R = TypeVar("R", bound=Listed)


def page_of(records: Sequence[R], limit: int, after: str | None, most: int, no_id: str | None) -> tuple[Sequence[R], Ends]:
    """Return the entries of one page of a list, and the ids of its first and last entry. An empty page has `no_id` in their place. Raise
    ApiError if `limit` is not from 1 to `most`, or if no entry has the id `after`."""
    if not 1 <= limit <= most:
        raise invalid("limit", f"limit is {limit}; expected 1 to {most}")
    begin = 0
    if after is not None:
        begin = 1 + next((place for place, record in enumerate(records) if record.id == after), -1)
        if not begin:
            raise invalid("after", f"after is {after!r:.80}; expected the id of an entry of the list")
    page = records[begin : begin + limit]
    first, last = (page[0].id, page[-1].id) if page else (no_id, no_id)
    return page, {"first_id": first, "last_id": last, "has_more": begin + limit < len(records)}
