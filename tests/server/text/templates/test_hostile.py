"""Chat templates that try to reach Python objects, or to use more time or memory than allowed. Each template is refused soon after it
exceeds a limit."""

import time
import tracemalloc
from typing import Any

import pytest

from server.text.templates.errors import TemplateError
from server.text.templates.limits import Limits
from server.text.templates.meter import Meter, TemplateLimit
from server.text.templates.template import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Grüße <b> & 'co' "}]

BIG = "{% set ns = namespace(s='x' * 1000, l=[0], t=(1,)) %}"
SHARED = (
    "{% set ns = namespace(l=[0], m=[0]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
)
# -1 and -2 have the same hash, so these 1024 tuples have the same one, too.
EQUAL_HASHES = "{% set ns = namespace(l=[()]) %}" + (
    "{% set n = namespace(l=[]) %}{% for t in ns.l %}{% set n.l = n.l + [t + (-1,), t + (-2,)] %}{% endfor %}{% set ns.l = n.l %}" * 10
)
HOSTILE = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "exponential macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [[1] * 1000] * 1000 recursive %}{{ loop([[1] * 1000] * 1000) if loop.depth < 9 }}{% endfor %}",
    "repeated text": "{{ 'x' * 10 ** 12 }}",
    "repeated list": "{{ ([0] * 10 ** 10) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "growing integer": "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubling by concatenation": BIG + "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by addition": BIG + "{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling in a block": BIG + "{% for i in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
    "doubling without a loop": "{% set s = 'x' * 1000 %}" + "{% set s = s ~ s %}" * 60,
    "doubling by join": BIG + "{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "doubling by method": BIG + "{% for i in range(60) %}{% set ns.s = ns.s.join(['', ns.s, '']) %}{% endfor %}",
    "doubling by replace": BIG + "{% for i in range(9) %}{% set ns.s = ns.s.replace('x', 'x' * 1000) %}{% endfor %}",
    "doubling by filter": BIG + "{% for i in range(9) %}{% set ns.s = ns.s | replace('x', 'x' * 1000) %}{% endfor %}",
    "printing shared lists": BIG + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "writing shared lists": BIG + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "comparing shared lists": "{% set a = [[0]] %}{% set b = [[0]] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ a == b }}",
    "testing shared lists": "{% set a = [[0]] %}{% set b = [[0]] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ [a] | select('eq', b) | list | length }}",
    "finding shared lists": "{% set a = [[0]] %}{% set b = [[0]] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ [a].index(b) }}",
    "looking up shared tuples": "{% set t = (1,) %}" + "{% set t = (t, t) %}" * 60 + "{{ messages[0].get(t) }}",
    "changed": "{% set a = [[0]] %}{% set b = [[0]] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{% for x in [a, b] %}{{ loop.changed(x) }}{% endfor %}",
    "summing lists": "{{ ([[0] * 1000] * 1000) | sum(start=[]) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide percent from arguments": "{{ '%*d' % (1000000000, 1) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "wide braces": "{{ '{:>1000000000}'.format(1) }}",
    "wide indentation": "{{ 'a\nb' | indent(1000000000) }}",
    "deep indentation": "{{ {'a': 1} | tojson(indent=1000000000) }}",
    "round": "{{ 1 | round(-1000000000) }}",
    "slow strip": "{{ (('a' * 200000) ~ 'b').strip('c' * 199999 ~ 'a') }}",
    "slow search": "{{ ('a' * 200000).rfind('b' ~ 'a' * 100000) }}",
    "splitting": "{{ ('a ' * 100000).split() | length }}",
    "literal text in a loop": "{% set s %}{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "slices": "{% set ns = namespace(l=[], s='x' * 100000) %}"
    + "{% for i in range(100000) %}{% set ns.l = ns.l + [ns.s[i:]] %}{% endfor %}",
    "time format": "{{ strftime_now('%1000000000d') }}",
    "long integer": "{{ " + "9" * 4000 + " }}",
    "wide percent behind a name": "{{ '%(k)3000000000s' % {'k': 1} }}",
    "wide percent behind flags": "{{ '%- #+0(3000000000d' | replace('(', '') % 1 }}",
    "precise percent": "{{ '%.3000000000f' % 1 }}",
    "percent by parity": "{{ '%3000000000d' is even }}",
    "percent by division": "{{ '%3000000000d' is divisibleby(1) }}",
    "rounding a text": "{{ 'x' | round(9, 'ceil') }}",
    "wide nested braces": "{{ '{:{}}'.format(1, 3000000000) }}",
    "precise braces": "{{ '{:.3000000000f}'.format(1) }}",
    "padding": "{{ 'x'.center(3000000000) }}",
    "padding by name": "{{ 'x'.rjust(3000000000) ~ 'x'.zfill(3000000000) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(tabsize=3000000) }}",
    "replaced markup": "{{ ('x' * 100000) | e | replace('x', 'x' * 100000) }}",
    "replacing nothing": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "joining shared text": "{{ ['x' * 100000] * 100000 | join }}{{ (['x' * 100000] * 100000) | join }}",
    "escaping": "{{ ('&' * 2000000) | e | e | e | e }}",
    "raising shared lists": SHARED + "{{ raise_exception(ns.l) }}",
    "lowering shared lists": SHARED + "{{ ns.l | lower }}",
    "testing shared lists for case": SHARED + "{{ ns.l is lower }}",
    "formatting shared lists": SHARED + "{{ '%s' % [ns.l] }}{{ '{}'.format(ns.l) }}",
    "comparing shared items": SHARED + "{{ {1: ns.l}.items() == {1: ns.m}.items() }}",
    "finding shared values": SHARED + "{{ ns.l in {1: ns.m}.values() }}",
    "finding by test": SHARED + "{{ ns.l is in([ns.m]) }}",
    "long attribute": "{{ (['x'] * 100000) | map(attribute='0.' * 30000 ~ '0') | list | length }}",
    "many sort keys": "{{ (['x'] * 100000) | sort(attribute='0,' * 30000 ~ '0') | length }}",
    "a list of letters": "{{ ('x' * 3000000) | list | length }}",
    "sorted letters": "{{ ('x' * 3000000) | sort | length }}",
    "wide separators": "{{ ([0] * 10000) | tojson(separators=(',' * 10000, ':')) }}",
    "line ends of every kind": "{{ ('a\\r' * 100000) | indent('x' * 10000) }}",
    "many sort keys of long text": "{{ (['x' * 1000] * 4000) | sort(attribute='0,0,0,0,0,0,0,0') | length }}",
    "tuples of equal hashes": EQUAL_HASHES + "{{ ns.l | unique | list | length }}",
    "keys of equal hashes": EQUAL_HASHES + "{{ ns.l | groupby('0') | unique(attribute='list') | list | length }}",
    "named steps": "{% for a in range(100000) %}{{ range(100000) | map('made value') | list | length }}{% endfor %}",
}  # fmt: skip

# Expressions that try to reach Python objects. Each succeeded in an earlier version, or would succeed in Jinja's own sandbox.
ESCAPES = {
    "format of safe text": "{{ ('{0.__class__}' | safe).format(1) }}",
    "format of escaped text": "{{ ('{0.__class__}' | e).format(1) }}",
    "format_map": "{{ ('{a.__class__}' | safe).format_map({'a': 1}) }}",
    "globals": "{{ ('{0.__globals__}' | safe).format(raise_exception) }}",
    "environment": "{{ ('{0.__globals__[sys].modules[os].environ}' | safe).format(strftime_now) }}",
    "format of a block": "{% autoescape true %}{% set s %}{0.__class__}{% endset %}{{ s.format(1) }}{% endautoescape %}",
    "format of a macro": "{% autoescape true %}{% macro m() %}{0.__class__}{% endmacro %}{{ m().format(1) }}{% endautoescape %}",
    "format by map": "{{ ['{0.__class__}'] | map('format', 1) | first }}{{ ['{0.__class__}' | e] | map('attr', 'format') | first }}",
    "conversion": "{{ '{0.__class__!r}'.format(1) }}",
    "items in a format": "{{ '{0[__class__]}'.format(1) }}",
    "nested field": "{{ '{0:{1.__class__}}'.format(1, 2) }}",
    "attribute filter": "{{ (raise_exception | attr('__globals__')).keys() }}",
    "item syntax": "{{ raise_exception['__globals__'].keys() }}",
    "map by attribute": "{{ ([raise_exception] | map(attribute='__globals__') | first).keys() }}",
    "sorted by attribute": "{{ ([raise_exception, range] | sort(attribute='__globals__')).keys() }}",
    "self": "{{ self._TemplateReference__context.keys() }}",
    "undefined": "{{ missing._undefined_obj.x }}",
    "undefined item": "{{ messages[0].missing._fail_with_undefined_error() }}",
    "loop": "{% for m in messages %}{{ loop._iterable.x.y }}{% endfor %}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}{{ m._environment.x }}",
    "namespace": "{{ namespace()._Namespace__attrs.x }}",
    "cycler": "{{ cycler(1).__init__.__globals__ }}",
    "joiner": "{{ joiner().__class__.__init__ }}",
    "method": "{{ ''.join.__self__.x }}",
    "method of a method": "{{ ''.join.owner.x }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "number": "{{ (1).to_bytes(8) }}",
    "generator": "{{ (messages | map('length')).gi_frame.f_globals }}",
    "loop variables": "{{ dict(_loop_vars={'the meter': 1}, a=1).the.meter }}",
    "context of a filter": "{{ 1 | string(context=2) }}",
    "import": "{% import 'os' as os %}",
    "block": "{% block b %}{{ super.x }}{% endblock %}",
}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_template_runs_away(source: str) -> None:
    """A template is refused when it has used 0.1 s of CPU time or 8 MiB of memory. The operation that is running then may still finish, so
    the test allows somewhat more."""
    limits = Limits(time_s=0.1, memory_bytes=8 << 20)
    tracemalloc.start()
    began_s = time.thread_time()
    try:
        with pytest.raises(TemplateError):
            ChatTemplate(source, {}).render(MESSAGES, limits=limits)
        took_s = time.thread_time() - began_s
        # Joining a text needs memory for its parts, for the list of parts and for the joined text at the same time.
        assert tracemalloc.get_traced_memory()[1] < 8 * limits.memory_bytes
        assert took_s < 3.0, "0.1 s, times about ten for tracing, is exceeded"
    finally:
        tracemalloc.stop()


INTERNAL = ("step", "_step", "compared value", "made value", "key value", "joined text", "_made", "_key", "_concat", "_output", "finalize")


@pytest.mark.parametrize("name", INTERNAL)
def test_names_of_the_sandbox_mean_nothing_in_a_template(name: str) -> None:
    """A template that called the filter `step` with a negative number would refund the meter."""
    template = ChatTemplate(f"{{{{ [-9] | map({name!r}) | list }}}}", {})
    with pytest.raises(TemplateError, match="No filter named"):
        template.render(MESSAGES)
    with pytest.raises(TemplateError, match="No test named"):
        ChatTemplate(f"{{{{ [-9] | select({name!r}) | list }}}}", {}).render(MESSAGES)
    if name.isidentifier():
        assert ChatTemplate(f"{{{{ {name} is defined }}}}{{{{ messages[0].{name} is defined }}}}", {}).render(MESSAGES) == "FalseFalse"
        with pytest.raises(TemplateError, match="No filter named"):
            ChatTemplate(f"{{{{ -9 | {name} }}}}", {}).render(MESSAGES)


@pytest.mark.parametrize("number", [-1, -(10**30), True, 1.5, float("nan"), "1", None])
def test_the_meter_takes_counts_only(number: Any) -> None:
    """No value that is not a count reaches the meter."""
    meter = Meter(Limits(time_s=1.0, memory_bytes=1000))
    for take in (meter.charge, meter.step):
        with pytest.raises(TemplateLimit, match="expected a count"):
            take(number)


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_no_template_reaches_python(source: str) -> None:
    """A template is refused if it uses an attribute, a method or a format that the sandbox does not list as allowed."""
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("('<a>' | safe) + '<b>'", "<a><b>"),
        ("('<a>' | e).replace('&', '<')", "<lt;a<gt;"),
        ("['<', '>'] | map('safe') | join('&')", "<&>"),
        ("'<a>' | forceescape | length", "9"),
    ],
)
def test_escaped_and_safe_texts_are_plain_texts(expression: str, text: str) -> None:
    assert ChatTemplate("{{ " + expression + " }}", {}).render(MESSAGES) == text
