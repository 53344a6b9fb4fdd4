"""Answers in JSON: facts as objects, lists, and what the user said put into fields."""

import json
import random

from deploy.demo.conversation import Turn, assistant, user
from deploy.demo.phrases import expand, invented, typed
from deploy.demo.skills.arithmetic import value_of
from deploy.demo.world import ANIMALS, CAPITALS, CITIES, COLOUR_OF, COLOURS, DAYS, MONTHS, NAMES

SYSTEM = (
    "You answer in JSON.",
    "Answer only in JSON.",
    "Always answer with a JSON object.",
    "Reply with valid JSON only.",
    "You are a helpful assistant that answers in JSON.",
)

_IN_JSON = (
    "{ask} (answer|reply|respond) (in|with|as) json.",
    "{ask} (give|return) (me |)(the answer as |)json.",
    "in json: {ask}",
    "(answer|reply) (in|with|as) (a |)json( object|): {ask}",
    "{ask} (as json|in json|json only|use json).",
    "as json, {ask}",
)
_ANIMAL = ("describe {a}.", "tell me about {a}.", "@give a json object (about|describing|for) {a}.", "{a}.",
           "what do you know about {a}?", "the facts about {a}.", "information about {a}.")  # fmt: skip
_CAPITAL = ("@whatis the capital of {country}?", "capital of {country}.", "the capital of {country}.",
            "(which|what) city is the capital of {country}?", "name the capital of {country}.")  # fmt: skip
_COLOUR = ("what colour is {thing}?", "what color is {thing}?", "the (colour|color) of {thing}.")
_MONTH = ("how many days does {month} have?", "how many days are in {month}?", "days in {month}.")
_PERSON = (
    "my name is {name} and i am {age} years old.",
    "i am {name}, {age} years old.",
    "{name} is {age} years old.",
    "i'm {name} and i'm {age}.",
    "extract the name and (the |)age: {name} is {age} years old.",
    "name {name}, age {age}.",
)
_RESIDENT = (
    "my name is {name} and i live in {city}.",
    "{name} lives in {city}.",
    "i am {name} from {city}.",
    "extract the name and (the |)city: {name} lives in {city}.",
)
_LISTS = (
    ("(name|list|give me) (the |)(seven |)days (of the week|)", "days", DAYS),
    ("(name|list|give me) (the |)(twelve |)months", "months", tuple(MONTHS)),
    ("(name|list|give me) three (colours|colors)", "colours", COLOURS[:3]),
    ("(name|list|give me) three animals", "animals", ("dog", "cat", "cow")),
    ("(name|list|give me) (the numbers |)(from |)one to five", "numbers", (1, 2, 3, 4, 5)),
)


def answered(rng: random.Random, *, told_before: bool = False) -> Turn:
    """`told_before`: the system prompt already asks for JSON, so the question need not."""
    source = rng.choice((_animal, _animal, _capital, _colour, _month, _person, _person, _resident, _sum, _list))
    ask, key, fields = source(rng)
    pattern = "{ask}" if told_before and rng.random() < 0.8 else rng.choice(_IN_JSON)
    question = typed(rng, expand(rng, pattern, ask=ask), verbatim=source in (_person, _resident))
    return Turn("json", f"json/{key}", (user(question), assistant(json.dumps(fields, ensure_ascii=False))))


_Asked = tuple[str, str, dict[str, object]]  # the question, its key, the fields of the answer


def _animal(rng: random.Random) -> _Asked:
    it = rng.choice(ANIMALS)
    which = rng.randrange(len(_ANIMAL))
    fields: dict[str, object] = {"animal": it.name, "legs": it.legs, "colour": it.colour, "sound": it.sound or None}
    return expand(rng, _ANIMAL[which], a=it.a), f"animal/{which}/{it.name}", fields


def _capital(rng: random.Random) -> _Asked:
    country = rng.choice(list(CAPITALS))
    which = rng.randrange(len(_CAPITAL))
    fields: dict[str, object] = {"country": country, "capital": CAPITALS[country]}
    return expand(rng, _CAPITAL[which], country=country), f"capital/{which}/{country}", fields


def _colour(rng: random.Random) -> _Asked:
    thing = rng.choice(list(COLOUR_OF))
    which = rng.randrange(len(_COLOUR))
    fields: dict[str, object] = {"thing": thing.split()[-1], "colour": COLOUR_OF[thing]}
    return expand(rng, _COLOUR[which], thing=thing), f"colour/{which}/{thing}", fields


def _month(rng: random.Random) -> _Asked:
    month = rng.choice(list(MONTHS))
    which = rng.randrange(len(_MONTH))
    return expand(rng, _MONTH[which], month=month), f"month/{which}/{month}", {"month": month, "days": MONTHS[month]}


def _person(rng: random.Random) -> _Asked:
    name, age = _somebody(rng), rng.randint(1, 99)
    ask = expand(rng, rng.choice(_PERSON), name=name, age=age)
    return ask, f"person/{name}/{age}", {"name": name, "age": age}


def _resident(rng: random.Random) -> _Asked:
    name, city = _somebody(rng), rng.choice(CITIES)
    return expand(rng, rng.choice(_RESIDENT), name=name, city=city), f"city/{name}/{city}", {"name": name, "city": city}


def _sum(rng: random.Random) -> _Asked:
    word = rng.choice(("plus", "minus", "times"))
    a, b = rng.randint(0, 10 if word == "times" else 20), rng.randint(0, 10)
    if word == "minus":
        a, b = max(a, b), min(a, b)
    fields: dict[str, object] = {"result": value_of(word, a, b)}
    return expand(rng, f"@whatis {a} {word} {b}?"), f"{a} {word} {b}", fields


def _list(rng: random.Random) -> _Asked:
    pattern, key, items = rng.choice(_LISTS)
    ask = expand(rng, pattern) + "."
    return ask, f"list/{ask}", {key: items}


def _somebody(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng)
