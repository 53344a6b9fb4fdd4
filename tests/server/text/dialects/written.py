"""Calls as models write them, by format: transcribed from the templates and the documentation of the models, not from the product's code.

`WRITERS` has a function per format from calls to the text of an answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from server.text.dialects.tool import ToolSchema

Call = tuple[str, dict[str, object]]
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "label": {"type": "string"}}, "required": ["x"]}
SCHEMAS: dict[str, dict[str, object]] = {
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "write_file": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "mode": {"type": "string", "enum": ["append", "replace"]},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "overwrite": {"type": "boolean"},
    },
    "move-to.2": {"point": POINT, "share": {"type": "number"}, "note": NULLABLE},
    "now": {},
}
REQUIRED = {"add": ["a"], "write_file": ["path", "content"], "move-to.2": ["point"], "now": []}
TOOLS = [ToolSchema(name, {"type": "object", "properties": properties, "required": REQUIRED[name]}) for name, properties in SCHEMAS.items()]
WORDS = [
    "a",
    "notes.txt",
    "12",
    "true",
    "None",
    "ü",
    "日本",
    "🙂",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    "<b>",
    "</",
    "{}",
    "[x]",
    "a=1, b",
    "&amp;",
    "\t",
    "//",
]


def conversation(seed: int) -> list[Call]:
    chance = random.Random(seed)
    return [_call(chance) for _ in range(chance.choice([1, 1, 2, 3]))]


def _call(chance: random.Random) -> Call:
    def text(start: str = "w") -> str:
        return start + "".join(chance.choices(WORDS, k=chance.randint(0, 6))) + "e"

    makers: dict[str, Callable[[], object]] = {
        "a": lambda: chance.randint(-9999, 9999),
        "b": lambda: chance.randint(0, 9),
        "path": text,
        "content": text,
        "mode": lambda: chance.choice(["append", "replace"]),
        "lines": lambda: [chance.randint(0, 99) for _ in range(chance.randint(0, 3))],
        "overwrite": lambda: chance.random() < 0.5,
        "point": lambda: {"x": chance.choice([1.5, -2, 0.25]), **({"label": text()} if chance.random() < 0.5 else {})},
        "share": lambda: chance.choice([0.5, 7, -1e-7]),
        "note": lambda: chance.choice([None, text()]),
    }
    name = chance.choice([*SCHEMAS])
    keys = [key for key in SCHEMAS[name] if key in REQUIRED[name] or chance.random() < 0.6]
    return name, {key: makers[key]() for key in keys}


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Sequence[Call], name_key: str = "name", arguments_key: str = "arguments") -> list[str]:
    return [as_json({name_key: name, arguments_key: arguments}) for name, arguments in calls]


def _list(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_objects(calls))}]"


def _separate(before: str, after: str, between: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: between.join(f"{before}{one}{after}" for one in _objects(calls))


def _command_a(calls: Sequence[Call]) -> str:
    numbered = [
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {as_json(arguments)}}}'
        for number, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(numbered) + "\n]<|END_ACTION|>"


def _tagged(pattern: str, parameter: str, between: str = "\n") -> Callable[[Sequence[Call]], str]:
    """Return a writer with a pattern per call, which has NAME and PARAMETERS, and one per parameter, which has KEY, VALUE and TEXT."""

    def one(name: str, arguments: dict[str, object]) -> str:
        written = [
            parameter.replace("KEY", key)
            .replace("TEXT", "true" if isinstance(value, str) else "false")
            .replace("VALUE", value if isinstance(value, str) else as_json(value))
            for key, value in arguments.items()
        ]
        return pattern.replace("NAME", name).replace("PARAMETERS", "".join(written))

    return lambda calls: between.join(one(*call) for call in calls)


def _within(before: str, writer: Callable[[Sequence[Call]], str], after: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: before + writer(calls) + after


def _kimi(calls: Sequence[Call]) -> str:
    inside = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{as_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(inside)}<|tool_calls_section_end|>"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inside = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(inside) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inside = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(inside) + "<｜tool▁calls▁end｜>"


def _python(value: object) -> str:
    match value:
        case None | bool():
            return repr(value)
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case dict():
            return "{" + ", ".join(f"{as_json(key)}: {_python(one)}" for key, one in value.items()) + "}"
        case _:
            return as_json(value)


def _python_calls(calls: Sequence[Call], comma: str = ", ") -> str:
    return comma.join(f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})" for name, arguments in calls)


def _gemma(opening: str, closing: str, quote: str) -> Callable[[Sequence[Call]], str]:
    def written(value: object) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case list():
                return f"[{','.join(map(written, value))}]"
            case dict():
                return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
            case _:
                return as_json(value)

    return lambda calls: "".join(f"{opening}call:{name}{written(arguments)}{closing}" for name, arguments in calls)


_QWEN3_CODER = _tagged("<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>\n")
_DSML = _tagged(
    '<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>', '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n'
)
_INVOKE = _tagged('<invoke name="NAME">\nPARAMETERS</invoke>', '<parameter name="KEY">VALUE</parameter>\n')
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "command-a": _command_a,
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3.1": _deepseek_v31,
    "deepseek-v3.2": _within("<｜DSML｜function_calls>\n", _DSML, "\n</｜DSML｜function_calls>"),
    "deepseek-v4": _within("<｜DSML｜tool_calls>\n", _DSML, "\n</｜DSML｜tool_calls>"),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": _tagged("<tool_call>NAME\nPARAMETERS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    "glm47": _tagged("<tool_call>NAMEPARAMETERS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", between=""),
    "granite": lambda calls: "<|tool_call|>" + _list(calls),
    "hermes": _separate("<tool_call>\n", "\n</tool_call>", "\n"),
    "hunyuan": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "json": lambda calls: "; ".join(_objects(calls)),
    "kimi-k2": _kimi,
    "lfm2": lambda calls: f"<|tool_call_start|>[{_python_calls(calls)}]<|tool_call_end|>",
    "llama3": lambda calls: "; ".join(_objects(calls, arguments_key="parameters")),
    "llama4": lambda calls: "; ".join(_objects(calls, arguments_key="parameters")),
    "minimax-m2": _within("<minimax:tool_call>\n", _INVOKE, "\n</minimax:tool_call>"),
    "mistral": lambda calls: f"[TOOL_CALLS]{_list(calls)}",
    "nemotron": lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>",
    "olmo3": lambda calls: "<function_calls>\n" + _python_calls(calls, "\n") + "\n</function_calls>",
    "phi4": lambda calls: f"functools{_list(calls)}",
    "pythonic": lambda calls: f"[{_python_calls(calls)}]",
    "qwen3-coder": _QWEN3_CODER,
    "seed-oss": _tagged(
        "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>", "<parameter=KEY>VALUE</parameter>\n"
    ),
}
