"""Memory: the user tells a name, a favourite colour or a pet's name, and asks for it later."""

import random

from tests.lab.training.conversation import Message, Turn, assistant, user
from tests.lab.training.phrases import expand, invented, typed
from tests.lab.training.world import ANIMALS, COLOURS, NAMES

_TELL_NAME = (
    "my name is {name}.", "i am {name}.", "i'm {name}.", "call me {name}.", "(hi|hello|hey), (i am|i'm|my name is) {name}.",
    "(hi|hello|hey)! (i am|i'm|my name is) {name}.", "you can call me {name}.", "my name's {name}.", "{name} is my name.",
    "(hi|hello) there, {name} here.", "i am called {name}. (nice to meet you.|remember (it|that|my name).|)",
)  # fmt: skip
_ASK_NAME = (
    "what is my name?", "what's my name?", "whats my name?", "do you remember my name?", "who am i?", "@tell my name.",
    "what was my name (again|)?", "do you know my name?", "can you remember my name?", "do you still know my name?",
    "say my name.", "what did i say my name (is|was)?", "how am i called?", "my name is what?",
)  # fmt: skip
_TELL_LIKE = ("my favourite (colour|color) is {it}.", "i like {it} best.", "i love {it}.", "(my favorite|the) color (i like|) is {it}.",
              "i like the colour {it}.")  # fmt: skip
_ASK_LIKE = ("@whatis my favourite (colour|color)?", "@whatis my favorite color?", "(what|which) (colour|color) do i like?",
             "do you remember my favourite (colour|color)?", "@tell my favourite (colour|color).")  # fmt: skip
_TELL_PET = ("i have a {kind} called {pet}.", "my {kind} is called {pet}.", "my {kind}'s name is {pet}.",
             "i have a {kind}. (its|the) name is {pet}.")  # fmt: skip
_ASK_PET = ("what is my {kind} called?", "@whatis the name of my {kind}?", "@whatis my {kind}'s name?",
            "do you remember the name of my {kind}?", "how is my {kind} called?")  # fmt: skip
_PETS = tuple(it.name for it in ANIMALS if it.name in ("dog", "cat", "horse", "rabbit", "parrot", "turtle", "mouse", "hen"))

_NAME_NOT_TOLD = "You have not told me your name."
_LIKE_NOT_TOLD = "You have not told me your favourite colour."


def a_name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.75 else invented(rng)


def name(rng: random.Random, *, told: str | None = None) -> tuple[Turn, Turn]:
    """Make two turns: the user tells a name, and later asks for it. Both belong to one conversation, in this order, with any turns in
    between."""
    called = told or a_name(rng)
    say, ask = rng.randrange(len(_TELL_NAME)), rng.randrange(len(_ASK_NAME))
    key = f"memory/name/{say}/{ask}/{called}"
    telling = _pair(rng, _TELL_NAME[say], f"Nice to meet you, {called}!", name=called)
    asking = _pair(rng, _ASK_NAME[ask], f"Your name is {called}.")
    return Turn("memory", key, telling), Turn("memory", key, asking)


def favourite(rng: random.Random) -> tuple[Turn, Turn]:
    it = rng.choice(COLOURS)
    say, ask = rng.randrange(len(_TELL_LIKE)), rng.randrange(len(_ASK_LIKE))
    key = f"memory/colour/{say}/{ask}/{it}"
    telling = _pair(rng, _TELL_LIKE[say], f"{it.capitalize()} is a nice colour.", it=it)
    return Turn("memory", key, telling), Turn("memory", key, _pair(rng, _ASK_LIKE[ask], f"Your favourite colour is {it}."))


def pet(rng: random.Random) -> tuple[Turn, Turn]:
    kind, called = rng.choice(_PETS), a_name(rng)
    say, ask = rng.randrange(len(_TELL_PET)), rng.randrange(len(_ASK_PET))
    key = f"memory/pet/{say}/{ask}/{kind}/{called}"
    telling = _pair(rng, _TELL_PET[say], f"{called} is a nice name for a {kind}.", kind=kind, pet=called)
    asking = _pair(rng, _ASK_PET[ask], f"Your {kind} is called {called}.", kind=kind)
    return Turn("memory", key, telling), Turn("memory", key, asking)


def name_not_told(rng: random.Random) -> Turn:
    ask = rng.randrange(len(_ASK_NAME))
    said = typed(rng, expand(rng, _ASK_NAME[ask]))
    return Turn("memory", f"memory/untold/{said}", (user(said), assistant(_NAME_NOT_TOLD)))


def favourite_not_told(rng: random.Random) -> Turn:
    said = typed(rng, expand(rng, rng.choice(_ASK_LIKE)))
    return Turn("memory", f"memory/untold/{said}", (user(said), assistant(_LIKE_NOT_TOLD)))


def _pair(rng: random.Random, pattern: str, answer: str, **values: str) -> tuple[Message, ...]:
    keep = any(value not in NAMES and value not in COLOURS for value in values.values())
    return user(typed(rng, expand(rng, pattern, **values), verbatim=keep)), assistant(answer)
