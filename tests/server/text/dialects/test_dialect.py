"""A model's dialect (its markers for thoughts and calls) is detected from its chat template. The templates here resemble those of real
models."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest

from server.text.dialects.dialect import Dialect
from server.text.parts import Content, Reasoning
from server.text.templates.errors import TemplateLimitError, TemplateUnavailable
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer

HEAD = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
FOOT = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
SEPARATE = HEAD + "{% for call in message.tool_calls or [] %}CALL{% endfor %}" + FOOT
LISTED = (
    HEAD + "{% if message.tool_calls %}[{% for call in message.tool_calls %}CALL{{ ', ' if not loop.last }}{% endfor %}]{% endif %}" + FOOT
)
SINGLE = (
    "{% for message in messages %}{% if message.tool_calls and message.tool_calls|length > 1 %}"
    "{{ raise_exception('one at a time') }}{% endif %}{% endfor %}"
)
PARAMETERS = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'


@dataclass
class WithTemplate(ByteTokenizer):
    source: str = ""

    def __post_init__(self) -> None:
        super().__init__(specials=["<think>", "</think>"])
        self.chat_template = ChatTemplate(self.source, {})


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (SEPARATE.replace("CALL", "<tool_call>\n{{ call.function | tojson }}\n</tool_call>"), "hermes"),
        (LISTED.replace("}[{", "}[TOOL_CALLS][{").replace("CALL{{ '", "{{ call.function | tojson }}{{ '"), "mistral"),
        (SINGLE + SEPARATE.replace("CALL", PARAMETERS), "llama3"),
        (LISTED.replace("CALL", "{{ call.function | tojson }}"), "json"),
        (SEPARATE.replace("CALL", "{{ raise_exception('no tools here') }}"), "json"),
        (HEAD + "{% if tools %}Write <tool_call>.{% endif %}" + FOOT, "json"),
    ],
)
def test_the_template_shows_how_calls_are_written(source, name):
    dialect = Dialect.of(WithTemplate(source), None, None)
    assert dialect.format.name == name
    assert dialect.thinks and dialect.shown == {258: b"<think>", 259: b"</think>"}


@pytest.mark.parametrize("number", range(12))
def test_a_model_is_not_taken_for_another_one_while_the_machine_is_busy(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering that no process did says nothing of the template. An earlier version took it for a refusal, so that a model without
    calls was served until the next load."""
    tokenizer, calls = WithTemplate(SEPARATE.replace("CALL", "<tool_call>\n{{ call.function | tojson }}\n</tool_call>")), list[int]()
    render = tokenizer.chat_template.render

    def busy(*args: object, **options: object) -> str:
        calls.append(1)
        if len(calls) == number + 1:
            raise TemplateUnavailable("the server is busy; try again later")
        return render(*args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(tokenizer.chat_template, "render", busy)
    with pytest.raises(TemplateUnavailable):
        Dialect.of(tokenizer, None, None)


def test_a_model_is_not_taken_for_another_one_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering may take as long as that of a request. An earlier version took a probe that needed a quarter of a second for a refusal:
    on a slow machine, the model had no calls."""
    steps = "{% for _ in range(100) %}{{ '' }}{% endfor %}"
    tokenizer = WithTemplate(steps + SEPARATE.replace("CALL", "<tool_call>\n{{ call.function | tojson }}\n</tool_call>"))
    spent_s = itertools.count(0.0, 0.05)
    monkeypatch.setattr(time, "thread_time", lambda: next(spent_s))
    dialect = Dialect.of(tokenizer, None, None)
    assert dialect.format.name == "hermes" and dialect.writes_calls and dialect.has_system


def test_a_template_that_never_ends_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try takes seconds, in which nobody is served if the model's worker has been replaced."""
    tokenizer, calls = WithTemplate(SEPARATE), list[int]()

    def endless(*_args: object, **_options: object) -> str:
        calls.append(1)
        raise TemplateLimitError("rendering took more than 2 s")

    monkeypatch.setattr(tokenizer.chat_template, "render", endless)
    dialect = Dialect.of(tokenizer, None, None)
    assert len(calls) == 1 and dialect.format.name == "json" and not dialect.writes_calls


QWEN3_CODER = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
    "\n<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
DEEPSEEK_V3 = (
    "{% for message in messages %}{% if message.role == 'user' %}<｜User｜>{{ message.content }}{% elif message.content is none %}"
    "<｜Assistant｜><｜tool▁calls▁begin｜>{% for call in message.tool_calls %}{{ '\n' if not loop.first }}"
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
GLM45 = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ '<think></think>\n' if message.role == 'assistant' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "name"),
    [(QWEN3_CODER, "qwen3-coder"), (DEEPSEEK_V3, "deepseek-v3"), (GLM45, "glm45"), (GLM45.replace("\n<arg", "<arg"), "glm47")],
)
def test_templates_shaped_like_those_of_models_tell_their_format(source, name):
    """These templates have prompts that open thoughts, thoughts before calls, or arguments that are appended to a text."""
    assert Dialect.of(WithTemplate(source), None, None).format.name == name


def test_names_win():
    dialect = Dialect.of(WithTemplate(SEPARATE), "qwen", False)
    assert dialect.format.name == "hermes" and not dialect.thinks


def test_without_a_template():
    dialect = Dialect.of(ByteTokenizer(chat=False), None, None)
    assert dialect.format.name == "json" and not dialect.thinks and dialect.shown == {}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"known are: .*hermes"):
        Dialect.of(ByteTokenizer(), "nope", None)


def test_a_marker_may_be_one_token_without_being_special():
    """A marker may be a token that the tokenizer does not list as special, as in Qwen's vocabularies. The dialect includes such markers,
    because a grammar must name their tokens."""
    tokenizer = WithTemplate(SEPARATE)
    tokenizer.special_ids = frozenset()
    assert Dialect.of(tokenizer, None, None).shown == {258: b"<think>", 259: b"</think>"}


@pytest.mark.parametrize(
    ("name", "markers"),
    [
        ("hermes", ("<think>", "</think>")),
        ("mistral", ("<think>", "</think>")),
        ("mistral", ("[THINK]", "[/THINK]")),
        ("seed-oss", ("<seed:think>", "</seed:think>")),
        ("command-a", ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("gemma4", ("<|channel>", "<channel|>")),
    ],
)
def test_thoughts_have_the_markers_of_the_vocabulary(name, markers):
    dialect = Dialect.of(ByteTokenizer(specials=markers), name, None)
    assert dialect.thinks and dialect.thought_ids == (258, 259) and dialect.thoughts is not None
    begin = dialect.thoughts.begin
    assert begin.startswith(markers[0]) and dialect.is_thinking(f"<|assistant|>{begin}\n") and not dialect.is_thinking("<|assistant|>")
    parser = dialect.rules().parser()
    parts = [*parser.push(f"{begin}hm{markers[1]}\nyes"), *parser.finish()]
    assert parts == [Reasoning("hm"), Content("yes")]
    assert Dialect.of(ByteTokenizer(), name, None).thought_ids is None and not Dialect.of(ByteTokenizer(), name, None).thinks
