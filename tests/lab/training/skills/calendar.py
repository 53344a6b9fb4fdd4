"""Days and months: the next and the previous one, their position in the week or year."""

import random

from tests.lab.training.conversation import Turn
from tests.lab.training.skills.asking import asked
from tests.lab.training.world import DAYS, MONTHS

_AFTER = (
    "(what|which) {unit} comes after {it}?",
    "(what|which) {unit} is after {it}?",
    "what comes after {it}?",
    "@tell the {unit} after {it}.",
    "@whatis the {unit} after {it}?",
    "after {it} comes (what|which {unit})?",
    "(what|which) {unit} follows {it}?",
    "@whatis the next {unit} after {it}?",
)
_BEFORE = (
    "(what|which) {unit} comes before {it}?",
    "(what|which) {unit} is before {it}?",
    "what comes before {it}?",
    "@tell the {unit} before {it}.",
    "@whatis the {unit} before {it}?",
    "before {it} comes (what|which {unit})?",
    "@whatis the {unit} just before {it}?",
)
_TODAY = (
    "(today is|if today is|it is|suppose today is) {it}(,|.) (what|which) day is {when}?",
    "(what|which) day is {when} if today is {it}?",
    "@whatis {when} if today is {it}?",
    "today is {it}. (what is|tell me) {when}?",
)
_LENGTH = (
    "how many days does {it} have?",
    "how many days are (in|there in) {it}?",
    "how long is {it}?",
    "@tell how many days {it} has.",
    "@whatis the number of days in {it}?",
    "days in {it}?",
)
_FIXED = (
    ("week", ("how many days (are in|does|are there in) a week( have|)?", "how long is a week?", "days in a week?",
              "@tell how many days a week has."), "A week has seven days."),
    ("year", ("how many months (are in|does|are there in) a year( have|)?", "months in a year?",
              "@tell how many months a year has."), "A year has twelve months."),
    ("days", ("(name|list|tell me|what are) (all|) the days of the week.", "(name|list|say) the seven days.",
              "@whatare the days of the week?", "days of the week?"),
     "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    ("months", ("(name|list|tell me) (all|) the months.", "@whatare the months of the year?", "list the twelve months.",
                "months of the year?"),
     "The months are January, February, March, April, May, June, July, August, September, October, November and "
     "December."),
    ("first", ("(what|which) (is|day is) the first day of the week?", "@whatis the first day?",
               "@tell the first day of the week."), "The first day of the week is Monday."),
    ("last", ("(what|which) (is|day is) the last day of the week?", "@whatis the last day?",
              "@tell the last day of the week."), "The last day of the week is Sunday."),
    ("weekend", ("(what|which) days are the weekend?", "when is the weekend?", "@tell the days of the weekend."),
     "The weekend is Saturday and Sunday."),
)  # fmt: skip


def neighbour(rng: random.Random) -> Turn:
    unit, ring = rng.choice((("day", DAYS), ("day", DAYS), ("month", tuple(MONTHS))))
    at = rng.randrange(len(ring))
    if rng.random() < 0.5:
        answer = f"After {ring[at]} comes {ring[(at + 1) % len(ring)]}."
        return asked(rng, "days", "after", _AFTER, answer, it=ring[at], unit=unit)
    answer = f"Before {ring[at]} comes {ring[at - 1]}."
    return asked(rng, "days", "before", _BEFORE, answer, it=ring[at], unit=unit)


def from_today(rng: random.Random) -> Turn:
    at = rng.randrange(7)
    when, tense, shift = rng.choice((("tomorrow", "is", 1), ("yesterday", "was", -1), ("the day after tomorrow", "is", 2)))
    answer = f"Today is {DAYS[at]}, so {when} {tense} {DAYS[(at + shift) % 7]}."
    return asked(rng, "days", "today", _TODAY, answer, it=DAYS[at], when=when)


def month_length(rng: random.Random) -> Turn:
    month, days = rng.choice(list(MONTHS.items()))
    return asked(rng, "days", "length", _LENGTH, f"{month} has {days} days.", it=month)


def fixed(rng: random.Random) -> Turn:
    kind, patterns, answer = rng.choice(_FIXED)
    return asked(rng, "days", kind, patterns, answer)
