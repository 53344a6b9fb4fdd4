"""Vary the wording of a question: choose among alternatives written in a pattern, then add small irregularities of typing."""

import random
import re

_ALTERNATIVES = re.compile(r"\(([^()]*)\)")
_WORD = re.compile(r"\b[a-z]{5,}\b")  # names start with a capital letter and are never misspelt

_MACROS = {
    "@whatis": "(what is|what is|what's|whats)",
    "@whatare": "(what are|what're)",
    "@tell": "(tell me|say|do you know|can you tell me|could you tell me|please tell me|i want to know)",
    "@give": "(give me|write|show me|i want|i need|please give me|can you give me|make|return)",
}
_OPENERS = ("please tell me, ", "hey, ", "hi! ", "hello, ", "quick question: ", "so, ", "ok, ", "now ", "and now: ")
_CLOSERS = (" please", ", please", " thanks", " ?", "??", " :)", "!")
_SYLLABLES = ("ba", "ko", "ri", "mel", "ton", "vo", "sha", "lin", "dar", "pe", "zu", "nor", "ga", "tis", "wen", "fo",
              "qua", "mir", "el", "os", "jun", "ka", "le", "sto", "bri")  # fmt: skip


def expand(rng: random.Random, pattern: str, **values: object) -> str:
    """Expand a pattern: replace every `(a|b|c)` by one of its alternatives and every `{name}` by its value."""
    for macro, alternatives in _MACROS.items():
        pattern = pattern.replace(macro, alternatives)
    while _ALTERNATIVES.search(pattern):
        pattern = _ALTERNATIVES.sub(lambda found: rng.choice(found[1].split("|")), pattern)
    return " ".join(pattern.format(**values).split())


def typed(rng: random.Random, text: str, *, verbatim: bool = False) -> str:
    """Vary `text` as a user might type it. With `verbatim`, keep all letters, because the answer must repeat them exactly."""
    if rng.random() < 0.12:
        text = rng.choice(_OPENERS) + text
    if rng.random() < 0.4:
        text = text.rstrip("?.!")
        if rng.random() < 0.2:
            text += rng.choice(_CLOSERS)
    if not verbatim and rng.random() < 0.05:
        text = _misspelt(rng, text)
    style = rng.random()
    if style < 0.65:
        return text[0].upper() + text[1:]
    if style < 0.85 and not verbatim:
        return text.lower()
    return text


def _misspelt(rng: random.Random, text: str) -> str:
    words = list(_WORD.finditer(text))
    if not words:
        return text
    at = rng.choice(words).start() + rng.randrange(1, 4)
    if rng.random() < 0.5:
        return text[:at] + text[at + 1 :]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def invented(rng: random.Random) -> str:
    """Invent a name that can only be copied from the question, not remembered."""
    return "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()
