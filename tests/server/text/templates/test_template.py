"""Chat templates give the same text as plain Jinja, within limits of time and size."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.text.templates.errors import TemplateError, TemplateLimitError, TemplateRejection
from server.text.templates.limits import GLOBAL_NAMES, Limits
from server.text.templates.sandbox import GLOBALS
from server.text.templates.template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Grüße <b> & 'co' "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi", "tool_calls": [{"name": "f", "arguments": {"x": [1, 2.5]}}]},
    {"role": "tool", "content": '{"ok": true}'},
    {"role": "user", "content": "and 世界?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["x"], "properties": {"x": {}, "y": {}}}}}]

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last == -1 and message.role == 'user' and not (message.content.startswith('<tool>') and 'x' in message.content) %}
        {%- set ns.last = index %}
    {%- endif %}
    {%- set ns.seen = ns.seen + [message['role']] %}
{%- endfor %}
{% for message in messages %}
{{ '<|im_start|>' + message.role ~ '\\n' }}
    {%- set content = message.content | trim %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
{{ content }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}{{ call.name ~ ': ' ~ (call.arguments | tojson(indent=2)) }}{% endfor %}
    {%- endif %}
<|im_end|>
{% endfor %}
{{ ns.last }}/{{ ns.seen | join(', ') }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

VARIOUS = """
{%- macro show(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value | dictsort -%}{{ '  ' * depth }}{{ key }}={{ show(item, depth + 1) }};{%- endfor -%}
    {%- elif value is iterable and value is not string -%}
        [{% for item in value %}{{ show(item, depth + 1) }}{% if not loop.last %},{% endif %}{% endfor %}]
    {%- else -%}{{ value | string | upper }}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}{{ show(tools) }}
{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | map('trim') | join('|') }}
{{ messages | map(attribute='role') | unique | list | length }} {{ messages | rejectattr('tool_calls', 'defined') | list | count }}
{% for message in messages if message.role != 'tool' %}
{{ loop.index }}{{ loop.cycle('a', 'b') }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}
{% set block %}{{ messages[0].content.replace('brief', 'long') }}{% endset %}{{ block | indent(4, first=true) }}
{{ '%s-%02d' % ('a', 7) }} {{ '{}:{:>4}'.format('b', 5) }} {{ 7 // 2 }} {{ 2 ** 10 }}
{{ 3.5 | round | int }} {{ [3, 1, 2] | sort | first }}
{{ messages[0].get('name', 'nobody') }} {{ messages[1]['content'].split() | length }} {{ none is none }}
{{ missing is undefined }}{{ missing }}
{% for key, value in messages[0].items() %}{{ key }}:{{ value | length }} {% endfor %}{{ dict(a=1) | tojson }} {{ {'a': [1, {}]} }}
{% macro wrap() %}({{ caller('x') }}){% endmacro %}{% call(x) wrap() %}{{ x }}!{% endcall %}{% filter upper %}shout{% endfilter %}
"""


def plain(source: str, **variables: object) -> str:
    """Render the template with plain Jinja and no limits. The result is the reference."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(source).render(**variables)


@pytest.mark.parametrize("source", [CHATML, VARIOUS], ids=["chatml", "various"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
def test_metering_changes_no_text(source: str, tools: list[dict[str, object]] | None) -> None:
    expected = plain(source, messages=MESSAGES, tools=tools, add_generation_prompt=True, bos_token="<s>")
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, tools) == expected


def test_tojson_keeps_text_readable() -> None:
    assert ChatTemplate("{{ messages[0] | tojson }}", {}).render([{"content": "ä<'&"}]) == '{"content": "ä<\'&"}'


@pytest.mark.parametrize("test", ["message['content'] is none", "message.content == None", "not message.content is not none"])
def test_a_template_that_tests_for_none_gets_none_beside_calls(test: str) -> None:
    """Templates of R1 distills write the calls of a message only if its content is none."""
    source = "{% for message in messages %}{% if " + test + " %}calls;{% else %}{{ message.content + ';' }}{% endif %}{% endfor %}"
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "user", "content": ""}, calls, {**calls, "content": "a"}, {"role": "assistant", "content": ""}]
    assert ChatTemplate(source, {}).render(messages) == ";calls;a;;"
    assert ChatTemplate(source.replace(test, "not message.content"), {}).render([calls]) == "calls;"


LOOP = "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize("source", [LOOP, LOOP.replace("message['content']", "message.content"), LOOP.replace("['c", "[ 'c")])
def test_a_template_that_loops_over_contents_gets_parts(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": [{"text": "a"}]}]
    assert ChatTemplate(source, {}).render(messages) == "Hi|a|"


@pytest.mark.parametrize("test", ["message['content'] is string", "message.content is not string"])
def test_a_template_that_asks_for_strings_gets_them(test: str) -> None:
    source = "{% for message in messages %}{% if " + test + " %}{{ message.content }}{% endif %}{% endfor %}" + LOOP
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}]).startswith("Hi" if "not" not in test else "||")


def test_a_template_that_only_adds_contents_gets_texts() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert ChatTemplate("{{ 'x' + messages[0].content }}", {}).render([call]) == "x"


def test_a_template_that_appends_arguments_to_a_text_gets_them_as_text() -> None:
    call = "{{ call.function.name + ' ' + call.function.arguments }};"
    source = f"{{% for m in messages %}}{{% for call in m.tool_calls %}}{call}{{% endfor %}}{{% endfor %}}"
    calls = [{"function": {"name": "f", "arguments": {"x": ["ä", 1]}}}, {"function": {"name": "g", "arguments": "{}"}}]
    calls.append({"function": {"name": "h", "arguments": {}}})
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert ChatTemplate(source, {}).render(messages) == 'f {"x": ["ä", 1]};g {};h {};'
    with pytest.raises(TemplateError, match="TypeError: unsupported operand types for"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(messages)


def test_tools_choose_the_template_made_for_them() -> None:
    template = ChatTemplate("plain", {}, tool_source="tools: {{ tools | length }}")
    assert template.render(MESSAGES) == "plain"
    assert template.render(MESSAGES, TOOLS) == "tools: 1"


def test_generation_marks_are_transparent() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.role }};{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {}).render(MESSAGES[:2]) == "system;user;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ m.content }}</s>", "<go on \n"),
        ("{{ m.content | trim }}</s>", "<go on"),
        ("{{ m.content }}{{ m.content }}</s>", "<go on \n go on \n"),
    ],
)
def test_continue_final_message_ends_inside_of_it(body: str, expected: str) -> None:
    template = ChatTemplate("{% for m in messages %}<" + body + "{% endfor %}", {})
    messages = [{"role": "assistant", "content": "go on \n"}]
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True).replace("\ue000", "") == expected


def test_continue_final_message_is_refused_where_it_cannot_be_honoured() -> None:
    with pytest.raises(TemplateError, match="exclude each other"):
        ChatTemplate("", {}).render(MESSAGES, continue_final_message=True)
    with pytest.raises(TemplateError, match="does not write the last message"):
        ChatTemplate("silence", {}).render(MESSAGES, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("place", ["message", "earlier", "variable", "token", "template"])
@pytest.mark.parametrize("marker", ["\ue000", "\ue000\ue001", "\ue001\ue000" + "\ue001" * 5000])
def test_a_text_with_the_marker_of_continue_final_message_is_continued_all_the_same(place: str, marker: str) -> None:
    """For `continue_final_message`, the renderer appends a marker to the last message and cuts the prompt at the marker. If a message, a
    variable or the template already contains the marker's text, that text stays, and the prompt still ends with the last message."""
    at = {name: marker if name == place else "-" for name in ("message", "earlier", "variable", "token", "template")}
    template = ChatTemplate(
        at["template"] + "{% for m in messages %}{{ m.content }}</s>{% endfor %}{{ bos_token }}{{ x }}", {"bos_token": at["token"]}
    )
    messages = [{"content": f"a{at['earlier']}b"}, {"content": f"c{at['message']}d"}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True, variables={"x": at["variable"]})
    assert text == f"{at['template']}a{at['earlier']}b</s>c{at['message']}d"


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt", "range", "namespace", "strftime_now"])
def test_variables_cannot_take_names_that_mean_something_else(name: str) -> None:
    with pytest.raises(TemplateError, match=f"^{name} is a reserved name of chat templates"):
        ChatTemplate("", {}).render(MESSAGES, variables={name: 1})


def test_variables_may_have_names_of_parameters_and_of_parts_of_jinja() -> None:
    names = ["source", "limits", "variables", "context", "environment", "loop", "caller", "the meter", "_loop_vars", "\ud800", ""]
    template = ChatTemplate("{{ source }}{{ limits }}{{ context }}{% for m in [1] %}{{ loop.index }}{% endfor %}", {})
    assert template.render([], variables=dict.fromkeys(names, "x")) == "xxx1"


def test_a_lone_surrogate_is_an_error_of_the_template() -> None:
    with pytest.raises(TemplateError, match=r"line 2: the template has U\+D800") as caught:
        ChatTemplate("a\nb\ud800", {})
    assert caught.value.line == 2
    with pytest.raises(TemplateError, match=r"writes U\+DFFF"):
        ChatTemplate("{{ '\\udfff' }}", {}).render(MESSAGES)
    with pytest.raises(TemplateRejection) as rejection:
        ChatTemplate("{{ raise_exception('\\udfff') }}", {}).render(MESSAGES)
    str(rejection.value).encode()


def test_a_refusal_of_the_template_is_told_apart() -> None:
    template = ChatTemplate("a\n\n{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateRejection, match="line 3: roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.line == 3


def test_long_refusals_are_shortened() -> None:
    with pytest.raises(TemplateRejection) as caught:
        ChatTemplate("{{ raise_exception('x' * 1000000) }}", {}).render(MESSAGES)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("a\n{% for %}", 2, "Expected an expression"),
        ("{{ 'x' | center(9) }}", 1, "No filter named 'center'"),
        ("\n{{ messages.append(1) }}", 2, "no attribute 'append'"),
        ("\n\n{{ 1 / 0 }}", 3, "ZeroDivisionError"),
        ("{{ missing.a.b }}", 1, "'missing' is undefined"),
        ("{% include 'other' %}", 1, "'include' is not allowed"),
    ],
)
def test_errors_name_line_and_cause(source: str, line: int, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.line == line


@pytest.mark.parametrize(
    "expression", ["''.__class__", "(1).to_bytes", "messages.__init__", "raise_exception.__globals__", "'{0.__class__}'.format(1)"]
)
def test_python_is_out_of_reach(expression: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{{ (" + expression + ")() }}", {}).render(MESSAGES)


@pytest.mark.parametrize("source", ["{# " + "x" * (1 << 16) + " #}", "{{a+a}}" * 9_000], ids=["characters", "nodes"])
def test_size_is_limited_before_anything_is_compiled(source: str) -> None:
    with pytest.raises(TemplateLimitError, match="at most"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + " + 1" * 20000 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
    ],
)
def test_nesting_too_deep_is_an_error_of_the_template(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(MESSAGES)


FRAGMENTS = (
    "{{ }} {% %} {# #} if endif endfor endmacro messages x s | list tojson join map( ( ) [ ] { } ' 'x' 7 ** * + ~ in is defined . , : "
    "- range( loop namespace( raise_exception( % \x00 \ud800"
)
WORDS = [*FRAGMENTS.split(" "), " ", "\n", "for x in ", "set s = ", "macro f(x)", "not "]


@given(st.lists(st.sampled_from(WORDS), max_size=40).map("".join))
def test_any_text_renders_or_is_refused(source: str) -> None:
    with suppress(TemplateError):
        assert isinstance(ChatTemplate(source, {}).render(MESSAGES, limits=Limits(0.3, 64 << 20)), str)


def test_the_names_that_clients_may_not_define_are_those_of_the_sandbox() -> None:
    assert {*GLOBALS} == GLOBAL_NAMES
