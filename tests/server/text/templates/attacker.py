"""A seeded attacker of the sandbox: it draws hostile templates from a grammar, renders them, and reports what exceeded a promise.

Run one draw again with `python -m tests.server.text.templates.attacker SEED NUMBER`, which prints the template and its faults.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from server.text.templates.errors import TemplateError
from server.text.templates.filters import metered_filters, metered_tests
from server.text.templates.limits import Limits
from server.text.templates.meter import Meter
from server.text.templates.metered_text import STR_METHODS
from server.text.templates.sandbox import GLOBALS
from server.text.templates.template import ChatTemplate

LIMITS = Limits(time_s=0.05, memory_bytes=4 << 20)
MOST_S = 1.5  # CPU seconds for compiling and rendering: the operation that exceeds a limit may end, and tracing takes ten times as long
MOST_FACTOR = 12  # times `memory_bytes`: a character may take 4 bytes, and a joined text is twice in memory; compiling takes some, too

INTERNAL = ("step", "_step", "made value", "compared value", "_made", "charge", "meter", "environment", "context", "_loop_vars")
NUMBERS = (
    "0", "1", "-1", "-2", "3", "17", "255", "(-9000000000000000000)", "9223372036854775807", "1000000000", "(10 ** 18)", "1e308",
    "(-1e308)", "(1e308 * 10)", "(1e308 * 10 - 1e308 * 10)", "0.5", "true", "false", "none", "missing", "2.0 ** 61", "(-(10 ** 15))",
)  # fmt: skip
TEXTS = (
    "''", "'a'", "'a\\nb'", "'a\\r' * 9000", "'%s'", "'%9999999d'", "'{:>999999}'", "'{0.x}'", "'\\ud800'", "'0,' * 9 ~ '0'",
    "'ß' * 99999",
)  # fmt: skip
VARIABLES = ("v.s", "v.l", "hashes", "messages", "messages[1].n", "range(9999)")
MESSAGES = [{"role": "user", "content": "  Grüße {0} %s "}, {"role": "assistant", "content": "x" * 2000, "n": 10**30}]
# 4096 tuples with one hash, because -1 and -2 have the same hash: all pairs of 64 tuples of 6 numbers
EQUAL_HASHES = (
    "{% set ns = namespace(l=[()]) %}"
    + "{% set n = namespace(l=[]) %}{% for t in ns.l %}{% set n.l = n.l + [t + (-1,), t + (-2,)] %}{% endfor %}{% set ns.l = n.l %}" * 6
    + "{% set n = namespace(l=[]) %}{% for t in ns.l %}{% set p = namespace(l=[]) %}"
    "{% for u in ns.l %}{% set p.l = p.l + [t + u] %}{% endfor %}"
    "{% set n.l = n.l + p.l %}{% endfor %}{% set hashes = n.l %}"
)


class Grammar:
    """Draws one template. `depth` bounds the nesting, so every draw ends."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.names = [*metered_filters(), *metered_tests()]

    def template(self) -> str:
        if self.dice.random() < 0.1:  # a template that names an unknown filter is refused as a whole, so it has nothing else
            name, number = self.dice.choice(INTERNAL), self.number()
            return f"{{{{ {number} | {name} }}}}" if name.isidentifier() else f"{{{{ [{number}] | map({name!r}) | list }}}}"
        head = EQUAL_HASHES if self.dice.random() < 0.1 else "{% set hashes = [(-1, 1), (-2, 1)] %}"
        macro = "{% macro m(n) %}" + self.statement(2) + "{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        body = "".join(self.statement(3) for _ in range(self.dice.randint(1, 4)))
        return head + "{% set s = 'x' %}{% set l = [0] %}{% set v = namespace(s='x', l=[0], n=3) %}" + macro + body

    def statement(self, depth: int) -> str:
        kind = self.dice.choice(("output", "for", "if", "set", "grow", "block", "call") if depth else ("output",))
        value = self.value(2)
        if kind == "for":
            items = self.dice.choice((f"range({self.number()})", "range(99999)", value))
            return f"{{% for i in {items} %}}{self.statement(depth - 1)}{{% endfor %}}"
        if kind == "if":
            return f"{{% if {value} %}}{self.statement(depth - 1)}{{% else %}}{self.statement(depth - 1)}{{% endif %}}"
        if kind == "set":
            return f"{{% set v.{self.dice.choice('sln')} = {value} %}}"
        if kind == "grow":
            grown = self.dice.choice(("v.s ~ v.s", "v.s + v.s", "[v.l, v.l]", "v.l + v.l", "v.n * v.n", "[v.s, v.s] | join"))
            name, turns = grown[grown.index("v.") + 2], self.dice.choice((9, 60, 99999))
            return f"{{% for i in range({turns}) %}}{{% set v.{name} = {grown} %}}{{% endfor %}}"
        if kind == "block":
            return f"{{% set s %}}{self.statement(depth - 1)}{'literal ' * 50}{{% endset %}}"
        if kind == "call":
            return f"{{{{ m({self.dice.choice((2, 30, 900))}) }}}}"
        return f"{{{{ {value} }}}}"

    def number(self) -> str:
        return self.dice.choice(NUMBERS)

    def value(self, depth: int) -> str:
        """Return an expression of any type."""
        draw = self.dice.random()
        if not depth or draw < 0.25:
            return self.dice.choice(
                (self.number(), self.dice.choice(TEXTS), "v.s", "v.l", "hashes", "messages", "messages[1].n", "range(9999)")
            )
        inner = self.value(depth - 1)
        if draw < 0.55:
            return f"({inner}) | {self.dice.choice([*metered_filters()])}({self.args(depth)})"
        if draw < 0.62:
            name = self.dice.choice([*self.names, *INTERNAL])
            return f"[{inner}] | {self.dice.choice(('map', 'select', 'reject'))}({name!r}, {self.value(depth - 1)}) | list"
        if draw < 0.75:
            return f"({inner} ~ '').{self.dice.choice(sorted(STR_METHODS))}({self.args(depth)})"
        if draw < 0.9:
            operator = self.dice.choice(("+", "-", "*", "**", "%", "/", "//", "~", "in", "==", "<", "and"))
            return f"(({inner}) {operator} ({self.value(depth - 1)}))"
        if draw < 0.95:
            return f"{self.dice.choice([name for name in GLOBALS if name != 'raise_exception'])}({self.args(depth)})"
        return f"({inner})[{self.number()}:{self.number()}]"

    def args(self, depth: int) -> str:
        given = [self.dice.choice((self.number(), self.value(depth - 1))) for _ in range(self.dice.randint(0, 2))]
        named = f"attribute={self.dice.choice(TEXTS)}"
        return ", ".join([*given, named] if self.dice.random() < 0.1 else given)


def attack(seed: int, number: int) -> tuple[str, list[str]]:
    """Return a template, and a line for each promise that it breaks."""
    source = Grammar(random.Random(f"{seed} {number}")).template()
    return source, faults(source)


def faults(source: str, limits: Limits = LIMITS, *, most_s: float = MOST_S) -> list[str]:
    found: list[str] = []
    tracemalloc.start()
    began_s = time.thread_time()
    try:
        with _watched_meter(found):
            ChatTemplate(source, {}).render(MESSAGES, limits=limits)
    except TemplateError:
        pass
    except Exception as error:
        found.append(f"{type(error).__name__} escaped: {error!s:.200}")
    took_s, most_bytes = time.thread_time() - began_s, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if took_s > most_s:
        found.append(f"took {took_s:.2f} s of CPU time; at most {most_s:g} s are promised")
    if most_bytes > MOST_FACTOR * limits.memory_bytes:
        found.append(f"took {most_bytes >> 20} MiB; at most {MOST_FACTOR * limits.memory_bytes >> 20} MiB are promised")
    return found


@contextmanager
def _watched_meter(found: list[str]) -> Iterator[None]:
    """Report each operation after which a meter has more left than before, or has counted back."""
    charge, step = Meter.charge, Meter.step

    def watched_charge(self: Meter, num_bytes: int) -> None:
        before = self._left_bytes
        charge(self, num_bytes)
        if not self._left_bytes <= before:
            found.append(f"the meter was refunded by {num_bytes!r}")

    def watched_step(self: Meter, num_chars: int = 0) -> None:
        before = self._steps
        step(self, num_chars)
        if not (self._steps > before or self._steps == 0):
            found.append(f"the meter's steps went back by {num_chars!r}")

    Meter.charge, Meter.step = watched_charge, watched_step
    try:
        yield
    finally:
        Meter.charge, Meter.step = charge, step


if __name__ == "__main__":
    print(*attack(int(sys.argv[1]), int(sys.argv[2])), sep="\n")
