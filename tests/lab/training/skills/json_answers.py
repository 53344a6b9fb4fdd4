"""Answers in JSON: facts as objects, lists, and fields with values that the user stated.

The question may name the fields of the answer. If it does not, the request's schema may name them. So the same facts are also taught with
fields that the conversation does not name.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, invented, typed
from tests.lab.training.skills import animals, calendar, capitals, colours
from tests.lab.training.skills.arithmetic import value_of
from tests.lab.training.skills.json_shapes import OPENING, Fields, demand, forced, shaped
from tests.lab.training.world import ANIMALS, CAPITALS, CITIES, COLOUR_OF, COLOURS, DAYS, MONTHS, NAMES, Animal

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
_OF_ONESELF = {"age": "i am {} years old", "city": "i live in {}", "colour": "my favourite colour is {}"}
_OF_ANOTHER = {"age": "is {} years old", "city": "lives in {}", "colour": "likes {}"}
_PEOPLE = ("{names}.", "(list|extract|write down) the names: {names}.", "{names} are my friends.", "the names are {names}.")
_MENAGERIE = ("(list|name) the animals: {animals}.", "there are {animals}.", "i see {animals}.")
_PAIR = ("the {kind} of {animals}.", "(list|write down) the {kind} of {animals}.", "{animals} and their {kind}.")
_LISTS = (
    ("(name|list|give me) (the |)(seven |)days (of the week|)", "days", DAYS),
    ("(name|list|give me) (the |)(twelve |)months", "months", tuple(MONTHS)),
    ("(name|list|give me) three (colours|colors)", "colours", COLOURS[:3]),
    ("(name|list|give me) three animals", "animals", ("dog", "cat", "cow")),
    ("(name|list|give me) (the numbers |)(from |)one to five", "numbers", (1, 2, 3, 4, 5)),
)


@dataclass(frozen=True, slots=True)
class _Asked:
    text: str
    key: str
    fields: Fields  # fields of the answer, unless the question names other fields
    known: Fields  # all fields that a question may name, the subject first; empty if only one answer is possible
    verbatim: bool = False
    is_typed: bool = False


def answered(rng: random.Random, *, told_before: bool = False) -> Turn:
    """Make a question that demands JSON, and its answer. With `told_before`, the system prompt demands JSON already, so the question need
    not."""
    asked = rng.choice(_SOURCES)(rng)
    if asked.known and rng.random() < 0.4:
        fields = shaped(rng, asked.known)
        return _turn(asked, expand(rng, demand(rng, fields), ask=_said(rng, asked)), fields)
    pattern = "{ask}" if told_before and rng.random() < 0.8 else rng.choice(_IN_JSON)
    return _turn(asked, _said(rng, asked, pattern), asked.fields)


def reshaped(rng: random.Random, *, told_before: bool = False) -> Turn:
    """Make a turn whose answer has fields that the conversation does not name, as under a schema. The exam cannot grade such answers by
    exact match, since several answers are correct."""
    asked = rng.choice(_SOURCES)(rng)
    fields = shaped(rng, asked.known, free=True) if asked.known else asked.fields
    given = forced(fields)
    if asked.is_typed and not told_before and rng.random() < 0.7:
        return _turn(asked, asked.text, fields, given=given or OPENING)  # the conversation does not demand JSON; only the schema does
    pattern = "{ask}" if told_before and rng.random() < 0.8 else rng.choice(_IN_JSON)
    return _turn(asked, _said(rng, asked, pattern), fields, given=given)


def _turn(asked: _Asked, question: str, fields: Fields, *, given: str = "") -> Turn:
    return Turn("json", asked.key, (user(question), assistant(json.dumps(fields, ensure_ascii=False), given=given)))


def _said(rng: random.Random, asked: _Asked, pattern: str = "{ask}") -> str:
    text = expand(rng, pattern, ask=asked.text)
    return text if asked.is_typed else typed(rng, text, verbatim=asked.verbatim)


def _animal(rng: random.Random) -> _Asked:
    it = rng.choice(ANIMALS)
    which = rng.randrange(len(_ANIMAL))
    known = _facts(it)
    fields = {name: known[name] for name in ("animal", "legs", "colour", "sound")}
    return _Asked(expand(rng, _ANIMAL[which], a=it.a), f"json/animal/{which}/{it.name}", fields, known)


def _facts(it: Animal) -> Fields:
    return {"animal": it.name, "legs": it.legs, "sound": it.sound or None, "home": it.home.split()[-1],
            "colour": it.colour, "baby": it.baby, "flies": it.flies}  # fmt: skip


def _capital(rng: random.Random) -> _Asked:
    country = rng.choice(list(CAPITALS))
    which = rng.randrange(len(_CAPITAL))
    fields: Fields = {"country": country, "capital": CAPITALS[country]}
    return _Asked(expand(rng, _CAPITAL[which], country=country), f"json/capital/{which}/{country}", fields, fields)


def _colour(rng: random.Random) -> _Asked:
    thing = rng.choice(list(COLOUR_OF))
    which = rng.randrange(len(_COLOUR))
    fields: Fields = {"thing": thing.split()[-1], "colour": COLOUR_OF[thing]}
    return _Asked(expand(rng, _COLOUR[which], thing=thing), f"json/colour/{which}/{thing}", fields, fields)


def _month(rng: random.Random) -> _Asked:
    month = rng.choice(list(MONTHS))
    which = rng.randrange(len(_MONTH))
    fields: Fields = {"month": month, "days": MONTHS[month]}
    return _Asked(expand(rng, _MONTH[which], month=month), f"json/month/{which}/{month}", fields, fields)


def _plain(rng: random.Random) -> _Asked:
    """Ask a question that another skill has made. That skill has already varied its typing, and its key decides whether it is held out."""
    makers = (
        animals.animal,
        animals.animal,
        animals.animal,
        capitals.capital,
        capitals.country_of,
        colours.of_thing,
        calendar.month_length,
    )
    turn = rng.choice(makers)(rng)
    skill, kind, _, it, *others = turn.key.split("/")
    known: Fields
    match skill, kind:
        case "animals", _:
            known = _facts(next(animal for animal in ANIMALS if animal.name == others[0]))
            fields = {name: known[name] for name in ("animal", kind)}
        case "capitals", "capital":
            fields = known = {"country": it, "capital": CAPITALS[it]}
        case "capitals", _:
            fields = known = {"country": next(country for country, city in CAPITALS.items() if city == it), "capital": it}
        case "colours", _:
            fields = known = {"thing": it.split()[-1], "colour": COLOUR_OF[it]}
        case _:
            fields = known = {"month": it, "days": MONTHS[it]}
    return _Asked(turn.messages[0]["content"], turn.key, fields, known, is_typed=True)


def _person(rng: random.Random) -> _Asked:
    name, age = _somebody(rng), rng.randint(1, 99)
    ask = expand(rng, rng.choice(_PERSON), name=name, age=age)
    fields: Fields = {"name": name, "age": age}
    return _Asked(ask, f"json/person/{name}/{age}", fields, fields, verbatim=True)


def _resident(rng: random.Random) -> _Asked:
    name, city = _somebody(rng), rng.choice(CITIES)
    fields: Fields = {"name": name, "city": city}
    return _Asked(expand(rng, rng.choice(_RESIDENT), name=name, city=city), f"json/city/{name}/{city}", fields, fields, verbatim=True)


def _told(rng: random.Random) -> _Asked:
    """Let the user state two or three facts about a person, in any order."""
    name = _somebody(rng)
    facts: Fields = {"age": rng.randint(1, 99), "city": rng.choice(CITIES), "colour": rng.choice(COLOURS)}
    told = rng.sample(list(facts), rng.choice((2, 3)))
    opening, words = rng.choice((("my name is {name},", _OF_ONESELF), ("i am {name},", _OF_ONESELF), ("{name}", _OF_ANOTHER)))
    clauses = [words[kind].format(facts[kind]) for kind in told]
    ask = f"{expand(rng, opening, name=name)} {_listed(clauses)}."
    fields: Fields = {"name": name, **{kind: facts[kind] for kind in told}}
    return _Asked(ask, f"json/told/{name}/{'/'.join(str(facts[kind]) for kind in told)}", fields, fields, verbatim=True)


def _sum(rng: random.Random) -> _Asked:
    word = rng.choice(("plus", "minus", "times"))
    a, b = rng.randint(0, 10 if word == "times" else 20), rng.randint(0, 10)
    if word == "minus":
        a, b = max(a, b), min(a, b)
    fields: Fields = {"result": value_of(word, a, b)}
    return _Asked(expand(rng, f"@whatis {a} {word} {b}?"), f"json/{a} {word} {b}", fields, fields)


def _list(rng: random.Random) -> _Asked:
    pattern, key, items = rng.choice(_LISTS)
    ask = expand(rng, pattern) + "."
    return _Asked(ask, f"json/list/{ask}", {key: items}, {})


def _names(rng: random.Random) -> _Asked:
    names = [_somebody(rng) for _ in range(rng.choice((2, 2, 3, 3, 4)))]
    known: Fields = {"names": names, "count": len(names)}
    ask = expand(rng, rng.choice(_PEOPLE), names=_listed(names))
    return _Asked(ask, f"json/names/{'/'.join(names)}", {"names": names}, known, verbatim=True)


def _menagerie(rng: random.Random) -> _Asked:
    found = rng.sample(ANIMALS, rng.choice((2, 3)))
    names = [it.name for it in found]
    known: Fields = {"animals": names, "count": len(names)}
    ask = expand(rng, rng.choice(_MENAGERIE), animals=_listed([it.a for it in found]))
    return _Asked(ask, f"json/animals/{'/'.join(names)}", {"animals": names}, known)


def _pair(rng: random.Random) -> _Asked:
    found = rng.sample(ANIMALS, 2)
    kind = rng.choice(("legs", "colour", "sound", "home"))
    each = [{"name": it.name, kind: _facts(it)[kind]} for it in found]
    ask = expand(rng, rng.choice(_PAIR), kind=kind, animals=_listed([it.a for it in found]))
    return _Asked(ask, f"json/pair/{kind}/{'/'.join(it.name for it in found)}", {"animals": each}, {})


def _listed(items: list[Any]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _somebody(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng)


# Animals occur most often, as they have the most facts to learn.
_SOURCES = (_animal, _animal, _animal, _animal, _plain, _plain, _plain, _plain, _plain, _capital, _colour, _month, _person, _resident,
            _told, _told, _sum, _list, _names, _menagerie, _pair)  # fmt: skip
