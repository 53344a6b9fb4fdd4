"""The page renders chat templates as the server does, with the filters and tests that templates use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.text.templates.filters import metered_filters, metered_tests
from server.text.templates.template import ChatTemplate
from tests.node import run_node

RUNTIME = Path(__file__).parents[3] / "runtime" / "web"
RENDER = """
import { pathToFileURL } from 'node:url';
const [runtime, given] = process.argv.slice(1), { sources, names } = JSON.parse(given);
await import(pathToFileURL(`${runtime}/filters.mjs`));
const { Template } = await import(pathToFileURL(`${runtime}/vendor/jinja.mjs`));
const rendered = (source) => { try { return new Template(source).render(names); } catch (error) { return `error: ${error.message}`; } };
console.log(JSON.stringify(sources.map(rendered)));
"""
MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>.", "count": 3},
    {"role": "user", "content": "hi", "count": 1, "name": "Ann"},
    {"role": "assistant", "content": 'It\'s "fine".', "count": 2, "deep": {"er": "x"}},
]
NUMBERS = (0.5, 1.5, 2.5, -0.5, -1.5, 0.125, 0.375, 2.675, 1.005, 1e-7, 123456.789, 5, -7)
NAMES = {
    "words": ["b", "A", "c"],
    "numbers": [3, 1, 2],
    "text": "été",
    "roles": ["user", "assistant"],
    "pairs": {"b": 1, "a": 2},
    "values": NUMBERS,
}
EXPRESSIONS = [
    *(f"values[{index}] | round({digits})" for index in range(len(NUMBERS)) for digits in (0, 1, 2, 3)),
    *(f"values[{index}] | round" for index in range(len(NUMBERS))),
    *(f"{number} | round({digits}, '{how}')" for number in (2.34, -2.34, 7) for digits in (0, 1) for how in ("ceil", "floor", "common")),
    "2.5 | round(method='floor')",
    "1234 | round(-2)",
    "words | count",
    "text | count()",
    "absent | d('x')",
    "absent | default('x')",
    "'' | d('x', true)",
    "messages[0].content | e",
    "messages[2].content | escape",
    "messages[0].content | forceescape",
    "words | first",
    "words | last",
    "[] | first | default('none')",
    "text | first",
    "text | last",
    "text | reverse",
    "words | reverse | join(',')",
    "text | list | join('-')",
    "pairs | list | join('-')",
    "words | max",
    "words | min",
    "words | max(true)",
    "words | min(case_sensitive=true)",
    "(messages | max(attribute='count')).role",
    "(messages | min(attribute='count')).role",
    "numbers | max",
    "numbers | sum",
    "numbers | sum(start=10)",
    "[0.5, 1] | sum",
    "messages | sum('count')",
    "messages | sum(attribute='count')",
    "numbers | select('odd') | join(',')",
    "numbers | reject('odd') | join(',')",
    "numbers | select('gt', 1) | join(',')",
    "numbers | select('<=', 2) | join(',')",
    "numbers | select('ge', 2) | join(',')",
    "numbers | select('lt', 3) | join(',')",
    "numbers | select('in', [1, 3]) | join(',')",
    "numbers | select('ne', 1) | join(',')",
    "numbers | select('divisibleby', 2) | join(',')",
    "[0, 1, '', 'x'] | select | join(',')",
    "[1, 1.5] | select('float') | join(',')",
    "messages | selectattr('name') | map(attribute='name') | join(',')",
    "messages | selectattr('name', 'defined') | map(attribute='role') | join(',')",
    "messages | rejectattr('name', 'defined') | map(attribute='role') | join(',')",
    "messages | selectattr('role', 'in', roles) | map(attribute='role') | join(',')",
    "messages | selectattr('role', 'equalto', roles[0]) | map(attribute='role') | join(',')",
    "messages | rejectattr('role', '==', 'system') | map(attribute='role') | join(',')",
    "messages[2:] | selectattr('deep.er', 'eq', 'x') | map(attribute='role') | join(',')",
    "messages | selectattr('count', '>', 1) | map(attribute='role') | join(',')",
    "words | map('upper') | join(',')",
    "messages | map(attribute='content') | map('length') | join(',')",
    "words | map('replace', 'b', 'x') | join(',')",
    "numbers | map('string') | join('+')",
    "'  x ' | trim()",
    "words | length()",
    "text | upper()",
    "words | list() | join(',')",
    "pairs | items() | list | length",
    "pairs | dictsort | map('first') | join(',')",
    "'yes' if pairs is iterable else 'no'",
    "'yes' if 1.5 is float and 1 is not float else 'no'",
]


def test_filters_and_tests_do_what_jinja_does() -> None:
    sources = [f"{{{{ {expression} }}}}" for expression in EXPRESSIONS]
    names = {**NAMES, "messages": MESSAGES}
    rendered = json.loads(run_node(RENDER, RUNTIME, json.dumps({"sources": sources, "names": names})))
    expected = [ChatTemplate(source, {}).render(MESSAGES, variables=NAMES, add_generation_prompt=False) for source in sources]
    assert dict(zip(EXPRESSIONS, rendered, strict=True)) == dict(zip(EXPRESSIONS, expected, strict=True))


# Used by no template that we know, or only with texts that a page does not have.
LEFT_OUT = {"attr", "format", "groupby", "truncate"}


ARGUMENTS = {"map": "('upper')", "replace": "('x', 'y')"}  # of filters that need some


@pytest.mark.parametrize("kind", ["filter", "test"])
def test_all_filters_and_tests_of_the_server_are_known(kind: str) -> None:
    """Whether the arguments fit does not matter here."""
    if kind == "filter":
        found = metered_filters().keys() - LEFT_OUT
        sources = {name: f"{{{{ VALUE | {name}{ARGUMENTS.get(name, '')} }}}}" for name in found}
    else:
        found = metered_tests().keys()
        sources = {name: f"{{{{ [1] | select('{name}', 1) | length }}}}" for name in found}
    values = ("'x'", "[1]", "{'a': 1}", "1.5")
    tried = [source.replace("VALUE", value) for source in sources.values() for value in values]
    rendered = iter(json.loads(run_node(RENDER, RUNTIME, json.dumps({"sources": tried, "names": {}}))))
    by_name = {name: [next(rendered) for _ in values] for name in sources}
    unknown = {name for name, said in by_name.items() if all("Unknown" in one or "no test" in one or "Cannot apply" in one for one in said)}
    assert unknown == set()
