"""Colours of things, and colours mixed from paints."""

import random

from tests.lab.training.conversation import Turn
from tests.lab.training.skills.asking import asked
from tests.lab.training.world import COLOUR_OF, COLOURS, MIXES

_OF = (
    "(what|which) (colour|color) is {thing}?",
    "(what|which) (colour|color) does {thing} have?",
    "@whatis the (colour|color) of {thing}?",
    "@tell the (colour|color) of {thing}.",
    "@tell (what|which) (colour|color) {thing} is.",
    "{thing} is (what|which) (colour|color)?",
    "(colour|color) of {thing}?",
    "what is the usual (colour|color) of {thing}?",
)
_IS = ("is {thing} {colour}?", "is {thing} (really|usually) {colour}?", "@tell if {thing} is {colour}.",
       "{thing} is {colour}, (right|correct|isn't it)?")  # fmt: skip
_MIX = (
    "what do {one} and {two} make?",
    "(what|which) (colour|color) do {one} and {two} make?",
    "what do you get if you mix {one} and {two}?",
    "mix {one} (and|with) {two}.",
    "(what|which) (colour|color) do i get (from|with) {one} and {two}?",
    "@whatis {one} (plus|and|mixed with) {two}?",
    "{one} and {two} make (what|which colour)?",
)


def of_thing(rng: random.Random) -> Turn:
    thing, colour = rng.choice(list(COLOUR_OF.items()))
    return asked(rng, "colours", "of", _OF, f"{_sentence(thing)} is {colour}.", thing=thing)


def is_it(rng: random.Random) -> Turn:
    thing, colour = rng.choice(list(COLOUR_OF.items()))
    proposed = colour if rng.random() < 0.5 else rng.choice(COLOURS)
    answer = f"{'Yes' if proposed == colour else 'No'}, {thing} is {colour}."
    return asked(rng, "colours", "is", _IS, answer, thing=thing, colour=proposed)


def mixed(rng: random.Random) -> Turn:
    (one, two), colour = rng.choice(list(MIXES.items()))
    if rng.random() < 0.5:
        one, two = two, one
    return asked(rng, "colours", "mix", _MIX, f"{one.capitalize()} and {two} make {colour}.", one=one, two=two)


def _sentence(thing: str) -> str:
    return thing[0].upper() + thing[1:]
