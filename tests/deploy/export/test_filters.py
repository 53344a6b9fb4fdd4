"""The page renders chat templates as the server does, with the filters and tests that templates use."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from server.text.templates.errors import TemplateError, TemplateRejection
from server.text.templates.filters import metered_filters, metered_tests
from server.text.templates.template import ChatTemplate
from tests.node import run_node

RUNTIME = Path(__file__).parents[3] / "runtime" / "web"
RENDER = """
import { pathToFileURL } from 'node:url';
const [runtime, given] = process.argv.slice(1), { sources, names } = JSON.parse(given);
const { Template } = await import(pathToFileURL(`${runtime}/template.mjs`));
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
    "spaces": "\ufeff \n\x1c a b \x85\x1f\u2003",
    "lines": "a\r\n\n b\x0bc\u2028d\n",
    "letters": "🙂éx🙂",
    "quoted": 'it\'s "q" \\ \x00\x7f\u200b\u00a0é🙂\t',
    "keyed": {"items": 5, "a": None},
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
    # texts
    "spaces | trim ~ '|'",
    "spaces.strip() ~ '|' ~ spaces.lstrip() ~ '|' ~ spaces.rstrip()",
    "'\\n\\n a\\n'.strip('\\n') ~ 'xxaxx'.lstrip('x') ~ 'ab '.rstrip('b ')",
    "'a b  c'.split() ~ 'a b  c'.split(' ') ~ 'a,b,c'.split(',', 1) ~ 'a,b,c'.rsplit(',', 1)",
    "lines.splitlines()",
    "lines | indent(2) ~ lines | indent(2, true, true) ~ lines | indent('> ')",
    "letters | length ~ letters[1] ~ letters[-1] ~ letters.find('x')",
    "'é é'.replace('é', '$&', 1) ~ ('aa' | replace('a', 'b', 1)) ~ 'aa'.replace('', '-')",
    "'ABC dEF'.capitalize() ~ ('ABC dEF' | capitalize) ~ (\"it's a-b\" | title) ~ \"it's\".title()",
    "'{} {}'.format('a', 1) ~ '{1}{0}{x}'.format('a', 'b', x=2) ~ '<{}>'.format(absent)",
    "'%s-%d' % ('a', 3) ~ 'ab' * 2",
    "'a-b'.partition('-') ~ 'abc'.removeprefix('a') ~ '7'.zfill(3) ~ '12'.isdigit()",
    # values as text and as JSON
    "none ~ true ~ 1.0 ~ [1.5, none, false] ~ {'a': {'b': \"it's\"}} ~ absent ~ 1234567.0",
    "quoted ~ [quoted]",
    "[[], {}, {'é': [1, true, none]}] | tojson(indent=2)",
    "{'b': 1, 'a': '\\u007fé<'} | tojson(ensure_ascii=true, sort_keys=true)",
    "absent | tojson",
    "none | string ~ true | string ~ pairs | string",
    "absent | trim ~ (absent | upper) ~ (absent | length) ~ (absent | list)",
    "'12.7' | int ~ ('x' | int(5)) ~ (-1.9 | int) ~ (none | int) ~ ('1e3' | float) ~ (true | int)",
    "{1: 'a', 2: 'b'}[1] ~ {1: 'a'}",
    # operators
    "1 == true and 0 == false and 1 == 1.0",
    "'1' == 1 or 0 == '' or none == false or absent == none or 'x' == ['x']",
    "[1, [2]] == [1, [2]] and {'a': 1} == {'a': 1} and [1] in [[1]]",
    "'x' in absent or none in [0, '', absent] or 'a' in {'b': 1}",
    "'a' + 1",
    "[1] + none",
    "absent + 'a'",
    "absent.name.first",
    "none < 1",
    "'a' < 'b' and 1 < 1.5 and [1, 2] < [1, 3]",
    "(7 // 2) ~ (-7 // 2) ~ (-7 % 3) ~ (7 / 2) ~ (6 / 2) ~ (2 ** 10) ~ (2 ** -1)",
    "1 / 0",
    # attributes
    "keyed.items() | map('join', '=') | join(',') ~ keyed['items'] ~ keyed.get('a') ~ keyed.get('x', 3) ~ keyed.get('x')",
    # tests with arguments
    "6 is divisibleby 3 and 6 is not divisibleby(4)",
    "'a' is in ['a', 'b'] and 'b' is eq words[0].lower() or false",
    "none is sameas none and 1 is not sameas true",
    "'b' is eq words[0] ~ '!'",
    "raise_exception('no: ' ~ [1])",
]
BLOCKS = [
    "{% for n in numbers %}{{ n }}{% if n == 1 %}{% break %}{% endif %}-{% endfor %}",
    "{% for n in numbers %}{{ n }}{% if n == 1 %}{% continue %}{% endif %}-{% else %}none{% endfor %}",
    "{% for n in numbers %}{% continue %}{% else %}none{% endfor %}",
    "{% for n in numbers %}{% if n == 3 %}{% set found = n %}{% endif %}{{ found }},{% endfor %}",
    "{% for key in pairs %}{{ key }}{% endfor %}{% for letter in letters %}{{ letter }}.{% endfor %}",
    "{% for n in absent %}{{ n }}{% else %}none{% endfor %}",
    "{% for n in 5 %}{{ n }}{% endfor %}",
    "{% for a, b in [('x', 1), ('y', 2)] %}{{ a }}{{ b }}{% endfor %}",
    "{% for n in numbers if n > 1 %}{{ loop.index }}{{ loop.last }}{{ n }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% set x = 5 %}{% macro m() %}{{ x }}{% endmacro %}{% for x in numbers %}{{ m() }}{% endfor %}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}a{% endcall %}",
    "{{ none }}{{ true }}{{ absent }}{{ words }}",
    "{% set comma = joiner(',') %}{% for n in numbers %}{{ comma() }}{{ n }}{% endfor %}{{ dict(a=1, b=2) }}",
]


def refused_or_rendered(source: str, names: dict[str, Any]) -> str:
    """Return what the server renders, or that it refuses, with the message of `raise_exception` if the template calls it."""
    try:
        return ChatTemplate(source, {}).render(MESSAGES, variables=names, add_generation_prompt=False)
    except TemplateRejection as error:
        return f"error: {error.message}"
    except TemplateError:
        return "error"


def test_filters_operators_and_blocks_do_what_jinja_does() -> None:
    sources = [*(f"{{{{ {expression} }}}}" for expression in EXPRESSIONS), *BLOCKS]
    names = {**NAMES, "messages": MESSAGES}
    rendered = json.loads(run_node(RENDER, RUNTIME, json.dumps({"sources": sources, "names": names})))
    expected = [refused_or_rendered(source, NAMES) for source in sources]
    found = [
        one[: len("error")] if one.startswith("error: ") and other == "error" else one
        for one, other in zip(rendered, expected, strict=True)
    ]
    assert dict(zip(sources, found, strict=True)) == dict(zip(sources, expected, strict=True))


def test_numbers_of_another_base_are_refused() -> None:
    """The page would read them as 0."""
    sources = ["{{ 'ff' | int(0, 16) }}", "{{ '12' | int(base=8) }}", "{{ 12 | int(0, 16) }} {{ '7' | int(base=10) }}"]
    *refused, accepted = json.loads(run_node(RENDER, RUNTIME, json.dumps({"sources": sources, "names": {}})))
    assert refused == ["error: int() with another base than 10 is not supported in the browser"] * 2
    assert accepted == "12 7"


TIMES = """
import { pathToFileURL } from 'node:url';
const [module, given] = process.argv.slice(1), { written } = await import(pathToFileURL(module)), { time, format } = JSON.parse(given);
console.log(JSON.stringify(written(new Date(...time), format)));
"""


def test_times_have_english_names_in_every_browser() -> None:
    """Llama's templates write the date. A browser in another language has other names of months."""
    time, form = datetime(2026, 3, 5, 7, 4, 9), "%d %b %Y, %B %-d, %A %a %y-%m %H:%M:%S %I %p %%"
    given = json.dumps({"time": [2026, 2, 5, 7, 4, 9], "format": form})
    assert json.loads(run_node(TIMES, RUNTIME / "statements.mjs", given)) == time.strftime(form)


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
