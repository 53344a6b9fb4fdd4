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


NO_ID = ""  # `first_id` and `last_id` of an empty page in OpenAI's lists, whose documentation does not allow null


class Ends(TypedDict):
    """The fields of a page of a list, beside its entries."""

    first_id: str | None
    last_id: str | None
    has_more: bool


R = TypeVar("R", bound=Listed)


def page_after(
    records: Sequence[R], after: str | None, limit: int, most: int, no_id: str | None, *, name: str = "after"
) -> tuple[Sequence[R], Ends]:
    """Return the first entries of a list, or those that follow the entry with the id `after`. An empty page has `no_id` as the ids of its
    first and last entry. Raise ApiError if `limit` is not from 1 to `most`, or if no entry has the id `after`. `name`: the field of the
    request that has this id."""
    _check_limit(limit, most)
    begin = 0 if after is None else _place_of(after, records, name) + 1
    page = records[begin : begin + limit]
    return page, _ends(page, no_id, has_more=begin + limit < len(records))


def page_before(records: Sequence[R], before: str, limit: int, most: int, no_id: str | None, *, name: str) -> tuple[Sequence[R], Ends]:
    """Return the entries directly before the one with the id `before`, in the order of the list. `page_after` describes the other arguments
    and the errors."""
    _check_limit(limit, most)
    end = _place_of(before, records, name)
    page = records[max(0, end - limit) : end]
    return page, _ends(page, no_id, has_more=end > limit)


def _check_limit(limit: int, most: int) -> None:
    if not 1 <= limit <= most:
        raise invalid("limit", f"limit is {limit}; expected 1 to {most}")


def _place_of(record_id: str, records: Sequence[Listed], name: str) -> int:
    place = next((place for place, record in enumerate(records) if record.id == record_id), None)
    if place is None:
        raise invalid(name, f"{name} is {record_id!r:.80}; expected the id of an entry of the list")
    return place


def _ends(page: Sequence[Listed], no_id: str | None, *, has_more: bool) -> Ends:
    first, last = (page[0].id, page[-1].id) if page else (no_id, no_id)
    return {"first_id": first, "last_id": last, "has_more": has_more}
