"""Send the requests of a log again, and find the first answer that differs from the logged one. server/http/kept_requests.py writes the
log.

Ids, times, counts of cached tokens and the model's fingerprint may differ. The events of a stream are joined before the comparison, because
timing decides how much text an event has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from deploy.client import Client, ServerFault

# Fields that may differ between two answers to the same request.
CHANGING: Final = frozenset(
    ["id", "request_id", "created", "created_at", "completed_at", "item_id", "response_id", "call_id", "tool_call_id"]
    + ["system_fingerprint"]
    + ["cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens_details", "timings", "sequence_number"]
)
# The fields of events whose texts are parts of one text.
TEXTS: Final = frozenset(
    ["content", "text", "response", "reasoning", "reasoning_content", "thinking", "arguments", "partial_json", "delta"]
)
# Paths of requests whose body may have a seed, and paths of requests in whose body an object may have it, with the name of this object.
SEEDED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/invocations", "/completion", "/completions", "/infill")
SEEDED_WITHIN: Final = {"/api/chat": "options", "/api/generate": "options", "/inference/v1/generate": "sampling_params"}
SHOWN: Final = 40  # characters that are shown from a difference on; half as many are shown before it


@dataclass(frozen=True, slots=True)
class Logged:
    """A request of the log with its answer."""

    line: int  # number of its line in the log
    request_id: str
    path: str
    fingerprint: str  # fingerprint of the model that answered
    body: dict[str, Any]  # the request's body, to which `_logged` adds the seed that was used
    seed: int | None  # seed with which tokens were drawn; None: no token was drawn, because the answer has vectors or scores
    answer: str  # body of the answer, which may be a stream

    @property
    def is_repeatable(self) -> bool:
        """Whether no token was drawn, or the body asks for the most probable tokens (temperature 0), or has the seed with which tokens were
        drawn."""
        within = self.body.get(SEEDED_WITHIN.get(self.path, ""))
        seeds = self.body.get("seed"), within.get("seed") if isinstance(within, dict) else None
        return self.seed is None or seeds != (None, None) or self.body.get("temperature") == 0


class Unfit(Enum):
    """Why a line of the log has no request that could be repeated."""

    FAILED = auto()  # the request failed, has no complete answer, or is no POST
    TORN = auto()  # the line is the beginning of an object: the server was killed while it wrote


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field in which a new answer differs from the logged one."""

    request: Logged
    field: str  # path of the field, such as choices[0].text
    logged: str  # the field's value in the logged answer, or the part of the value around the difference
    now: str  # the value, or this part of it, in the new answer
    fingerprint: str  # fingerprint of the new answer; "" if it has none


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay."""

    num_equal: int  # requests with an equal answer
    num_skipped: int  # requests that failed, have no complete answer, are no POST, or cannot be repeated
    num_torn: int  # torn lines of the log
    difference: Difference | None  # None: no answer differs


def replay(log: Path, client: Client) -> Replayed:
    """Replay a log up to the first answer that differs. Raise ServerFault if the log cannot be read, or if the server does not answer. An
    answer that reports an error is compared like any other."""
    num_equal = num_skipped = num_torn = 0
    for logged in read_log(log):
        if logged is Unfit.TORN:
            num_torn += 1
            continue
        if logged is Unfit.FAILED or not logged.is_repeatable:
            num_skipped += 1
            continue
        difference = compare(logged, client.send(logged.path, json.dumps(logged.body).encode()).decode(errors="replace"))
        if difference is not None:
            return Replayed(num_equal, num_skipped, num_torn, difference)
        num_equal += 1
    return Replayed(num_equal, num_skipped, num_torn, None)


# --- the log ---------------------------------------------------------------------------------------------------------------


def read_log(log: Path) -> Iterator[Logged | Unfit]:
    """Yield the request of each line, or why the line has none that could be repeated. Raise ServerFault if the log cannot be read or a
    line of it is no kept request."""
    try:
        with log.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _logged(log, number, line)
    except OSError as error:
        raise ServerFault(f"the log {log} cannot be read: {error.strerror or error}") from error


def _logged(log: Path, number: int, line: bytes) -> Logged | Unfit:
    """Return the request of a line, with the seed set that was used, or why it has none that could be repeated. Raise ServerFault if the
    line is no kept request."""
    try:
        try:
            fields = json.loads(line)
        except ValueError:
            if line.startswith(b"{"):
                return Unfit.TORN
            raise
        if fields["status"] != 200 or not fields["complete"] or fields["method"] != "POST":
            return Unfit.FAILED
        body, seed = json.loads(fields["request"]), fields["seed"]
        found = Logged(number, fields["request_id"], fields["path"], fields["system_fingerprint"], body, seed, fields["answer"])
        if seed is not None:
            _set_seed(found.path, body, seed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = f"line {number} of {log} is no kept request; expected a file that the setting keep_requests names"
        raise ServerFault(text) from None
    return found


def _set_seed(path: str, body: dict[str, Any], seed: int) -> None:
    """Put the seed with which tokens were drawn into the body, if requests of this path may have a seed. The server had drawn this seed
    itself if the request had no seed, or one that asks for a random one."""
    if path in SEEDED:
        body["seed"] = seed
    elif path in SEEDED_WITHIN:
        field = SEEDED_WITHIN[path]
        body[field] = {**(body.get(field) or {}), "seed": seed}


# --- comparing answers -----------------------------------------------------------------------------------------------------


def compare(logged: Logged, answer: str) -> Difference | None:
    """Return the first difference between the logged answer and a new one, or None if they are equal except for the fields that may differ
    (CHANGING)."""
    now = parsed(answer)
    found = first_difference(_lasting(parsed(logged.answer)), _lasting(now))
    if found is None:
        return None
    fingerprint = now.get("system_fingerprint", "") if isinstance(now, dict) else ""
    return Difference(logged, *found, str(fingerprint))


def parsed(answer: str) -> Any:
    """Return the JSON of an answer. Join the events of a stream: into one object if no event has a type, else into one object per type, in
    a dict by the types. Return the text itself if it is neither JSON nor a stream."""
    try:
        return json.loads(answer)
    except ValueError:
        pass
    events = [line.removeprefix("data:").strip() for line in answer.split("\n") if line.startswith(("data:", "{"))]
    joined: dict[str, Any] = {}
    for event in events:
        try:
            found = json.loads(event)
        except ValueError:
            continue  # [DONE], or a comment
        if isinstance(found, dict):
            kind = str(found.get("type", ""))
            joined[kind] = _joined("", joined[kind], found) if kind in joined else found
    return joined[""] if list(joined) == [""] else joined or answer


def _joined(name: str, before: Any, after: Any) -> Any:
    """Join the values of a field in two events. Objects are joined field by field, lists of objects with an index by this index, other
    lists and the texts of TEXTS are appended, and any other value is replaced, unless the later one is None."""
    if isinstance(before, dict) and isinstance(after, dict):
        both = dict.fromkeys((*before, *after))
        return {k: _joined(k, before[k], after[k]) if k in before and k in after else before.get(k, after.get(k)) for k in both}
    if isinstance(before, list) and isinstance(after, list):
        return _by_index(before, after) if all(_index(item) is not None for item in (*before, *after)) else before + after
    if isinstance(before, str) and isinstance(after, str) and name in TEXTS:
        return before + after
    return before if after is None else after


def _by_index(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Join the items of two lists that have the same index. Return all items, sorted by their index."""
    found = {_index(item): item for item in before}
    for item in after:
        at = _index(item)
        found[at] = _joined("", found[at], item) if at in found else item
    return [found[at] for at in sorted(found, key=lambda at: at or 0)]


def _index(item: Any) -> int | None:
    index = item.get("index") if isinstance(item, dict) else None
    return index if isinstance(index, int) else None


def _lasting(value: Any) -> Any:
    """Return an answer without the fields that differ each time, such as ids and times."""
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in CHANGING and not k.endswith("_duration")}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def first_difference(logged: Any, now: Any, field: str = "") -> tuple[str, str, str] | None:
    """Return the path of the first field that differs, and its two values as text, cut to the part around the difference. Return None if
    the values are equal. `field` is the path of the values themselves. A field that one of them lacks counts as None."""
    if isinstance(logged, dict) and isinstance(now, dict):
        return _first_of((k, logged.get(k), now.get(k), f"{field}.{k}" if field else k) for k in dict.fromkeys((*logged, *now)))
    if isinstance(logged, list) and isinstance(now, list) and len(logged) == len(now):
        return _first_of((i, *both, f"{field}[{i}]") for i, both in enumerate(zip(logged, now, strict=True)))
    if logged == now:
        return None
    if isinstance(logged, str) and isinstance(now, str):
        at = next((i for i, both in enumerate(zip(logged, now, strict=False)) if both[0] != both[1]), min(len(logged), len(now)))
        begin = max(0, at - SHOWN // 2)
        return f"{field} from character {at}", repr(logged[begin : at + SHOWN]), repr(now[begin : at + SHOWN])
    return field, f"{logged!r:.{2 * SHOWN}}", f"{now!r:.{2 * SHOWN}}"


def _first_of(pairs: Iterator[tuple[Any, Any, Any, str]]) -> tuple[str, str, str] | None:
    return next((found for _, logged, now, field in pairs if (found := first_difference(logged, now, field)) is not None), None)
