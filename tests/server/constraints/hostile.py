"""Constraints that try to use more resources than a request may use. There is a table for each kind of constraint.

Each row has a name, a source and the expected outcome. REFUSED: the client gets an error. FOLLOWED: the constraint is cheap enough, and the
answer matches it. EITHER: the outcome depends on the machine or on the sampled tokens.
"""

from __future__ import annotations

import json

REFUSED, FOLLOWED, EITHER = "refused", "followed", "either"

Row = tuple[str, str, str]


def _schema(name: str, schema: object, bound: str) -> Row:
    return name, json.dumps(schema), bound


def _doubling(keyword: str, depth: int) -> dict[str, object]:
    """Return a schema in which each definition refers twice to the next definition. Expanding it takes 2 ** depth steps."""
    defs: dict[str, object] = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {"type": "integer"}}}


def _nested(depth: int) -> str:
    return '{"properties": {"a": ' * depth + '{"type": "string"}' + "}}" * depth


def _ambiguous(num_rules: int, what: str) -> str:
    names = [f"e{i}" for i in range(num_rules)]
    rules = [f'{name}: {" | ".join(f"{name} {other}" for other in names)} | "{what}"' for name in names]
    return "\n".join(["start: e0", *rules])


REGEXES: tuple[Row, ...] = (
    ("repeated repetition", "(e{1000}){4000}", REFUSED),
    ("optional repetition", "((((a?){100}){100}){100}){100}", EITHER),
    ("long repetition", "a{1000000}", EITHER),
    ("counted letters of all scripts", r"(\p{L}{1,200} ){1,200}", EITHER),
    ("everything many times", "(.*a){300}b", EITHER),
    ("nested stars", "(x+x+)+y", FOLLOWED),
    ("a far suffix", "(.|\n)*" + "ab?" * 500, EITHER),
    ("open groups", "(" * 20_000 + "a" + ")" * 20_000, REFUSED),
    ("look-around", "(?=a)b", REFUSED),
    ("never closed", "(", REFUSED),
)

SCHEMAS: tuple[Row, ...] = (
    _schema("pattern that repeats", {"type": "string", "pattern": "^(e{1000}){4000}$"}, REFUSED),
    _schema("property pattern that repeats", {"type": "object", "patternProperties": {"^(e{1000}){4000}$": {}}}, EITHER),
    _schema("very long text", {"type": "string", "minLength": 10**9}, EITHER),
    _schema("very many items", {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**6}, EITHER),
    _schema("doubling alternatives", _doubling("anyOf", 30), EITHER),
    _schema("doubling demands", _doubling("allOf", 30), EITHER),
    _schema("a reference to itself", {"$ref": "#"}, EITHER),
    _schema("many optional properties", {"type": "object", "properties": {f"f{i}": {"type": "integer"} for i in range(1500)}}, FOLLOWED),
    _schema("many values", {"enum": [f"value {i}" for i in range(4000)]}, FOLLOWED),
    _schema("odd number", {"type": "number", "multipleOf": 1e-300, "minimum": 1e-300}, EITHER),
    ("deep", _nested(3000), REFUSED),
    ("brackets", "[" * 60_000, REFUSED),
)

GRAMMARS: tuple[Row, ...] = (
    ("every text in very many ways", _ambiguous(30, " "), REFUSED),
    ("terminal that repeats", "start: X\nX: /(e{1000}){4000}/", REFUSED),
    ("rule that repeats", 'start: x{100000}\nx: "a" | "b"', EITHER),
    ("empty loop", 'start: a\na: a? a? "x"?', EITHER),
    ("rule of itself alone", "start: start", EITHER),
    ("left recursion", 'start: start "a" | "b"', FOLLOWED),
    ("schema inside", 'start: "a" %json {"type": "string", "pattern": "^(e{1000}){4000}$"}', REFUSED),
    ("line ends alone", "\n" * 60_000, REFUSED),
    ("deep GBNF", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, REFUSED),
)

CHOICES: tuple[Row, ...] = (
    ("very many", json.dumps([f"choice {i}" for i in range(5000)]), FOLLOWED),
    ("one that is very long", json.dumps(["a" * 60_000]), EITHER),
    ("expressions", json.dumps(["(e{1000}){4000}", "[", "\\"]), FOLLOWED),
)
