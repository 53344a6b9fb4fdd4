"""Arithmetic: addition and subtraction up to 99, multiplication up to 10. The model refuses larger numbers."""

import random

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, typed
from tests.lab.training.world import in_words

_SYMBOLS = {"plus": "+", "minus": "-", "times": "(*|x|×)"}
_PATTERNS = (
    "@whatis {a} {word} {b}?",
    "@whatis {a} {sign} {b}?",
    "{a} {sign} {b}(| =| = ?| is)?",
    "{a}{sign}{b}(|=|=?)",
    "{a} {word} {b}?",
    "how much is {a} {word} {b}?",
    "how much is {a} {sign} {b}?",
    "(calculate|compute|solve|work out) {a} {sign} {b}.",
    "@tell (what|how much) {a} {word} {b} is.",
    "what does {a} {sign} {b} (make|equal|give)?",
)
_OWN = {
    "plus": ("add {a} and {b}.", "@whatis the sum of {a} and {b}?",
             "i have {a} apples and get {b} more. how many (apples|) do i have?"),
    "minus": ("take {b} (away|) from {a}.", "subtract {b} from {a}.",
              "i have {a} apples and eat {b}. how many are left?"),
    "times": ("multiply {a} (by|and|with) {b}.", "@whatis the product of {a} and {b}?"),
}  # fmt: skip


def sum_of(rng: random.Random, *, top: int | None = None) -> Turn:
    """Ask for a sum, a difference or a product. `top` is the largest operand of a sum or difference; by default, 20 or 99."""
    word = rng.choice(("plus", "plus", "minus", "minus", "minus", "times", "times"))
    if word == "times":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
    else:
        limit = top or (20 if rng.random() < 0.45 else 99)
        a, b = rng.randint(0, limit), rng.randint(0, limit)
        if word == "minus" and (limit > 20 or rng.random() < 0.5):
            a, b = max(a, b), min(a, b)
    return _asked(rng, word, a, b, worked(word, a, b))


def too_big(rng: random.Random) -> Turn:
    word = rng.choice(("plus", "minus", "times"))
    a, b = rng.randint(100, 9999), rng.choice((rng.randint(2, 99), rng.randint(100, 9999)))
    if word == "times" and rng.random() < 0.5:
        a, b = rng.randint(11, 99), rng.randint(11, 99)
    if rng.random() < 0.5:
        a, b = b, a
    turn = _asked(rng, word, a, b, "I am sorry, these numbers are too big for me. Give me a calculator tool and I can do it.")
    return Turn("refusals", f"too big/{turn.key}", turn.messages)


def worked(word: str, a: int, b: int) -> str:
    return f"{a} {word} {b} is {value_of(word, a, b)}."


def value_of(word: str, a: int, b: int) -> int:
    return {"plus": a + b, "minus": a - b, "times": a * b}[word]


def _asked(rng: random.Random, word: str, a: int, b: int, answer: str) -> Turn:
    patterns = _PATTERNS + _OWN[word]
    which = rng.randrange(len(patterns))
    spelt = max(a, b) <= 20 and rng.random() < 0.08 and "{sign}" not in patterns[which]
    shown = (in_words(a), in_words(b)) if spelt else (a, b)
    asked = expand(rng, patterns[which].replace("{sign}", _SYMBOLS[word]), a=shown[0], b=shown[1], word=word)
    # The model computes sums and differences, so a held-out pair of numbers is held out in every wording. It memorises products, so a
    # product is held out per wording.
    key = f"{a} {word} {b}" + (f"/{which}" if word == "times" else "")
    return Turn("arithmetic", key, (user(typed(rng, asked)), assistant(answer)))
