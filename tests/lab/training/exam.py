"""The exam of the demo model: held-out questions per skill, and the rules that decide whether an answer is correct."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.lab.training.conversation import Conversation, Message, Split, Tool, Turn, draw
from tests.lab.training.corpus import TURNS, Source
from tests.lab.training.skills import (
    animals,
    arithmetic,
    calendar,
    capitals,
    colours,
    json_answers,
    memory,
    numbers,
    refusals,
    smalltalk,
    stories,
    tools,
)
from tests.lab.training.skills.json_shapes import schema_of
from tests.lab.training.world import ANIMALS

_ANSWER_TOKENS, _STORY_TOKENS = 96, 120


@dataclass(frozen=True, slots=True)
class Question:
    skill: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    max_tokens: int
    expected: Message
    is_right: Callable[[Message], bool]
    schema: dict[str, Any] | None = None  # JSON schema that the answer must match; the model does not see it


def questions(seed: int, per_skill: int) -> list[Question]:
    rng = random.Random(seed)
    return [question for make in _PAPERS for question in _paper(rng, make, per_skill)]


_Paper = Callable[[random.Random], list[Question]]


def _paper(rng: random.Random, make: _Paper, count: int) -> list[Question]:
    asked: list[Question] = []
    while len(asked) < count:
        asked += make(rng)
    return asked


def _last_answer(skill: str, sources: tuple[Source, ...], rng: random.Random) -> list[Question]:
    """Ask the question of a held-out turn, in half of the cases after turns about other topics, and grade the last answer of the turn."""
    turn = draw(rng, Split.HELD_OUT, rng.choice(sources))
    return [_exactly(skill, Conversation((*_context(rng), turn)), turn)]


def _remembered(rng: random.Random) -> list[Question]:
    while True:
        telling, asking = rng.choice((memory.name, memory.name, memory.favourite, memory.pet))(rng)
        if telling.split is Split.HELD_OUT:
            return [_exactly("memory", Conversation((telling, *_context(rng), asking)), asking)]


def _json(rng: random.Random) -> list[Question]:
    told = rng.random() < 0.5
    turn = draw(rng, Split.HELD_OUT, partial(json_answers.answered, told_before=told))
    return [_exactly("JSON answers", Conversation((turn,), rng.choice(json_answers.SYSTEM) if told else None), turn)]


def _tool_turn(rng: random.Random) -> list[Question]:
    """Make two questions from a turn with tools: one about the call, one about the answer after the tool's result."""
    box = tools.toolbox(rng)
    turn = draw(rng, Split.HELD_OUT, partial(tools.any_of, box=box))
    messages = Conversation((*_context(rng, share=0.25), turn)).messages
    asked: list[Question] = []
    for at in range(len(messages) - len(turn.messages), len(messages)):
        message = messages[at]
        if message["role"] == "assistant":
            skill = "tool calls" if "tool_calls" in message else "tool results"
            right = partial(_same, (message,))
            asked.append(Question(skill, tuple(messages[:at]), box.tools, _ANSWER_TOKENS, message, right))
    return asked


def _needs_no_tool(rng: random.Random) -> list[Question]:
    source = rng.choice((animals.animal, capitals.capital, smalltalk.talk, refusals.outside, calendar.neighbour))
    turn = draw(rng, Split.HELD_OUT, source)
    return [_exactly("no needless call", Conversation((turn,), tools=tools.toolbox(rng).tools), turn)]


def _story(rng: random.Random) -> list[Question]:
    turn = draw(rng, Split.HELD_OUT, stories.story)
    on_topic = partial(_stays_on_topic, turn)
    return [Question("stories", turn.messages[:1], (), _STORY_TOKENS, turn.messages[-1], on_topic)]


def _by_schema(rng: random.Random) -> list[Question]:
    """Make a question in which only the request's schema names the fields of the answer. Grade the values of the fields, not the layout of
    the object."""
    turn = draw(rng, Split.HELD_OUT, json_answers.reshaped)
    asked, expected = turn.messages
    fields = json.loads(expected["content"])
    right = partial(same_fields, fields)
    return [Question("JSON by schema", (asked,), (), _ANSWER_TOKENS, expected, right, schema_of(fields, strict=True))]


_PAPERS: tuple[_Paper, ...] = (
    *(
        partial(_last_answer, skill, sources)
        for skill, sources in (
            ("animals", (animals.animal,)),
            ("capitals", (capitals.capital, capitals.country_of)),
            ("colours", (colours.of_thing, colours.is_it, colours.mixed)),
            ("days and months", (calendar.neighbour, calendar.from_today, calendar.month_length)),
            ("numbers", (numbers.neighbour, numbers.compared, numbers.parity, numbers.counted, numbers.in_letters)),
            ("sums up to 20", (partial(arithmetic.sum_of, top=20),)),
            ("sums up to 99", (partial(arithmetic.sum_of, top=99),)),
            ("follow-ups", (animals.animal_again, capitals.capital_again)),
            ("small talk", (smalltalk.talk,)),
            (
                "refusals",
                (
                    refusals.outside,
                    animals.unknown_animal,
                    capitals.unknown_capital,
                    arithmetic.too_big,
                    partial(tools.without, box=None),
                ),
            ),
        )
    ),
    _remembered,
    _json,
    _tool_turn,
    _needs_no_tool,
    _story,
    _by_schema,
)


def _context(rng: random.Random, share: float = 0.5) -> tuple[Turn, ...]:
    """Return turns from the training split that precede the question, or no turns."""
    if rng.random() >= share:
        return ()
    makers, weights = zip(*TURNS, strict=True)
    return tuple(draw(rng, Split.TRAIN, make) for make in rng.choices(makers, weights, k=rng.randint(1, 3)))


def _exactly(skill: str, conversation: Conversation, turn: Turn) -> Question:
    expected = turn.messages[-1]
    right = (expected, *({"role": "assistant", "content": words} for words in turn.also_right))
    before = tuple(conversation.messages[:-1])
    return Question(skill, before, conversation.tools, _ANSWER_TOKENS, expected, partial(_same, right))


def _same(right: tuple[Message, ...], answer: Message) -> bool:
    return any(_meaning(answer) == _meaning(one) for one in right)


def same_fields(right: object, answer: Message) -> bool:
    """Compare the fields of a JSON answer. An empty text equals null: if the schema demands a text, the sound of a silent animal can only
    be an empty text."""
    try:
        return _none_for_silence(json.loads(answer.get("content") or "")) == _none_for_silence(right)
    except ValueError:
        return False


def _none_for_silence(value: object) -> object:
    match value:
        case dict():
            return {name: _none_for_silence(inner) for name, inner in value.items()}
        case list():
            return [_none_for_silence(inner) for inner in value]
        case _:
            return None if value == "" else value


def _meaning(message: Message) -> tuple[str, list[tuple[str, object]]]:
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return (message.get("content") or "").strip(), named


def _stays_on_topic(turn: Turn, answer: Message) -> bool:
    """Return whether a story has more than 60 words and keeps to the topic of its question. If the question names a hero, each third of the
    text must name it; if it names a thing, the text must name that at least twice. At most one animal besides the hero may occur, or two if
    the question names no hero."""
    asked, words = (_words(message["content"]) for message in (turn.messages[0], answer))
    _, hero, thing = turn.key.lower().split("/")
    thirds = [words[len(words) * n // 3 : len(words) * (n + 1) // 3] for n in range(3)]
    if hero in asked and not all(hero in third for third in thirds):
        return False
    if thing in asked and words.count(thing) < 2:
        return False
    cast = {animal.name for animal in ANIMALS if animal.name in words}
    return len(words) > 60 and len(cast - {hero}) <= (1 if hero in asked else 2)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())
