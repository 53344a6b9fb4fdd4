"""JsonScan counts the objects, lists, names, strings and commas of a JSON text without parsing the text, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BODY_TOO_COMPLEX, INVALID_JSON, ApiError
from server.http.json_scan import MAX_DEPTH, MAX_ESCAPES, MAX_NUMBERS, MAX_PARTS, PIECE_BYTES, JsonScan

TEXTS = st.text(st.sampled_from('a"\\[]{},:\né'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def parts_of(value) -> int:
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(parts_of, value))
        case dict():
            return 1 + sum(1 + parts_of(inner) for inner in value.values())
        case _:
            return 0


def commas_of(value) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(commas_of, inner))


@given(VALUES, st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_any_cut_counts_the_same_as_the_parsed_value(value, cuts, is_ascii):
    """The scan counts the same objects, lists, names, strings and commas as the parsed value has, wherever the text is cut into pieces."""
    data = json.dumps(value, ensure_ascii=is_ascii).encode()
    found = JsonScan()
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(bounds):
        found.feed(data[begin:end])
    assert (found.num_parts, found.num_commas, found.depth) == (parts_of(value), commas_of(value), 0)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(b"[" + b'"",' * (MAX_PARTS + 1), BODY_TOO_COMPLEX, id="texts"),
        pytest.param(b"[" + b"{}," * (MAX_PARTS + 1), BODY_TOO_COMPLEX, id="objects"),
        pytest.param(b"{" + b'"a":1,' * (MAX_PARTS + 1), BODY_TOO_COMPLEX, id="names"),
        pytest.param(b"[" + b"1," * (MAX_NUMBERS + 2), BODY_TOO_COMPLEX, id="numbers"),
        pytest.param(b'"' + b"\\n" * (MAX_ESCAPES + 1) + b'"', BODY_TOO_COMPLEX, id="escapes"),
        pytest.param(b"[" * (MAX_DEPTH + 1), INVALID_JSON, id="depth"),
        pytest.param(b'{"a":' * (MAX_DEPTH + 1), INVALID_JSON, id="depth of objects"),
        pytest.param(b"[" + b"[]," * MAX_DEPTH + b"[" * MAX_DEPTH, INVALID_JSON, id="depth behind shallow lists"),
    ],
)
def test_too_much_is_refused_before_it_is_parsed(data, kind):
    with pytest.raises(ApiError) as caught:
        JsonScan().feed(data)
    assert caught.value.kind is kind


def test_levels_of_earlier_pieces_count():
    found = JsonScan()
    found.feed(b"[" * (MAX_DEPTH - 1))
    found.feed(b"[]," * (MAX_DEPTH + 1))
    assert found.depth == MAX_DEPTH - 1
    found.feed(b"[")
    with pytest.raises(ApiError) as caught:
        found.feed(b"[")
    assert caught.value.kind is INVALID_JSON


def test_what_is_allowed_passes():
    for data in (b"[" + b"1," * (MAX_NUMBERS - 1) + b"1]", b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, b'"' + b'[{\\"' * 10**6 + b'"'):
        JsonScan().feed(data)


def test_work_is_linear_in_a_text_of_escapes():
    """The scan treats a string full of escaped quotes as one string. If each escaped quote began a new string, the scan would take
    quadratic time."""
    found = JsonScan()
    found.feed(b'"' + b'\\"' * (4 * PIECE_BYTES))
    assert found.num_parts == 1
