"""The JavaScript client of a web export, run in Node: tool calls, embeddings of encoders and decoders, and models with recurrent state."""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.cli.sources import load_of
from deploy.export.c import c_target, export_c
from deploy.export.model import servable
from deploy.export.web import PROGRAM, export_web, web_model
from deploy.model_loading.known import begin
from deploy.model_loading.load import loaded
from deploy.model_loading.servable import Servable
from server.api.openai.chat import conversation_of
from server.api.request.conversation import for_template
from server.api.request.schema import ChatBody, Message
from server.api.request.tool_choice import tool_use
from server.defaults import FILE
from server.interfaces import LoadError
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.parts import CallArguments, CallStart, Part
from tests.conftest import ROOT
from tests.deploy.export.conftest import CONTEXT, NATIVE, SCRIPTS, asked
from tests.deploy.export.test_web import RUNTIME, golden, in_node, native
from tests.node import PATIENCE_S, node, run_node
from tests.server.text.dialects.calls.test_json_calls import CASES, FRAGMENTS, JSON_CALLS, NAMES, TOOLS

pytestmark = pytest.mark.xdist_group("web")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
CALLED = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLED}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "21"}


def script(name: str, *arguments: str | Path, given: str = "") -> bytes:
    command = [node(), SCRIPTS / name, *map(str, arguments)]
    done = subprocess.run(command, input=given.encode(), capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return done.stdout


# --- tool calls --------------------------------------------------------------------------------------------------------


def chat(**body: Any) -> dict[str, Any]:
    return {"method": "chat", "body": {"messages": [ASKED], "temperature": 0, "tools": [WEATHER], **body}}


def test_a_tool_is_called_and_its_result_told(ask: Callable[..., Any]) -> None:
    [[whole], chunks] = ask(chat(), chat(stream=True))
    choice = whole["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "weather" and deltas[0]["id"].startswith("call_")
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21, "sky": "sunny"}'}
    [[told]] = ask(chat(messages=[ASKED, choice["message"], result]))
    assert "21" in told["choices"][0]["message"]["content"] and told["choices"][0]["finish_reason"] == "stop"


def test_offered_tools_need_not_be_called(ask: Callable[..., Any]) -> None:
    [[plain], [named]] = ask(chat(tool_choice="none"), chat(logprobs=True, max_tokens=8, parallel_tool_calls=False))
    assert "tool_calls" not in plain["choices"][0]["message"]
    assert len(named["choices"][0]["logprobs"]["content"]) == named["usage"]["completion_tokens"]


def test_templates_get_the_tools_that_the_server_gives_them() -> None:
    """Templates write definitions in the order of their fields."""
    function = {"more": 1, "strict": True, "parameters": {"type": "object", "default": None}, "description": "Adds.", "name": "add"}
    tools = [
        {"function": function, "further": None, "type": "function"},
        {"type": "function", "function": {"description": None, "name": "now"}},
    ]
    source = """
    import { pathToFileURL } from 'node:url';
    const [module, given] = process.argv.slice(1), { parsed } = await import(pathToFileURL(module));
    console.log(JSON.stringify(parsed({ tools: JSON.parse(given) }, { sampling: {}, defaults: {}, max_context: 8, tools: {} }).tools));
    """
    body = ChatBody.model_validate({"messages": [ASKED], "tools": tools})
    found = json.loads(run_node(source, RUNTIME / "request.mjs", json.dumps(tools)))
    assert json.dumps(found) == json.dumps(conversation_of(body, tool_use(body).tools).tools)


TESTS_NONE = (
    "{% for message in messages %}{% if message.role == 'assistant' and message.content is none %}[{{ message.tool_calls | length }} calls]"
    "{% else %}({{ message.content }}){% endif %}{% endfor %}"
)


def test_a_template_that_asks_for_no_content_gets_none(demo: Servable, site: Path, tmp_path: Path) -> None:
    """As from the server: templates of R1 distills write calls only of messages whose content is none."""
    template = demo.tokenizer.with_template(TESTS_NONE).chat_template
    shutil.copytree(site, folder := tmp_path / "site")
    described = json.loads((folder / PROGRAM).read_text())
    assert described["model"]["tests_none"] == [False, False]
    model = described["model"] | {"chat_template": TESTS_NONE, "tests_none": [True, True]}
    (folder / PROGRAM).write_text(json.dumps({**described, "model": model}))
    turns = [ASKED, CALL, {"role": "assistant", "content": ""}]
    assert template is not None
    [found] = json.loads(script("text.mjs", folder, json.dumps([[], [turns]])))["prompts"]
    assert found == template.render(for_template([Message.model_validate(turn) for turn in turns])) and "[1 calls]" in found


PLAIN = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
SHOWN = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def with_template(template: str, site: Path, to: Path) -> tuple[Servable, Path]:
    """Return the demo model with another template, and the folder of its page."""
    shutil.copytree(ROOT / "deploy" / "demo" / "model", to / "model")
    (to / "model" / FILE).write_text(f"template = {json.dumps(template)}")
    model = servable(begin(load_of(str(to / "model"), quantize="bf16", max_context=CONTEXT, max_batch=1, target=NATIVE.name)))
    shutil.copytree(site, folder := to / "site")
    described = json.loads((folder / PROGRAM).read_text())
    (folder / PROGRAM).write_bytes(msgspec.json.encode({**described, "model": web_model(model, "demo")}))
    return model, folder


def test_tools_that_a_template_would_not_show_are_refused_by_name(demo: Servable, site: Path, tmp_path: Path) -> None:
    """Otherwise the model would never hear of them. So are calls and results of earlier turns, which would vanish from the prompt."""
    model, folder = with_template(PLAIN, site, tmp_path)
    assert web_model(demo, "demo").tools is not None and web_model(model, "demo").tools is None
    turns = [chat(), chat(tools=None, messages=[ASKED, CALL]), chat(tools=None, messages=[ASKED, RESULT]), chat(tools=[], max_tokens=1)]
    *refused, [answered] = asked(folder, *turns)
    assert [event["error"]["param"] for [event] in refused] == ["tools", "messages[1]", "messages[1]"]
    assert "its chat template shows none" in refused[0][0]["error"]["message"]
    assert answered["usage"]["completion_tokens"] == 1


def test_a_template_that_shows_tools_gets_the_calls_that_it_does_not_write(site: Path, tmp_path: Path) -> None:
    """As in the server. The templates of Granite 3 write the content of each message, also of results, but no calls."""
    model, folder = with_template(SHOWN + PLAIN, site, tmp_path)
    template, turns = model.tokenizer.chat_template, [ASKED, CALL, RESULT]
    assert template is not None and web_model(model, "demo").tools is not None
    [[answered]] = asked(folder, chat(messages=turns, max_tokens=1))
    assert answered["usage"]["completion_tokens"] == 1
    [found] = json.loads(script("text.mjs", folder, json.dumps([[], [turns]])))["prompts"]
    assert found == template.render(for_template([Message.model_validate(turn) for turn in turns])) and "<|im_start|>tool\n21" in found


# White space of Python and of JavaScript, halves of surrogate pairs, numbers that JSON lacks, and ids
ODD = [
    "\x85",
    "\x1c",
    "\ufeff",
    "\u00a0",
    '{"name": "add\\ud800", "arguments": "\\ud800"}',
    '{"name": NaN}',
    "[TOOL_CALLS]add[CALL_ID]aB3dE6gH9[ARGS]{}",
]


def test_calls_are_found_as_the_server_finds_them(site: Path) -> None:
    """The JavaScript client finds the same tool calls in an answer as the server's parser, for the test cases of that parser and for random
    texts."""
    chance = random.Random(7)
    texts = [(form, text) for form, text, *_ in CASES]
    texts += [
        (chance.choice([*JSON_CALLS.values()]), "".join(chance.choices([*FRAGMENTS, *ODD], k=chance.randint(1, 9)))) for _ in range(600)
    ]
    given: list[tuple[JsonCalls, list[str], int | None]] = []
    for form, text in texts:
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 5))))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        given.append((form, pieces, chance.choice([None, 1])))
    lines = [{"form": asdict(form), "names": [*NAMES], "pieces": pieces, "mostCalls": most} for form, pieces, most in given]
    found = script("tools.mjs", site, given="".join(json.dumps(line) + "\n" for line in lines)).splitlines()
    for (form, pieces, most), line in zip(given, found, strict=True):
        parser = form.parser(TOOLS, most)
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
        theirs = json.loads(line)
        ids = [(part.pop("id"), own.id) for part, own in zip(theirs, parts, strict=False) if isinstance(own, CallStart) and "id" in part]
        assert theirs == [as_browser(part) for part in parts], (form, pieces)
        assert all(one == other or other not in "".join(pieces) for one, other in ids), "the model wrote another id"


def as_browser(part: Part) -> dict[str, object]:
    match part:
        case CallStart():
            return {"call": part.index, "name": part.name}
        case CallArguments():
            return {"call": part.index, "arguments": part.text}
        case _:
            return {"content": part.text}


# --- embeddings --------------------------------------------------------------------------------------------------------


def in_python(model: Servable, texts: list[list[int]]) -> NDArray[np.float32]:
    embed_model = loaded(model).embed_model
    assert embed_model is not None
    return np.concatenate([embed_model.run([text], [None]) for text in texts])


def test_an_encoder_gives_the_native_vectors(demo: Servable, tmp_path: Path) -> None:
    model = golden("bert", demo)
    export_web(model, "bert", tmp_path, levels=["wasm-relaxed"])
    texts = [[5], [*range(3, 40)], [*range(48, 0, -1)]]
    vectors = np.frombuffer(script("vectors.mjs", tmp_path, json.dumps(texts)), np.float32).reshape(len(texts), -1)
    assert vectors.tobytes() == in_python(model, texts).tobytes()


def test_vectors_have_the_form_that_is_asked_for(ask: Callable[..., Any]) -> None:
    [[plain], [coded], [cut]] = ask(
        *({"method": "embeddings", "body": {"input": "a cat", **more}} for more in ({}, {"encoding_format": "base64"}, {"dimensions": 8}))
    )
    vectors = [answer["data"][0]["embedding"] for answer in (plain, coded, cut)]
    whole = np.array(vectors[0], np.float32)
    assert base64.b64decode(vectors[1]) == whole.tobytes()
    np.testing.assert_allclose(vectors[2], whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": []}, "input", "a text or a list of texts"),
        ({"input": "word " * 400}, "input", "this export holds 256"),
        ({"input": "a", "dimensions": 0}, "dimensions", "expected a number from 1 to"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "expected float or base64"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "the model has no prompts"),
        ({"input": "a", "late_chunking": True}, "late_chunking", "late_chunking is not supported in the browser"),
    ],
)
def test_vectors_that_cannot_be_made_are_refused_by_name(ask: Callable[..., Any], body: dict[str, Any], param: str, said: str) -> None:
    [[refused]] = ask({"method": "embeddings", "body": body})
    assert refused["error"]["param"] == param and said in refused["error"]["message"]


def test_a_generator_gives_no_vectors_unless_the_export_asks_for_them(demo: Servable, site: Path, tmp_path: Path) -> None:
    plain = replace(demo, embeds=False)
    described = json.loads((site / PROGRAM).read_text())
    assert described["model"]["embeds"] and not web_model(plain, "demo").embeds
    shutil.copytree(site, folder := tmp_path / "site")
    (folder / PROGRAM).write_text(json.dumps({**described, "model": described["model"] | {"embeds": False}}))
    said = script("engine.mjs", folder, given=json.dumps({"method": "embeddings", "body": {"input": "a"}}))
    assert b"demo generates text and was not trained for embeddings; export it with --embeddings" in said


# --- models with recurrent state ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_keeps_states_gives_its_bytes(demo: Servable, tmp_path: Path) -> None:
    model = golden("lfm2", demo)
    export_web(model, "lfm2", tmp_path, levels=["wasm-relaxed"])
    prompt = [int(token) for token in np.random.default_rng(2).integers(3, model.files.config.vocab_size, 40)]
    _, expected, tokens = native(model, prompt)
    logits, found = in_node(tmp_path, "wasm-relaxed", prompt)
    assert logits.tobytes() == expected.tobytes() and found == tokens


def test_c_libraries_of_models_that_keep_states_are_refused_by_name(demo: Servable, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="lfm2 keeps a state per sequence"):
        export_c(golden("lfm2", demo), "lfm2", c_target("x86-64-v3"), tmp_path)
    with pytest.raises(LoadError, match="bert generates no text; expected a model that answers texts"):
        export_c(golden("bert", demo), "bert", c_target("x86-64-v3"), tmp_path)
