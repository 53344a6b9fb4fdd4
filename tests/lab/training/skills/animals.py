"""Animals: legs, sounds, homes, colours, babies, and which of them fly."""

import random
from collections.abc import Callable

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, typed
from tests.lab.training.skills.asking import asked
from tests.lab.training.world import ANIMALS, UNKNOWN_ANIMALS, Animal, article, in_words

_LEGS = (
    "how many legs does {a} have?",
    "how many legs do(es|) {plural} have?",
    "@tell how many legs {a} has.",
    "@whatis the number of legs of {a}?",
    "{a} has how many legs?",
    "count the legs of {a}.",
    "legs of {a}?",
    "does {a} have legs, and how many?",
)
_SOUND = (
    "(what|which) (sound|noise) does {a} make?",
    "what does {a} say?",
    "what do(es|) {plural} say?",
    "@tell (what|which) (sound|noise) {a} makes.",
    "how does {a} sound?",
    "what noise does {a} make?",
    "@whatis the sound of {a}?",
    "make the (sound|noise) of {a}.",
)
_HOME = (
    "where does {a} live?",
    "where do(es|) {plural} live?",
    "@tell where {a} lives.",
    "@whatis the home of {a}?",
    "where can i find {a}?",
    "in (what|which) place does {a} live?",
    "where is the home of {a}?",
)
_COLOUR = (
    "(what|which) (colour|color) is {a}?",
    "(what|which) (colour|color) does {a} have?",
    "@whatis the (colour|color) of {a}?",
    "@tell the (colour|color) of {a}.",
    "(what|which) (colour|color) are {plural}?",
    "the (colour|color) of {a} is what?",
    "(colour|color) of {a}?",
)
_BABY = (
    "@whatis a baby {name} called?",
    "@whatis the baby of {a} called?",
    "what do you call a baby {name}?",
    "what do we call the young of {a}?",
    "@tell the name of a baby {name}.",
    "how do you call a young {name}?",
    "@whatis the (name|word) for a baby {name}?",
)
_FLIES = (
    "can {a} fly?",
    "can {plural} fly?",
    "does {a} fly?",
    "is {a} able to fly?",
    "@tell if {a} can fly.",
    "do {plural} fly?",
    "could {a} fly?",
)


def plural(name: str) -> str:
    irregular = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep", "fish": "fish"}
    if name in irregular:
        return irregular[name]
    if name.endswith(("x", "ch", "s")):
        return name + "es"
    return name[:-1] + "ies" if name.endswith("fly") else name + "s"


def _legs(it: Animal) -> str:
    return f"{it.a.capitalize()} has {in_words(it.legs) if it.legs else 'no'} legs."


def _sound(it: Animal) -> str:
    return f"{it.a.capitalize()} says {it.sound}." if it.sound else f"{it.a.capitalize()} makes no sound."


def _home(it: Animal) -> str:
    return f"{it.a.capitalize()} lives {it.home}."


def _colour(it: Animal) -> str:
    return f"{it.a.capitalize()} is usually {it.colour}."


def _baby(it: Animal) -> str:
    return f"A baby {it.name} is called {article(it.baby)}."


def _flies(it: Animal) -> str:
    return f"Yes, {it.a} can fly." if it.flies else f"No, {it.a} cannot fly."


_ABOUT_ANIMALS: tuple[tuple[str, tuple[str, ...], Callable[[Animal], str]], ...] = (
    ("legs", _LEGS, _legs),
    ("sound", _SOUND, _sound),
    ("home", _HOME, _home),
    ("colour", _COLOUR, _colour),
    ("baby", _BABY, _baby),
    ("flies", _FLIES, _flies),
)


def animal(rng: random.Random) -> Turn:
    kind, patterns, answer = rng.choice(_ABOUT_ANIMALS)
    it = rng.choice(ANIMALS)
    return asked(rng, "animals", kind, patterns, answer(it), a=it.a, name=it.name, plural=plural(it.name))


_ANOTHER = (
    "and {a}?",
    "what about {a}?",
    "how about {a}?",
    "and (what about|for) {a}?",
    "{a}?",
    "the same for {a}?",
)


def animal_again(rng: random.Random) -> Turn:
    """Make a question about an animal and a follow-up that can only be understood after the question."""
    kind, patterns, answer = rng.choice(_ABOUT_ANIMALS)
    first, second = rng.sample(ANIMALS, 2)
    values = {"a": first.a, "name": first.name, "plural": plural(first.name)}
    opening = asked(rng, "follow-up", kind, patterns, answer(first), **values)
    which = rng.randrange(len(_ANOTHER))
    again = user(typed(rng, expand(rng, _ANOTHER[which], a=second.a)))
    key = f"follow-up/{kind}/{which}/{second.name}"
    return Turn("follow-up", key, (*opening.messages, again, assistant(answer(second))))


def unknown_animal(rng: random.Random) -> Turn:
    _, patterns, _ = rng.choice(_ABOUT_ANIMALS)
    name = rng.choice(UNKNOWN_ANIMALS)
    answer = f"I am sorry, I do not know the {name}."
    return asked(rng, "refusals", "animal", patterns, answer, a=article(name), name=name, plural=plural(name))
