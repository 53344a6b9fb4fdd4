"""Make the usual kind of turn: one question, one answer."""

import random

from tests.lab.training.conversation import Turn, assistant, user
from tests.lab.training.phrases import expand, typed


def asked(rng: random.Random, skill: str, kind: str, patterns: tuple[str, ...], answer: str, **values: str) -> Turn:
    """Ask about `values` with a randomly chosen pattern. The turn's key contains the pattern's number and the values."""
    which = rng.randrange(len(patterns))
    question = typed(rng, expand(rng, patterns[which], **values))
    key = f"{skill}/{kind}/{which}/{'/'.join(values.values())}"
    return Turn(skill, key, (user(question), assistant(answer)))
