"""Numbers without arithmetic: neighbours, order, parity, counting, words."""

import random

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, typed
from tests.lab.training.skills.asking import asked
from tests.lab.training.world import in_words

_TOP = 99

_AFTER = ("(what|which number) comes (right|) after {n}?", "@whatis the number after {n}?", "@tell the number after {n}.",
          "@whatis the next number after {n}?", "(what|which) number follows {n}?", "after {n} comes what?")  # fmt: skip
_BEFORE = ("(what|which number) comes (right|) before {n}?", "@whatis the number before {n}?",
           "@tell the number before {n}.", "before {n} comes what?", "(what|which) number is just before {n}?")  # fmt: skip
_BIGGER = ("(which|what) is (bigger|larger|greater|more), {n} or {m}?", "(which|what) number is (bigger|larger), {n} or {m}?",
           "is {n} or {m} (bigger|larger|greater)?", "@tell (which|what) is (bigger|larger): {n} or {m}.")  # fmt: skip
_SMALLER = ("(which|what) is (smaller|less), {n} or {m}?", "(which|what) number is smaller, {n} or {m}?",
            "is {n} or {m} smaller?", "@tell (which|what) is smaller: {n} or {m}.")  # fmt: skip
_PARITY = ("is {n} (even or odd|odd or even)?", "@tell if {n} is (even or odd|odd or even).", "is the number {n} (even|odd)?",
           "{n}: (even or odd|odd or even)?", "is {n} an (even|odd) number?", "is {n} (even|odd)?")  # fmt: skip
_COUNT = ("count from {n} to {m}.", "(please|can you) count from {n} to {m}.", "count (up|) from {n} (up|) to {m}.",
          "@tell the numbers from {n} to {m}.", "list the numbers from {n} to {m}.")  # fmt: skip
_COUNT_TO = ("count to {m}.", "(please|can you) count to {m}.", "count up to {m}.")
_WORDS = ("(write|spell|say) {n} in words.", "how do you (write|spell|say) {n} in words?", "@whatis {n} in words?",
          "how (is|do i write) {n} (written|) in words?", "{n} in words?")  # fmt: skip
_DIGITS = ("(write|say) {w} (in digits|as a number).", "@whatis {w} in digits?", "{w} in digits?",
           "how do you write {w} (in digits|with digits)?")  # fmt: skip


def _about(rng: random.Random, kind: str, patterns: tuple[str, ...], answer: str, **values: object) -> Turn:
    question = typed(rng, expand(rng, rng.choice(patterns), **values))
    return Turn("numbers", f"numbers/{kind}/{'/'.join(map(str, values.values()))}", (user(question), assistant(answer)))


def neighbour(rng: random.Random) -> Turn:
    n = rng.randrange(_TOP)
    if rng.random() < 0.5:
        return _about(rng, "after", _AFTER, f"After {n} comes {n + 1}.", n=n)
    return _about(rng, "before", _BEFORE, f"Before {n + 1} comes {n}.", n=n + 1)


def compared(rng: random.Random) -> Turn:
    n, m = rng.sample(range(_TOP + 1), 2)
    if rng.random() < 0.5:
        return _about(rng, "bigger", _BIGGER, f"{max(n, m)} is bigger than {min(n, m)}.", n=n, m=m)
    return _about(rng, "smaller", _SMALLER, f"{min(n, m)} is smaller than {max(n, m)}.", n=n, m=m)


def parity(rng: random.Random) -> Turn:
    n = rng.randrange(_TOP + 1)
    return _about(rng, "parity", _PARITY, f"{n} is {'odd' if n % 2 else 'even'}.", n=n)


def counted(rng: random.Random) -> Turn:
    n = 1 if rng.random() < 0.3 else rng.randrange(40)
    m = n + rng.randint(3, 11)
    answer = ", ".join(map(str, range(n, m + 1))) + "."
    if n == 1:
        return _about(rng, "count to", _COUNT_TO, answer, m=m)
    return _about(rng, "count", _COUNT, answer, n=n, m=m)


def in_letters(rng: random.Random) -> Turn:
    """Ask to convert a number to words or back. The model memorises the words, so numbers are held out separately for each wording."""
    n = rng.randrange(_TOP + 1)
    word = in_words(n)
    if rng.random() < 0.5:
        return asked(rng, "numbers", "words", _WORDS, f"{n} in words is {word}.", n=str(n))
    return asked(rng, "numbers", "digits", _DIGITS, f"{word.capitalize()} in digits is {n}.", w=word)
