"""Every format of the registry reads the calls that its models write, wherever the stream is cut, and its grammar allows them. The
conversations are generated from seeds."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from server.messages import Constraint, ConstraintKind
from server.text.detokenize import Detokenizer, StopRules
from server.text.dialects.calls.tagged_calls import TaggedCalls
from server.text.dialects.dialect import Dialect
from server.text.dialects.format import AnswerRules, Format
from server.text.dialects.formats.harmony import Harmony
from server.text.dialects.registry import FORMATS, WRITTEN
from server.text.dialects.tool import ToolSchema
from server.text.grammar import json_text
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer
from tests.server.text.dialects.written import SCHEMAS, TOOLS, WRITERS, Call, conversation
from tests.server.text.vocabulary import accepts, accepts_marked, behind_marker

HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
BARE = {name for name in WRITERS if (calls := FORMATS[name].call_syntax) is not None and calls.bare}


def test_every_format_has_a_writer():
    assert {form.name for form in WRITTEN if not isinstance(form, Harmony)} == WRITERS.keys()


def rules_of(form: Format, *, splits: bool = False) -> AnswerRules:
    return AnswerRules(form, form.thoughts[0], splits=splits, tools=TOOLS)


def parse(rules: AnswerRules, pieces: list[str]) -> tuple[str, str, list[Call], list[Part]]:
    parser = rules.parser()
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert parser.num_calls == len(starts) and len({start.id for start in starts}) == len(starts)
    arguments = ["".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == start.index) for start in starts]
    thought, content = ("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content))
    return thought, content, [(start.name, json.loads(text)) for start, text in zip(starts, arguments, strict=True)], parts


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read(name):
    rules = rules_of(FORMATS[name])
    for seed in range(200):
        calls, chance = conversation(seed), random.Random(seed)
        before = "" if name in BARE else chance.choice(["", "I look.\n", "a < b, [1] and {x}: "])
        text = before + WRITERS[name](calls)
        cuts = sorted(chance.sample(range(len(text) + 1), 4))
        for pieces in ([text], [*text], [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]):
            assert parse(rules, pieces)[1:3] == (before.rstrip(), calls), (seed, text)


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read_wherever_the_stream_is_cut(name):
    form = FORMATS[name]
    rules, thoughts = rules_of(form, splits=True), form.thoughts[0]
    for seed in range(8):
        calls = conversation(seed)
        text = f"{thoughts.begin}\nhm\n{thoughts.closing}\n\n{WRITERS[name](calls)}"
        for cut in range(len(text) + 1):
            assert parse(rules, [text[:cut], text[cut:]])[:3] == ("hm\n", "", calls), (seed, cut)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_is_the_same_for_every_cut(name):
    """Whatever the answer's end is, the parts are those of the whole text; no text of a complete call becomes content."""
    rules = rules_of(FORMATS[name])
    whole = WRITERS[name](conversation(3))
    for end in range(len(whole)):
        texts = [_joined(rules, [whole[:end]]), _joined(rules, [*whole[:end]])]
        assert texts[0] == texts[1], whole[:end]


def _joined(rules: AnswerRules, pieces: list[str]) -> list[tuple[str, str]]:
    """Return the kinds and texts of parts; neighbours of the same kind are joined."""
    parser, found = rules.parser(), list[tuple[str, str]]()
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        kind, text = type(part).__name__, part.name if isinstance(part, CallStart) else part.text
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_no_more_calls_than_allowed(name):
    form = FORMATS[name]
    parser = AnswerRules(form, form.thoughts[0], tools=TOOLS, max_calls=1).parser()
    text = WRITERS[name]([("now", {}), ("now", {})])
    parts = parser.push(text) + parser.push(" more") + parser.finish()
    assert parser.done and [part.name for part in parts if isinstance(part, CallStart)] == ["now"]
    assert not any(isinstance(part, Content) for part in parts)


def test_parts_of_a_call_beyond_the_allowed_number_are_dropped():
    """The first call is plain JSON, the second one has the format's markers. Both arrive in one step, and the answer ends inside the second
    call."""
    form = FORMATS["qwen3-coder"]
    parser = AnswerRules(form, form.thoughts[0], tools=TOOLS, max_calls=1).parser()
    plain, marked = WRITERS["json"]([("now", {})]), WRITERS["qwen3-coder"]([("write_file", {"path": "a"})])
    parts = [*parser.push(f"{plain}\n{marked[: marked.index('</parameter>') + 5]}"), *parser.finish()]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == "{}"


@pytest.mark.parametrize("name", WRITERS)
def test_text_that_is_no_call_stays(name):
    rules = rules_of(FORMATS[name])
    opening = FORMATS[name].markers[0] if FORMATS[name].markers else ""
    long = " 1 +" * 100  # a short text behind a marker may be a call that was cut off
    for text in ["", "  ", "plain", f"see {opening}{long}", "[1, 2] < {3}", f"{opening}[1](x){long}"]:
        for pieces in ([text], [*text]):
            assert parse(rules, pieces)[1:3] == (text, []), text
    assert parse(rules, ["import functools"])[1:3] == ("import functools", [])


@pytest.mark.parametrize("name", [name for name in WRITERS if (calls := FORMATS[name].call_syntax) and calls.announces])
def test_no_marker_becomes_content_if_a_call_is_cut_off(name):
    """Wherever an answer ends after an opening marker, its content is the text before the marker."""
    rules, text = rules_of(FORMATS[name]), WRITERS[name]([("add", {"a": 1}), ("now", {})])
    opening = FORMATS[name].call_syntax.opening
    if not text.startswith(opening):
        text = opening + text  # the marker is optional
    for end in range(len(opening), len(text)):
        for pieces in (["I look. ", text[:end]], [*"I look. ", *text[:end]]):
            parser = rules.parser()
            parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
            assert "".join(part.text for part in parts if isinstance(part, Content)) == "I look.", text[:end]


@pytest.mark.parametrize("name", WRITERS)
def test_the_grammar_allows_what_models_write(name):
    form = FORMATS[name]
    forced = form.forced_calls(TOOLS, {}, several=True)
    for seed in range(25):
        assert accepts(forced, WRITERS[name](conversation(seed))), WRITERS[name](conversation(seed))
    one = form.forced_calls(TOOLS, {}, several=False)
    assert accepts(one, WRITERS[name]([("now", {})]))
    for refused in (
        [("now", {}), ("now", {})],
        [("other", {})],
        [("now", {"x": 1})],
        [("add", {})],
        [("add", {"a": 1.5})],
        [("move-to.2", {"point": {"label": "x"}})],
        [("write_file", {"path": "a", "content": "b", "mode": "other"})],
    ):
        assert not accepts(one, WRITERS[name](refused)), WRITERS[name](refused)
        further = WRITERS[name]([("now", {}), *refused])
        assert accepts(forced, further) is (refused == [("now", {}), ("now", {})]), further
    assert not accepts(one, "plain")


@pytest.mark.parametrize("text", ["", "notes.txt", "notes.txt\n", "a\nb", "<b>\n</"])
@pytest.mark.parametrize("padding", ["", "\n"])
@pytest.mark.parametrize("ids", [{}, {"</parameter>": 256}])
def test_a_text_ends_with_its_tag_and_the_grammar_agrees(text, padding, ids):
    """Qwen3-Coder leaves out the line end before a closing tag, for example of an empty text. If the grammar read on, a call that the
    parser has read would never end."""
    form = FORMATS["qwen3-coder"]
    tool = ToolSchema("f", {"properties": {"a": {"type": "string"}}, "required": ["a"]})
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}{padding}</parameter>\n</function>\n</tool_call>"
    assert accepts_marked(form.forced_calls([tool], ids, several=False), written, ids)
    parts = [*(parser := AnswerRules(form, tools=[tool]).parser()).push(written), *parser.finish()]
    found = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
    assert found == {"a": (text + padding).removesuffix("\n")}


@pytest.mark.parametrize(
    "name", [*(name for name in WRITERS if (calls := FORMATS[name].call_syntax) and calls.announces and not calls.bare)]
)
@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_in_json_may_be_a_call_instead(name, thinks):
    """Agents demand JSON for the last answer, and offer tools for those before it."""
    form = FORMATS[name]
    answer = Constraint(ConstraintKind.JSON_SCHEMA, json_text({"type": "object", "properties": {"a": {"type": "integer"}}}))
    calls = form.forced_calls([ToolSchema(tool.name) for tool in TOOLS], {}, several=True)
    thoughts = form.thoughts[0] if thinks else None
    framed = form.framed(answer, {}, thoughts, thinking=False, is_call=False, calls=calls)
    before = f"{thoughts.begin}hm{thoughts.closing}\n" if thoughts else ""
    call, other = WRITERS[name]([("add", {"a": 1})]), WRITERS[name]([("other", {})])
    for text in ('{"a": 1}', call, f"{call}\nso\n", WRITERS[name]([("now", {}), ("add", {"a": 2})])):
        assert accepts(framed, text) and accepts(framed, before + text), text
    for text in ("so", '{"a": "x"}', "", other, call + other, f"{call} so {other}"):
        assert not accepts(framed, text), text
    ids = token_ids(form)
    marked = form.framed(
        answer, ids, thoughts, thinking=False, is_call=False, calls=form.forced_calls([ToolSchema("now")], ids, several=True)
    )
    now = WRITERS[name]([("now", {})])
    assert accepts_marked(marked, now, ids) and accepts_marked(marked, f"{now} so", ids) and accepts_marked(marked, '{"a": 1}', ids)
    assert not accepts_marked(marked, f"{now} so {other}", ids)


def token_ids(form: Format) -> dict[str, int]:
    """Return ids of the format's markers, as if each were one token: the tags, or the token within the tags."""
    calls = form.call_syntax
    tokens = calls.tokens if isinstance(calls, TaggedCalls) and calls.tokens else form.markers
    return {marker: 256 + number for number, marker in enumerate(tokens)}


@pytest.mark.parametrize("name", WRITERS)
def test_markers_may_be_single_tokens(name):
    form = FORMATS[name]
    ids, calls = token_ids(form), form.call_syntax
    forced = form.forced_calls(TOOLS, ids, several=True)
    behind = None if calls is None else behind_marker(calls, TOOLS, ids)
    for seed in range(12):
        text = WRITERS[name](conversation(seed))
        assert accepts_marked(forced, text, ids), text
        if calls is not None and behind is not None and calls.opening in ids and text.count(calls.opening) == 1:
            assert accepts_marked(behind, text.removeprefix(calls.opening), ids), text


@pytest.mark.parametrize("name", WRITERS)
def test_calls_begin_as_the_selection_of_a_tool_expects(name):
    calls = FORMATS[name].call_syntax
    if calls is None or calls.bare:
        return
    for tool in TOOLS:
        text = WRITERS[name]([(tool.name, {"a": 1})]).removeprefix(calls.opening)
        beginnings = calls.beginnings(tool.name)
        assert not beginnings or any(text.startswith(beginning) for beginning in beginnings), (beginnings, text)


class Written:
    """A template that writes calls as the models of a format do."""

    source = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def render(self, messages, tools=None, add_generation_prompt=True, **_):
        text = "".join(f"<|{message['role']}|>{message['content']}{self._calls(message)}<|end|>\n" for message in messages)
        return text + ("<|assistant|>" if add_generation_prompt else "")

    def _calls(self, message) -> str:
        functions = [call["function"] for call in message.get("tool_calls", [])]
        return WRITERS[self.name]([(one["name"], one["arguments"]) for one in functions]) if functions else ""


@pytest.mark.parametrize("name", WRITERS)
def test_the_format_is_that_in_which_the_template_writes_calls(name):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = Written(name)
    same = {"llama4": "llama3"}  # without markers, both write the same
    assert Dialect.of(tokenizer, None, None).format.name == same.get(name, name)


def test_tokens_of_the_vocabulary_tell_the_format_if_the_template_writes_no_calls():
    for markers, name in [(("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2"), (("<tool_call>", "</tool_call>"), "hermes")]:
        tokenizer = ByteTokenizer(specials=markers)
        tokenizer.chat_template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
        assert Dialect.of(tokenizer, None, None).format.name == name


def test_kimi_writes_the_id_of_a_call_again():
    """The template writes ids of calls and no names, so the id must be the one that the model wrote."""
    *_, parts = parse(rules_of(FORMATS["kimi-k2"]), [WRITERS["kimi-k2"]([("now", {}), ("add", {"a": 1})])])
    assert [part.id for part in parts if isinstance(part, CallStart)] == ["functions.now:0", "functions.add:1"]
    template = (
        "{% for message in messages %}<|im_{{ message.role }}|>{{ message.content }}"
        "{% if message.tool_calls %}<|tool_calls_section_begin|>{% for call in message.tool_calls %}"
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>"
        "{% endfor %}<|tool_calls_section_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
    )
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ChatTemplate(template, {})
    assert Dialect.of(tokenizer, None, None).format.name == "kimi-k2"


def test_kimi_counts_its_calls_itself():
    """The number in an id goes on from earlier turns, so the selection of a tool must not set it. An id that the model repeats is
    replaced, because clients find results by it. The template writes the id again, so it keeps its form."""
    syntax = FORMATS["kimi-k2"].call_syntax
    assert syntax is not None
    second = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    assert any(second.startswith(beginning) for beginning in syntax.beginnings("now"))
    assert not any(other.startswith(one) for one in syntax.beginnings("no") for other in syntax.beginnings("now"))
    assert accepts(behind_marker(syntax, TOOLS), second)
    written = WRITERS["kimi-k2"]([("now", {}), ("now", {})]) + WRITERS["kimi-k2"]([("now", {}), ("now", {}), ("now", {})])
    *_, parts = parse(rules_of(FORMATS["kimi-k2"]), [written])
    assert [part.id for part in parts if isinstance(part, CallStart)] == [f"functions.now:{number}" for number in range(5)]
    *_, parts = parse(rules_of(FORMATS["kimi-k2"]), [f"<|tool_calls_section_begin|>{second}" * 2])
    assert [part.id for part in parts if isinstance(part, CallStart)] == ["functions.now:7", "functions.now:1"]


def test_mistral_writes_the_id_of_a_call_again():
    """Some models of Mistral write an id between the name and the arguments. Their templates refuse ids of another length."""
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    tokenizer = ByteTokenizer(specials=markers)
    dialect = Dialect.of(tokenizer, "mistral", None)
    ids = {marker: 258 + number for number, marker in enumerate(markers)}
    calls = [("now", "aB3dE6gH9", "{}"), ("add", "000000001", '{"a": 1}'), ("now", "aB3dE6gH9", "{}"), ("now", "1", "{}")]
    tokens = [
        token
        for name, id, arguments in calls
        for piece in ("[TOOL_CALLS]", name, "[CALL_ID]", id, "[ARGS]", arguments)
        for token in ([ids[piece]] if piece in ids else piece.encode())
    ]
    written = Detokenizer(tokenizer, StopRules(), dialect.shown).push(tokens)
    for pieces in ([written], [*written]):
        _, content, found, parts = parse(dialect.rules(TOOLS), pieces)
        assert (content, found) == ("", [(name, json.loads(arguments)) for name, _, arguments in calls])
        first, second, repeated, short = (part.id for part in parts if isinstance(part, CallStart))
        assert (first, second) == ("aB3dE6gH9", "000000001")
        assert repeated != first and len(repeated) == len(short) == 9
    syntax, tokens = FORMATS["mistral"].call_syntax, {marker: 256 + number for number, marker in enumerate(markers)}
    assert syntax is not None
    for rest, is_allowed in (("aB3dE6gH9[ARGS]{}", True), ("1[ARGS]{}", False)):
        assert accepts_marked(behind_marker(syntax, TOOLS, tokens), f"now[CALL_ID]{rest}", tokens) is is_allowed
    assert any("now[CALL_ID]".startswith(beginning) for beginning in syntax.beginnings("now"))


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("path", "12", "12"),
        ("path", "true", "true"),
        ("path", '{"a": 1}', '{"a": 1}'),
        ("lines", "[1, 2]", [1, 2]),
        ("lines", "(1, 2)", [1, 2]),
        ("overwrite", "True", True),
        ("overwrite", "false", False),
        ("overwrite", "perhaps", "perhaps"),
        ("point", "{'x': 1.5, 'label': None}", {"x": 1.5, "label": None}),
        ("share", "7", 7),
        ("share", "NaN", "NaN"),
        ("share", "1e999", "1e999"),
        ("lines", "[1e999]", "[1e999]"),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "12", "12"),
        ("count", "3.0", 3),
        ("count", "3.5", "3.5"),
        ("unknown", "[1]", [1]),
        ("unknown", "text", "text"),
        ("kind", "1", 1),
    ],
)
def test_text_between_tags_is_what_the_schema_says(key, written, value):
    properties = {**SCHEMAS["write_file"], **SCHEMAS["move-to.2"], "count": {"type": "integer"}, "kind": {"$ref": "#/$defs/kind"}}
    tool = ToolSchema("f", {"properties": properties, "$defs": {"kind": {"enum": [1, 2]}}})
    parser = AnswerRules(FORMATS["qwen3-coder"], tools=[tool]).parser()
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    parts = [*parser.push(text), *parser.finish()]
    assert json.loads("".join(part.text for part in parts if isinstance(part, CallArguments))) == {key: value}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("f(a='it\\'s', b=\"x\\n\\u00fc\\x41\")", {"a": "it's", "b": "x\nüA"}),
        ('f(a="""two\nlines "" """, b=\'\')', {"a": 'two\nlines "" ', "b": ""}),
        ("f(a=true, b=null, c=None, d=-1.5e3)", {"a": True, "b": None, "c": None, "d": -1500.0}),
        ("f( a = [1, (2, 3),], b={'k': {}} )", {"a": [1, [2, 3]], "b": {"k": {}}}),
        ("f(a='\\ud83d\\ude42')", {"a": "🙂"}),
        ("f(a=1 + 2)", None),
        ("f(a=open('x'))", None),
        ("f(1, 2)", None),
        ("f(1, b=2)", None),
        ("f('x', b=2)", None),
        ("f(x)", None),
        ("f(a=1, b)", None),
        ("f(a={b})", None),
        ("f(" + "a=" + "[" * 40 + "]" * 40 + ")", None),
    ],
)
def test_python_is_read_and_never_run(written, arguments):
    for pieces in ([written], [*written]):
        parser = AnswerRules(FORMATS["lfm2"], tools=[ToolSchema("f")]).parser()
        text = ["<|tool_call_start|>[", *pieces, "]<|tool_call_end|>"]
        parts = [part for piece in text for part in parser.push(piece)] + parser.finish()
        found = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert (json.loads(found) if found else None) == arguments
        assert any(isinstance(part, Content) for part in parts) is (arguments is None)


def test_text_after_a_call_without_names_of_arguments_is_shown():
    parser = AnswerRules(FORMATS["pythonic"], tools=[ToolSchema("add")]).parser()
    parts = [part for piece in "[add(1, 2)] is 3, so x = 3" for part in parser.push(piece)]
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "[add(1, 2)] is 3, so x = 3"
    parts = AnswerRules(FORMATS["gemma4"], tools=[ToolSchema("add")]).parser().push("<|tool_call>call:add{1}<tool_call|> so a: 3")
    assert {type(part) for part in parts} == {Content}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-coder", r'<tool_call><function=f><parameter=a>["\ud83d"]</parameter></function></tool_call>'),
        ("json", r'{"name": "f", "arguments": "{\"a\": [\"\ud83d\"]}"}'),
        ("hermes", r'{"name": "f", "arguments": {"a": ["\ud83d"]}}'),
        ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>'),
        ("llama3", r'<|python_tag|>{"name": "f", "parameters": {"a": ["\ud83d"]}}'),
    ],
)
def test_half_a_character_can_be_sent(name, text):
    """JSON can write half of a surrogate pair, which no answer can carry."""
    parser = AnswerRules(FORMATS[name], tools=[ToolSchema("f")]).parser()
    parts = [*parser.push(text), *parser.finish()]
    (start,) = (part for part in parts if isinstance(part, CallStart))
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert msgspec.json.decode(msgspec.json.encode((start.name, arguments)), type=tuple[str, str])[1] == arguments
    assert arguments == "{}" or json.loads(arguments)["a"][0] in ("\ud83d", "\ufffd")


@pytest.mark.parametrize("name", ["json", "llama3", "llama4", "hermes"])
@pytest.mark.parametrize(
    ("key", "value", "is_call"), [("description", SCHEMAS["add"], False), ("description", {"a": 1}, True), ("why", {"a": 1}, True)]
)
def test_a_definition_of_a_tool_is_no_call_with_or_without_markers(name, key, value, is_call):
    text = json.dumps({"name": "add", key: "Add.", "parameters": value})
    rules = AnswerRules(FORMATS[name], tools=[ToolSchema("add", SCHEMAS["add"])])
    for pieces in ([text], [*text], [text[:20], text[20:]]):
        assert parse(rules, pieces)[1:3] == (("", [("add", value)]) if is_call else (text, [])), pieces


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_plain_call_with_a_number_that_json_lacks_is_none(number):
    text = f'{{"name": "add", "arguments": {{"a": {number}}}}}'
    parser = AnswerRules(FORMATS["hermes"], tools=TOOLS).parser()
    parts = [*parser.push(text), *parser.finish()]
    assert {type(part) for part in parts} == {Content} and "".join(part.text for part in parts) == text


@pytest.mark.parametrize(
    "name", ["command-a", "deepseek-v3", "deepseek-v3.1", "harmony", "hermes", "json", "kimi-k2", "llama3", "mistral", "phi4"]
)
def test_raw_line_ends_in_arguments_are_escaped_as_they_are_streamed(name):
    """Small models leave control characters in strings unescaped, also behind a backslash. Clients that read the stream refuse them."""
    calls, form = [("f", {"a": "x|y \\", "b": ["|"], "c": 1})], FORMATS[name]
    text = HARMONY_CALL.format(json.dumps(calls[0][1])) if name == "harmony" else WRITERS[name](calls)
    for end in ("\n", "\r\n\t", "\x01", "\\\n", '\\"\n'):
        written = text.replace("|y", f"{end}y").replace('"|"', f'"{end}"').replace('"c"', '\n"c"')
        meant = end.removeprefix("\\")
        for pieces in ([written], [*written]):
            parser = AnswerRules(form, tools=[ToolSchema("f")]).parser()
            parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
            arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
            assert json.loads(arguments) == {"a": f"x{meant}y \\", "b": [meant], "c": 1}, written


ADDING = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ADDING, "", [("add", {"a": 1})]),
        (f"I add.\n\n{ADDING}", "I add.", [("add", {"a": 1})]),
        (f"I add.\n  {ADDING}\n{ADDING}", "I add.", [("add", {"a": 1})] * 2),
        (f"<tool_call>\n{ADDING}\n{ADDING}", "", [("add", {"a": 1})] * 2),
        (f"Write {ADDING}", f"Write {ADDING}", []),
        ("<function=other>\n</function>", "<function=other>\n</function>", []),
        ("So:\n<function=ad", "So:\n<function=ad", []),
        ("<function", "<function", []),
    ],
)
def test_qwen3_coder_may_leave_out_the_marker_before_a_call(text, content, calls):
    rules = rules_of(FORMATS["qwen3-coder"])
    for pieces in ([text], [*text]):
        assert parse(rules, pieces)[1:3] == (content, calls)


@pytest.mark.parametrize("name", WRITERS)
def test_any_text_gives_the_same_parts_for_every_cut(name):
    """Each text has the format's markers in any order, and pieces of calls. What is no call stays content."""
    form, chance = FORMATS[name], random.Random(name)
    call = WRITERS[name]([("add", {"a": 1}), ("write_file", {"path": "p", "content": "c"})])
    rules = rules_of(form, splits=True)
    for _ in range(200):
        pieces = [*form.markers, form.thoughts[0].begin, form.thoughts[0].closing, call, *"{}[]()<>=\"':,\\\n a1", "add", "now", "true"]
        pieces += [call[: chance.randrange(len(call))], call[chance.randrange(len(call)) :]]
        text = "".join(chance.choices(pieces, k=chance.randint(1, 7)))
        cuts = sorted(chance.sample(range(len(text) + 1), min(3, len(text))))
        expected = _joined(rules, [text])
        assert _joined(rules, [*text]) == expected, text
        assert _joined(rules, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected, text
