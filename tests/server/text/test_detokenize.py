"""Detokenizing gives the same text however the bytes are split into tokens. No piece of the text contains a partial character or a part of
a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.detokenize import Detokenizer, StopRules, overlap


class Bytes:
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


def run(data: bytes, cuts: list[int], stops: StopRules) -> tuple[list[str], Detokenizer]:
    """Push the bytes to a detokenizer in groups of the sizes `cuts`. Return the pieces of text, and the detokenizer."""
    detokenizer, pieces, at = Detokenizer(Bytes(), stops), list[str](), 0
    sizes = iter(cuts)
    while at < len(data) and detokenizer.stopped_by is None:
        size = next(sizes, 1)
        pieces.append(detokenizer.push(data[at : at + size]))
        at += size
    if detokenizer.stopped_by is None:
        pieces.append(detokenizer.finish())
    return pieces, detokenizer


def cut_by_letters(text: str, stops: StopRules) -> str:
    """Return the text up to the first stop string: the reference for the detokenizer. It reads letter by letter until a stop string is
    complete. If several stop strings end at the same letter, the longest counts."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops.strings if text[:end].endswith(stop)]
        if complete:
            return text[:end] if stops.include else text[: end - max(map(len, complete))]
    return text


few = st.text(alphabet="abß€", max_size=30)
stop_lists = st.lists(st.text(alphabet="abß€", min_size=1, max_size=4), max_size=3).map(tuple)
cuts = st.lists(st.integers(1, 5), max_size=40)


@given(few, stop_lists, st.booleans(), cuts)
def test_stops_are_found_for_every_cut(text, strings, include, cut):
    stops = StopRules(strings, include)
    pieces, _ = run(text.encode(), cut, stops)
    assert "".join(pieces) == cut_by_letters(text, stops)


@given(few, stop_lists, cuts)
def test_what_was_given_out_is_never_taken_back(text, strings, cut):
    stops = StopRules(strings)
    pieces, _ = run(text.encode(), cut, stops)
    whole, sofar = cut_by_letters(text, stops), ""
    for piece in pieces:
        sofar += piece
        assert whole.startswith(sofar)


@given(st.text(max_size=30), cuts)
def test_any_text_survives(text, cut):
    pieces, _ = run(text.encode(errors="replace"), cut, StopRules())
    assert "".join(pieces) == text.encode(errors="replace").decode()


@given(st.binary(max_size=30), cuts)
def test_invalid_bytes_are_replaced_alike_for_every_cut(data, cut):
    once, _ = run(data, [len(data) or 1], StopRules())
    many, _ = run(data, cut, StopRules())
    assert "".join(once) == "".join(many)


def test_a_cut_character_is_no_text():
    pieces, _ = run("a€".encode()[:-1], [], StopRules())
    assert "".join(pieces) == "a"


@pytest.mark.parametrize(
    ("answer", "text"),
    [(b"\xac!", "€!"), (b"\xac", "€"), (b"{}", "{}"), (b"\xc3\x9f", "ß"), (b"\xff", "\ufffd")],
)
@pytest.mark.parametrize("shown", [[], [300, 301]], ids=["at once", "after a token without bytes"])
def test_a_character_that_the_prompt_begins_is_text_only_if_the_answer_goes_on_with_it(answer, text, shown):
    detokenizer = Detokenizer(Bytes(), StopRules(), prompt_ids=b"a\xe2\x82")
    assert "".join(detokenizer.push([token_id]) for token_id in [*shown, *answer]) == text


def test_only_a_possible_beginning_is_held():
    detokenizer = Detokenizer(Bytes(), StopRules(("STOP",)))
    assert detokenizer.push(b"go ST") == "go "
    assert detokenizer.push(b"AR") == "STAR"
    assert detokenizer.push(b" ST") == " "
    assert detokenizer.finish() == "ST"


def test_no_stop_before_min_tokens():
    pieces, detokenizer = run(b"xxxxx", [], StopRules(("x",), min_tokens=3))
    assert "".join(pieces) == "xx" and detokenizer.num_tokens == 3


@given(few, stop_lists, cuts)
def test_token_starts_are_those_of_the_text(text, strings, cut):
    data = text.encode()
    _, detokenizer = run(data, cut, StopRules(strings))
    for index, start in enumerate(detokenizer.token_starts):
        assert start == len(data[:index].decode(errors="ignore"))


def test_special_tokens_appear_only_when_shown():
    detokenizer = Detokenizer(Bytes(), StopRules(), {300: b"<tool>"})
    assert detokenizer.push([300, 301, ord("a")]) == "<tool>a"


@given(st.text(alphabet="ab", max_size=8), st.text(alphabet="ab", min_size=1, max_size=5))
def test_overlap_is_the_longest(text, marker):
    length = overlap(text, marker)
    assert text.endswith(marker[:length]) and length < len(marker)
    assert not any(text.endswith(marker[:n]) for n in range(length + 1, len(marker)))
