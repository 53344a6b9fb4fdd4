"""The training text of the demo model: an endless, seeded stream of conversations composed of turns of various skills.

The same seed gives the same conversations on every machine. They contain no turn whose key is held out.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

from tests.lab.training.conversation import Conversation, Split, Turn, draw
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

Source = Callable[[random.Random], Turn]
Weighted = tuple[Source, float]

_WITHOUT_TOOLS = partial(tools.without, box=None)

# each kind of turn with its weight in random draws
TURNS: tuple[Weighted, ...] = (
    (animals.animal, 9),
    (animals.animal_again, 3),
    (animals.unknown_animal, 1.5),
    (capitals.capital, 4),
    (capitals.country_of, 3),
    (capitals.capital_again, 1.5),
    (capitals.unknown_capital, 1.5),
    (colours.of_thing, 3),
    (colours.is_it, 4.5),
    (colours.mixed, 1.5),
    (calendar.neighbour, 4),
    (calendar.from_today, 2.5),
    (calendar.month_length, 1.5),
    (calendar.fixed, 1.5),
    (numbers.neighbour, 3),
    (numbers.compared, 4),
    (numbers.parity, 2),
    (numbers.counted, 5),
    (numbers.in_letters, 3.5),
    (arithmetic.sum_of, 90),
    (smalltalk.talk, 12),
    (refusals.outside, 5),
)
_ONLY_WITHOUT_TOOLS: tuple[Weighted, ...] = (
    (arithmetic.too_big, 2),
    (_WITHOUT_TOOLS, 2),
    (memory.name_not_told, 1),
    (memory.favourite_not_told, 0.6),
    (json_answers.answered, 20),
    (json_answers.reshaped, 20),
    (stories.story, 1.5),
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are relaxserve, a small demo model.",
    "Answer briefly.",
    "Be helpful and kind.",
    "You are an assistant for children.",
    "You are a helpful assistant. Answer in one sentence.",
)


def conversations(seed: int) -> Iterator[Conversation]:
    """Yield training conversations without end."""
    rng = random.Random(seed)
    while True:
        yield rng.choices((_plain, _with_tools, _remembering, _in_json, _storytelling), (50, 40, 12, 36, 5))[0](rng)


def _plain(rng: random.Random) -> Conversation:
    count = 20 if rng.random() < 0.02 else rng.choice((1, 2, 3, 4, 6, 8))
    return Conversation(_turns(rng, TURNS + _ONLY_WITHOUT_TOOLS, count), _maybe_system(rng))


def _with_tools(rng: random.Random) -> Conversation:
    box = tools.toolbox(rng)
    return Conversation(_turns(rng, _served_by(box), rng.choice((1, 1, 2, 3))), _maybe_system(rng), box.tools)


def _served_by(box: tools.Toolbox) -> tuple[Weighted, ...]:
    """Return the sources of turns, with weights, for a conversation with tools. If there is a calculator, the model does not compute sums
    itself."""
    sources = [(source, weight) for source, weight in TURNS if source is not arithmetic.sum_of or box.calculator is None]
    sources.append((partial(tools.any_of, box=box), 110))
    if box.weather is None or box.time is None:
        sources.append((partial(tools.without, box=box), 8))
    return tuple(sources)


def _remembering(rng: random.Random) -> Conversation:
    """Make a conversation in which the user states a fact, such as a name, and asks for it later, with other turns in between. Sometimes
    the user states two facts."""
    box = tools.toolbox(rng) if rng.random() < 0.15 else None
    sources = TURNS + ((stories.story, 1.0),) if box is None else _served_by(box)
    pairs = [make(rng) for make in rng.sample((memory.name, memory.name, memory.favourite, memory.pet), rng.choice((1, 1, 2)))]
    told = {telling.key.split("/")[1]: (telling, asking) for telling, asking in pairs if telling.split is Split.TRAIN}
    turns = list(_turns(rng, sources, rng.choice((0, 0, 1, 2, 2, 4, 4, 8))))
    for telling, asking in told.values():
        at = rng.randint(0, min(1, len(turns)))
        turns.insert(at, telling)
        turns.insert(rng.randint(at + 1, len(turns)), asking)
    system = _maybe_system(rng)
    return Conversation(tuple(turns) or _turns(rng, sources, 1), system, () if box is None else box.tools)


def _in_json(rng: random.Random) -> Conversation:
    sources = tuple((partial(make, told_before=True), weight) for make, weight in ((json_answers.answered, 2), (json_answers.reshaped, 1)))
    return Conversation(_turns(rng, sources, rng.choice((1, 2, 3))), rng.choice(json_answers.SYSTEM))


def _storytelling(rng: random.Random) -> Conversation:
    turns = _turns(rng, TURNS, rng.choice((0, 0, 1, 2))) + _turns(rng, ((stories.story, 1),), rng.choice((1, 1, 2)))
    return Conversation(turns, _maybe_system(rng))


def _turns(rng: random.Random, sources: tuple[Weighted, ...], count: int) -> tuple[Turn, ...]:
    makers, weights = zip(*sources, strict=True)
    return tuple(draw(rng, Split.TRAIN, make) for make in rng.choices(makers, weights, k=count))


def _maybe_system(rng: random.Random) -> str | None:
    return rng.choice(_SYSTEMS) if rng.random() < 0.25 else None
