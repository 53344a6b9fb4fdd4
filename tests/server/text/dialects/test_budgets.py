"""In every format with thoughts, a budget ends them as the model would: its answer follows, and no marker is left over."""

from __future__ import annotations

import pytest

from server.constraints.rules import Bans, Rules
from server.messages import SamplingParams, Thinking
from server.text.dialects.dialect import Dialect
from server.text.dialects.format import Format
from server.text.dialects.formats import harmony
from server.text.dialects.registry import FORMATS
from server.text.dialects.thoughts import Thoughts
from server.text.parts import Content, Reasoning
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer
from tests.server.constraints.processes import allowed_by

BUDGET = 20
BLOCKS = [(form, thoughts) for form in {each.name: each for each in FORMATS.values()}.values() for thoughts in form.thoughts]
LOOP, ANSWER = "I think. ", "Oslo."


def answered(dialect: Dialect, tokenizer: ByteTokenizer, texts: list[str], *, is_open: bool, budget: int = BUDGET) -> list[int]:
    """Return the tokens of a model that wants to write `texts` one after the other, and thinks of the first without an end. It begins with
    the next text when a mask demands or forbids a token."""
    assert dialect.thought_bounds is not None
    thinking = Thinking(budget, *dialect.thought_bounds, is_open)
    rules = Rules(Bans(SamplingParams(max_tokens=999, thinking=thinking), frozenset(), tokenizer.vocab_size))
    drawn: list[int] = []

    def draw(token_id: int) -> bool:
        mask = rules.mask()
        allowed = range(tokenizer.vocab_size) if mask is None else allowed_by(mask)
        chosen = token_id if token_id in allowed else next(iter(allowed)) if len(allowed) == 1 else None
        if chosen is not None:
            rules.advance([chosen])
            drawn.append(chosen)
        return chosen == token_id

    for text in texts:
        for token_id in tokens_of(tokenizer, text):
            if not draw(token_id):
                break
    return drawn


def tokens_of(tokenizer: ByteTokenizer, text: str) -> list[int]:
    for token_id, special in tokenizer.specials.items():
        before, found, behind = text.partition(special)
        if found:
            return [*tokens_of(tokenizer, before), token_id, *tokens_of(tokenizer, behind)]
    return list(text.encode())


def parts_of(dialect: Dialect, tokenizer: ByteTokenizer, drawn: list[int], *, thinking: bool) -> tuple[str, str]:
    parser = dialect.rules(thinking=thinking).parser()
    text = b"".join(tokenizer.special_texts.get(token_id, bytes([token_id % 256])) for token_id in drawn).decode()
    parts = [*parser.push(text), *parser.finish()]
    told = ["".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content)]
    return told[0], told[1]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(("form", "thoughts"), BLOCKS, ids=lambda value: value.name if isinstance(value, Format) else value.opening)
def test_a_block_of_thoughts_ends_with_its_budget(form: Format, thoughts: Thoughts, is_open: bool) -> None:
    tokenizer = ByteTokenizer(specials=[thoughts.opening, thoughts.closing])
    dialect = Dialect.of(tokenizer, form.name, None)
    assert dialect.thoughts == thoughts
    opening = "" if is_open else thoughts.begin
    drawn = answered(dialect, tokenizer, [opening + LOOP * 20, ANSWER, thoughts.begin + LOOP], is_open=is_open)
    reasoning, content = parts_of(dialect, tokenizer, drawn, thinking=is_open)
    label = 0 if is_open else len(thoughts.label)
    assert reasoning == (LOOP * 20)[: BUDGET - label], "the label of a block counts as well"
    assert content == ANSWER, "no other block begins"


@pytest.mark.parametrize("budget", [0, BUDGET])
def test_the_channel_of_thoughts_ends_with_its_budget(budget: int) -> None:
    """After its thoughts were ended, the model tries to open the channel of thoughts again. It must choose another channel."""
    tokenizer = ByteTokenizer(specials=[*harmony.MARKERS, "analysis"])
    dialect = Dialect.of(tokenizer, "harmony", None)
    thought = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}{LOOP * 20}"
    again, answer = f"{harmony.START}assistant{thought}", f"final{harmony.MESSAGE}{ANSWER}{harmony.RETURN}"
    drawn = answered(dialect, tokenizer, [thought, *([again] if budget else []), answer], is_open=False, budget=budget)
    assert parts_of(dialect, tokenizer, drawn, thinking=False) == ((LOOP * 20)[:budget], ANSWER)


def test_a_template_that_tells_the_effort_needs_no_budget() -> None:
    tokenizer = ByteTokenizer(specials=["<think>", "</think>"])
    assert not Dialect.of(tokenizer, "hermes", None).reads_effort
    source = "Reasoning: {{ reasoning_effort }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.chat_template = ChatTemplate(source, {})  # pyright: ignore[reportAttributeAccessIssue]
    assert Dialect.of(tokenizer, "hermes", None).reads_effort


def test_thoughts_between_texts_have_no_budget() -> None:
    assert Dialect.of(ByteTokenizer(), "hermes", None).thought_bounds is None
