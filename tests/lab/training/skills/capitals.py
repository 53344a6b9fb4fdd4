"""Capitals and their countries."""

import random

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, typed
from tests.lab.training.skills.asking import asked
from tests.lab.training.world import CAPITALS, UNKNOWN_COUNTRIES

_CAPITAL = (
    "@whatis the capital of {country}?",
    "(what|which) city is the capital of {country}?",
    "@tell the capital (city|) of {country}.",
    "capital of {country}?",
    "{country}'s capital?",
    "@whatis {country}'s capital (city|)?",
    "name the capital of {country}.",
    "the capital of {country} is (what|called what|which city)?",
    "do you know the capital of {country}?",
    "(what|which) is the capital city of {country}?",
)
_COUNTRY = (
    "(what|which) country is {city} the capital of?",
    "{city} is the capital of (what|which) country?",
    "{city} is the capital of what?",
    "@tell (what|which) country has the capital {city}.",
    "of (what|which) country is {city} the capital?",
    "in (what|which) country is {city}?",
    "where is {city}?",
    "(what|which) country does {city} belong to?",
)
_CAPITAL_AGAIN = (
    "and {country}?",
    "and of {country}?",
    "what about {country}?",
    "how about {country}?",
    "{country}?",
    "and the capital of {country}?",
)


def _capital(country: str) -> str:
    return f"The capital of {country} is {CAPITALS[country]}."


def capital(rng: random.Random) -> Turn:
    country = rng.choice(list(CAPITALS))
    return asked(rng, "capitals", "capital", _CAPITAL, _capital(country), country=country)


def country_of(rng: random.Random) -> Turn:
    country, city = rng.choice(list(CAPITALS.items()))
    return asked(rng, "capitals", "country", _COUNTRY, f"{city} is the capital of {country}.", city=city)


def capital_again(rng: random.Random) -> Turn:
    first, second = rng.sample(list(CAPITALS), 2)
    opening = asked(rng, "follow-up", "first", _CAPITAL, _capital(first), country=first)
    which = rng.randrange(len(_CAPITAL_AGAIN))
    again = user(typed(rng, expand(rng, _CAPITAL_AGAIN[which], country=second)))
    return Turn("follow-up", f"follow-up/capital/{which}/{second}", (*opening.messages, again, assistant(_capital(second))))


def unknown_capital(rng: random.Random) -> Turn:
    country = rng.choice(UNKNOWN_COUNTRIES)
    answer = f"I am sorry, I do not know the capital of {country}."
    return asked(rng, "refusals", "capital", _CAPITAL, answer, country=country)
