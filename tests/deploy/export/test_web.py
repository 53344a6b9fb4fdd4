"""The web export of the demo model, run in Node: its logits have the bytes of the native program, and its client returns answers in the
right format."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

import runtime.web.vendor as vendor
from deploy.cli.sources import load_of
from deploy.export.model import servable
from deploy.export.web import LEVELS, PROGRAM, export_web, web_model
from deploy.generate import Prompt, encode
from deploy.model_loading.files import Opened, open_files
from deploy.model_loading.known import begin, carried
from deploy.model_loading.load import loaded
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from runtime.cache_groups import PAGE_SIZE
from server.api.answer.generate import TokenEntry
from server.api.answer.logprobs import LogprobWriter
from server.api.request.conversation import for_template
from server.api.request.schema import Message
from server.defaults import FILE
from server.engine.step_model import Places, StepBatch, StepModel
from server.interfaces import LoadError
from server.messages import TokenLogprob
from tests.compiler.frontend.test_vocabulary import files_of, read
from tests.deploy.export.conftest import CONTEXT, NATIVE, SCRIPTS, asked
from tests.golden.gguf_models import convert
from tests.node import PATIENCE_S, node, run_node

pytestmark = pytest.mark.xdist_group("web")  # the tests of this group share one export of the demo model
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
NUM_TOKENS = 64
ROOT = Path(__file__).parents[3]
RUNTIME = ROOT / "runtime" / "web"


def golden(name: str, demo: Servable) -> Servable:
    """Return a small golden model of a family. It has the demo's tokenizer."""
    return with_tokenizer(ROOT / "tests/golden/models" / name, "f32", demo)


def with_tokenizer(path: Path, quantize: str, demo: Servable) -> Servable:
    """Return a model that has the demo's tokenizer."""
    load = load_of(str(path), quantize=quantize, max_batch=1, target=NATIVE.name)
    return advance(Opened(**carried(demo, Opened, files=open_files(path), load=load)), Servable)


def native(model: Servable, prompt: list[int] | None = None) -> tuple[list[int], NDArray[np.float32], list[int]]:
    """Decode greedily with the native program. Return the prompt, the logits and the sampled tokens."""
    step = loaded(model).step_model
    assert step is not None
    prompt = prompt or encode(model.tokenizer, Prompt(QUESTION, False, 1, 0, 0))
    rows: list[NDArray[np.float32]] = []
    found: list[int] = []
    tokens, end = prompt, 0
    for _ in range(NUM_TOKENS):
        rows.append(step.download(step.run(batch_of(step, tokens, end)))[0])
        end += len(tokens)
        found.append(int(rows[-1].argmax()))
        tokens = found[-1:]
    return prompt, np.stack(rows), found


def batch_of(step: StepModel, tokens: list[int], begin: int) -> StepBatch:
    """Return the step that continues a sequence of `begin` tokens."""
    end = begin + len(tokens)
    positions, pages = np.arange(begin, end, dtype=np.int32), np.arange(1, 1 + -(-end // PAGE_SIZE), dtype=np.int32)[None]
    places = tuple(Places(PAGE_SIZE + positions, pages) for _ in step.limits.groups)
    starts, lens, last = (np.array(x, np.int32) for x in ([0, len(tokens)], [end], [len(tokens) - 1]))
    return StepBatch(np.array(tokens, np.int32), positions, starts, np.zeros_like(positions), lens, places, last)


def in_node(folder: Path, target: str, prompt: list[int], threads: int = 1) -> tuple[NDArray[np.float32], list[int]]:
    command = [node(), SCRIPTS / "logits.mjs", folder, target, json.dumps(prompt), str(NUM_TOKENS), str(threads)]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return np.frombuffer(done.stdout, np.float32).reshape(NUM_TOKENS, -1), json.loads(done.stderr)


def test_relaxed_simd_gives_the_bytes_of_the_native_program(demo: Servable, site: Path) -> None:
    """With relaxed SIMD, the logits of a prompt and of 63 generated tokens have the same bits as those of the native program, and the
    compiled sampler selects the same tokens."""
    prompt, expected, tokens = native(demo)
    for threads in (1, 3):
        logits, found = in_node(site, "wasm-relaxed", prompt, threads)
        assert logits.tobytes() == expected.tobytes()
        assert found == tokens and ANSWER in demo.tokenizer.decode(found)


def test_a_number_of_threads_that_cannot_be_is_refused(site: Path) -> None:
    command = [node(), SCRIPTS / "logits.mjs", site, "wasm-relaxed", "[1]", "1", "17"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0 and "threads is 17; expected 1 to 16" in done.stderr.decode()


def in_form(quantize: str) -> Servable:
    """Return the demo model with weights in a format."""
    return advance(begin(load_of("demo", quantize=quantize, max_context=CONTEXT, max_batch=1, target=NATIVE.name)), Servable)


@pytest.fixture(scope="module")
def exact() -> NDArray[np.float32]:
    """The logits of the demo model with weights in f32."""
    return native(in_form("f32"))[1]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["f32", "bf16", "int8", "int8-fast", "int4-32"])
def test_every_form_of_weights_gives_the_native_answer(quantize: str, exact: NDArray[np.float32], tmp_path: Path) -> None:
    """For every weight format, logits with relaxed SIMD have the same bytes as the native program's. SIMD without fused multiply-add gives
    other last digits, and these may change how an activation is rounded to an integer. This changes logits by less than half of what the
    format itself does, and no token."""
    model = in_form(quantize)
    export_web(model, "demo", tmp_path)
    prompt, expected, tokens = native(model)
    most = max(1e-3, np.abs(expected[:8] - exact[:8]).max() / 2)
    for target in LEVELS:
        logits, found = in_node(tmp_path, target, prompt)
        if "relaxed" in target:
            assert logits.tobytes() == expected.tobytes()
        np.testing.assert_allclose(logits[:8], expected[:8], rtol=0, atol=most)
        assert found[:8] == tokens[:8]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "phi3-longrope"])
def test_families_give_their_bytes(name: str, demo: Servable, tmp_path: Path) -> None:
    """Exports of three more families, which have attention windows, routed experts, and long-context RoPE, compute the same logits as the
    native program, byte for byte."""
    model = golden(name, demo)
    export_web(model, name, tmp_path, levels=["wasm-relaxed"])
    random = np.random.default_rng(1)
    prompt = [int(token) for token in random.integers(3, model.files.config.vocab_size, 40)]
    _, expected, tokens = native(model, prompt)
    logits, found = in_node(tmp_path, "wasm-relaxed", prompt)
    assert logits.tobytes() == expected.tobytes() and found == tokens


@pytest.mark.parametrize("kind", ["Q4_0", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q4_1", "Q5_0", "Q8_0"))])
def test_quantised_files_give_their_bytes(kind: str, demo: Servable, tmp_path: Path) -> None:
    """Exports of GGUF files, whose scales are f16, compute the same logits as the native program, byte for byte."""
    path = convert("qwen2", "qwen2", tmp_path / "m.gguf", kind=GGMLQuantizationType[kind])
    model = with_tokenizer(path, "auto", demo)
    export_web(model, "m", tmp_path / "site", levels=["wasm-relaxed"])
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, model.files.config.vocab_size, 40)]
    _, expected, tokens = native(model, prompt)
    logits, found = in_node(tmp_path / "site", "wasm-relaxed", prompt)
    assert logits.tobytes() == expected.tobytes() and found == tokens


@pytest.mark.parametrize("name", ["xlm-roberta-reranker", "qwen3-reranker"])
def test_a_model_that_classifies_is_refused_by_name(name: str, demo: Servable, tmp_path: Path) -> None:
    with pytest.raises(
        LoadError, match="reranker classifies texts; expected a model that generates text, computes embeddings or transcribes"
    ):
        export_web(golden(name, demo), "reranker", tmp_path)


def chat(**body: Any) -> dict[str, Any]:
    return {"method": "chat", "body": {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **body}}


def test_a_chat_is_answered_in_openais_shape(ask: Callable[..., Any]) -> None:
    [[whole], chunks] = ask(chat(), chat(stream=True, stream_options={"include_usage": True}))
    assert whole["object"] == "chat.completion" and whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == ANSWER
    kept = {"prompt_tokens_details": {"cached_tokens": whole["usage"]["prompt_tokens"] - 1}}  # of the first request
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["usage"] == {**whole["usage"], **kept}
    assert len({c["id"] for c in chunks}) == 1 and len(chunks) > 5


def test_stop_length_and_logprobs_are_heeded(ask: Callable[..., Any]) -> None:
    [[stopped], [short], [named]] = ask(chat(stop=" is"), chat(max_tokens=2), chat(max_tokens=2, logprobs=True, top_logprobs=2))
    assert (stopped["choices"][0]["message"]["content"], stopped["choices"][0]["finish_reason"]) == ("The capital of France", "stop")
    assert (short["choices"][0]["message"]["content"], short["choices"][0]["finish_reason"]) == ("The capital", "length")
    first = named["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "The" and -0.1 < first["logprob"] < 0 and first["top_logprobs"][0]["logprob"] == first["logprob"]
    assert len(first["top_logprobs"]) == 2


def test_log_probabilities_are_told_for_the_text_as_the_server_tells_them(ask: Callable[..., Any], demo: Servable) -> None:
    """Tokens of a stop string have no log-probabilities. The token that ends an answer has its name. A token that is a part of a character
    has its bytes."""
    writer = LogprobWriter(demo.tokenizer, as_ids=False)
    part = next(i for i in range(demo.tokenizer.vocab_size) if demo.tokenizer.token_bytes(i) == "é".encode()[:1])
    biased = chat(max_tokens=1, logit_bias={str(part): 100}, logprobs=True)
    stop = chat(stop=" is", logprobs=True)
    [[stopped], chunks, [whole], [begun]] = ask(stop, {**stop, "body": {**stop["body"], "stream": True}}, chat(logprobs=True), biased)
    entries = stopped["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "The capital of France"
    assert [e for c in chunks for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]] == entries
    last, first = whole["choices"][0]["logprobs"]["content"][-1], begun["choices"][0]["logprobs"]["content"][0]
    for entry, token in ((last, demo.tokenizer.eos_ids[0]), (first, part)):
        expected = json.loads(writer.chat_entries([TokenEntry(0, TokenLogprob(token, entry["logprob"], 1, ()))])[0])
        assert {**entry, "top_logprobs": []} == expected
    assert (last["token"], first["token"]) == ("<|im_end|>", "bytes:\\xc3")


def test_a_limit_of_0_is_none(ask: Callable[..., Any]) -> None:
    """As in the server. A limit of -1 is as many tokens as fit."""
    bodies = [{"temperature": 0, "top_k": -1, "max_tokens": 0}, {"temperature": 0, "max_tokens": -1}]
    for [whole] in ask(*(chat(**body) for body in bodies)):
        assert whole["choices"][0]["message"]["content"] == ANSWER


def test_thoughts_are_separated_from_the_answer(site: Path, tmp_path: Path) -> None:
    """Here the demo writes its answers between other markers."""
    shutil.copytree(site, tmp_path / "site")
    program = json.loads((tmp_path / "site" / PROGRAM).read_bytes())

    def answers(prompt: str, *, thinks: bool) -> list[Any]:
        program["model"] |= {"thoughts": {"begin": prompt, "closing": " is", "thinks": thinks}}
        (tmp_path / "site" / PROGRAM).write_text(json.dumps(program))
        return asked(tmp_path / "site", chat(), chat(stream=True))

    for prompt, thinks in (("The", True), ("assistant\n", False)):  # the second is the end of the prompt
        [[whole], chunks] = answers(prompt, thinks=thinks)
        message, deltas = whole["choices"][0]["message"], [chunk["choices"][0]["delta"] for chunk in chunks]
        thought = "The capital of France".removeprefix(prompt)
        assert message == {"role": "assistant", "content": " Paris.", "reasoning_content": thought, "reasoning": thought}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
        assert "".join(delta.get("content", "") for delta in deltas) == " Paris."
    [[whole], _] = answers("The", thinks=False)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}


def test_a_completion_without_a_limit_has_16_tokens(ask: Callable[..., Any]) -> None:
    [[whole], [empty], [long]] = ask(
        *({"method": "text", "body": {"prompt": text, "temperature": 0}} for text in ("Once", "", "word " * 400))
    )
    assert whole["usage"]["completion_tokens"] == 16 and whole["choices"][0]["finish_reason"] == "length"
    assert (empty["error"]["param"], long["error"]["param"]) == ("prompt", "prompt")
    assert empty["error"]["message"] == "prompt is empty; expected at least one token"


def test_a_text_is_continued_with_its_usage(ask: Callable[..., Any]) -> None:
    """A stream ends with the usage if the request asks for it."""
    body = {"prompt": QUESTION, "temperature": 0, "max_tokens": 4}
    told = {**body, "stream": True, "stream_options": {"include_usage": True}}
    [[whole], chunks, plain] = ask(*({"method": "text", "body": one} for one in (body, told, {**body, "stream": True})))
    assert chunks[-1] == {**chunks[0], "choices": [], "usage": whole["usage"]} and whole["usage"]["completion_tokens"] > 0
    assert "".join(chunk["choices"][0]["text"] for chunk in plain) == whole["choices"][0]["text"]
    assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"logprobs": 2}, {"top_logprobs": 1}])
def test_log_probabilities_of_texts_are_refused_by_name(ask: Callable[..., Any], asked: dict[str, int]) -> None:
    [[refused]] = ask({"method": "text", "body": {"prompt": QUESTION, "max_tokens": 2, **asked}})
    assert refused["error"]["param"] == next(iter(asked)) and "not supported for text completions" in refused["error"]["message"]


def test_a_temperature_of_null_is_none() -> None:
    script = """
    import { pathToFileURL } from 'node:url';
    const { parsed } = await import(pathToFileURL(process.argv[1]));
    const model = { sampling: { temperature: 0 }, defaults: {}, vocab_size: 8, max_context: 8, tools: null };
    console.log(JSON.stringify([{}, { temperature: null }, { temperature: 0.5 }].map((body) => parsed(body, model).sampling.temperature)));
    """
    assert json.loads(run_node(script, RUNTIME / "request.mjs")) == [0, 0, 0.5]


def test_the_defaults_of_a_model_hold_in_the_browser(site: Path, tmp_path: Path) -> None:
    """They come from the file beside the model. Without it, a model that its files let answer greedily does so."""

    def exported() -> Servable:
        return servable(begin(load_of(str(tmp_path / "model"), quantize="bf16", max_batch=1, target=NATIVE.name)))

    shutil.copytree(ROOT / "deploy" / "demo" / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_k": 5}')
    plain = web_model(exported(), "model")
    assert (plain.sampling["temperature"], plain.sampling["top_k"], plain.defaults.stop) == (0, 5, ())
    (tmp_path / "model" / FILE).write_text(
        'system = "Be brief."\ntemperature = 0.25\nstop = " is"\nmax_tokens = 2\nmax_context = 64\nenable_thinking = false'
    )
    model = exported()
    made = web_model(model, "model")
    assert (made.max_context, made.sampling["temperature"], made.sampling["top_k"]) == (64, 0.25, 5)
    assert made.defaults.thinking == {"enable_thinking": False}

    shutil.copytree(site, tmp_path / "site")
    program = json.loads((tmp_path / "site" / PROGRAM).read_bytes())
    program["model"] |= {"defaults": msgspec.to_builtins(made.defaults), "sampling": made.sampling}
    program["model"]["tool_template"] = "{% if enable_thinking is defined and not enable_thinking %}{{ messages[0].content }}{% endif %}"
    (tmp_path / "site" / PROGRAM).write_text(json.dumps(program))
    [[short], [stopped]] = asked(tmp_path / "site", chat(), chat(max_tokens=9))
    assert (short["choices"][0]["message"]["content"], short["choices"][0]["finish_reason"]) == ("The capital", "length")
    assert (stopped["choices"][0]["message"]["content"], stopped["choices"][0]["finish_reason"]) == ("The capital of France", "stop")
    turns = [[{"role": "user", "content": "hi"}], [{"role": "developer", "content": "Sing."}, {"role": "user", "content": "hi"}]]
    command = [node(), SCRIPTS / "text.mjs", tmp_path / "site", json.dumps([[], turns])]
    found = json.loads(subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True).stdout)
    template = model.tokenizer.chat_template
    assert template is not None
    assert found["prompts"] == [template.render([{"role": "system", "content": said}, turns[0][0]]) for said in ("Be brief.", "Sing.")]
    assert found["withTools"] == ["Be brief.", "Sing."]


def test_an_unknown_field_without_a_value_is_none() -> None:
    """Programs write `{ tools: undefined }` for a field that they leave out, and clients write null."""
    script = """
    import { pathToFileURL } from 'node:url';
    const { parsed } = await import(pathToFileURL(process.argv[1]));
    const model = { sampling: {}, defaults: {}, vocab_size: 8, max_context: 8, tools: null };
    const said = (body) => { try { return parsed(body, model).maxTokens; } catch (error) { return error.param; } };
    console.log(JSON.stringify([{ response_format: undefined, store: null }, { store: false }].map(said)));
    """
    assert json.loads(run_node(script, RUNTIME / "request.mjs")) == [8, "store"]


def test_a_system_message_is_the_beginning_of_a_question_if_the_template_writes_none() -> None:
    script = """
    import { pathToFileURL } from 'node:url';
    const { withSystem } = await import(pathToFileURL(process.argv[1])), defaults = { system: 'Be brief.', has_system: false };
    const asked = [{ role: 'assistant', content: 'a' }, { role: 'user', content: 'hi' }, { role: 'user', content: 'b' }];
    const hi = { type: 'text', text: 'hi' }, text = [{ role: 'user', content: [hi] }];
    const parts = [{ role: 'user', content: [{ type: 'image' }, hi] }];
    const found = [withSystem(asked, defaults), withSystem(parts, defaults), withSystem(text, defaults)];
    console.log(JSON.stringify([...found, withSystem(asked, { system: null })]));
    """
    asked, parts, text, none = json.loads(run_node(script, RUNTIME / "messages.mjs"))
    assert [message["content"] for message in asked] == ["a", "Be brief.\n\nhi", "b"]
    assert parts[0]["content"] == [{"type": "text", "text": "Be brief.\n\n"}, {"type": "image"}, {"type": "text", "text": "hi"}]
    assert text[0]["content"] == [{"type": "text", "text": "Be brief.\n\nhi"}]
    assert [message["content"] for message in none] == ["a", "hi", "b"]


def test_a_seed_repeats_an_answer(ask: Callable[..., Any]) -> None:
    story = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 1.5, "max_tokens": 24}
    [[a], [b], [c]] = ask(*({"method": "chat", "body": {**story, "seed": seed}} for seed in (7, 7, 8)))
    texts = [x["choices"][0]["message"]["content"] for x in (a, b, c)]
    assert texts[0] == texts[1] != texts[2]


def test_an_abort_ends_an_answer_and_the_next_one_is_whole(ask: Callable[..., Any]) -> None:
    [aborted, [whole]] = ask({**chat(stream=True), "abortAfter": 3}, chat())
    assert aborted[-1]["error"]["name"] == "AbortError" and len(aborted) == 4
    assert whole["choices"][0]["message"]["content"] == ANSWER


WAITING = """
import { readFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';
const [folder] = process.argv.slice(1), from = (file) => import(pathToFileURL(`${folder}/${file}`));
const [{ Engine }, { RelaxServe }] = [await from('engine.mjs'), await from('relaxserve.mjs')];
const client = RelaxServe.of(await Engine.load({ read: async (file) => new Uint8Array(await readFile(`${folder}/${file}`)), threads: 1 }));
const messages = [{ role: 'user', content: 'hi' }], abort = new AbortController(), order = [];
const asked = (options) => client.chat.completions.create({ messages, max_tokens: 1 }, options);
const first = await client.chat.completions.create({ messages, max_tokens: 3, stream: true });
await first.next();
const second = asked({ signal: abort.signal }).catch(({ name }) => order.push(name)), third = asked({}).then(() => order.push('third'));
abort.abort();
await second;   // while the first has not ended
for await (const _ of first);
order.push('first');
await third;
console.log(JSON.stringify(order));
"""


def test_a_request_that_waits_ends_when_it_is_aborted(site: Path) -> None:
    """Those behind it still wait for those before it."""
    assert json.loads(run_node(WAITING, site)) == ["AbortError", "first", "third"]


def test_a_text_is_embedded(ask: Callable[..., Any]) -> None:
    [[found]] = ask({"method": "embeddings", "body": {"input": ["a cat", "a cat", "seven"]}})
    a, b, c = (np.array(d["embedding"]) for d in found["data"])
    assert np.array_equal(a, b) and not np.array_equal(a, c) and abs(np.linalg.norm(a) - 1) < 1e-6


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"functions": []}, "functions", "functions is not supported in the browser"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]", 'has to be {type: "function"'),
        ({"tool_choice": "required"}, "tool_choice", 'in the browser expected "auto" or "none"'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0] has neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "only text is understood"),
        ({"temperature": 101}, "temperature", "temperature is 101; expected a number from 0 to 100"),
        ({"stop": ["a", ""]}, "stop", "a stop string has 0 characters"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "expected a number from 1"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "expected up to 64 letters"),
        ({"n": 2}, "n", "n is 2; expected 1"),
        ({"logprobs": 3}, "logprobs", "logprobs is 3; expected true or false"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]", "has to be {id, type"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "names token 99999; the vocabulary has 2048"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages", "this export holds 256"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ask: Callable[..., Any], body: dict[str, Any], param: str, said: str) -> None:
    [[refused]] = ask(chat(**body))
    assert refused["error"]["param"] == param and said in refused["error"]["message"]


def test_a_damaged_shard_is_named(site: Path, tmp_path: Path) -> None:
    for file in site.rglob("*"):
        if file.is_file():
            (tmp_path / file.relative_to(site)).parent.mkdir(exist_ok=True)
            (tmp_path / file.relative_to(site)).write_bytes(file.read_bytes())
    [shard] = tmp_path.glob("weights-*.bin")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    command = [node(), SCRIPTS / "logits.mjs", tmp_path, "wasm-relaxed", "[1]", "1"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode != 0 and f"{shard.name} is damaged" in done.stderr.decode()


TWICE = """
import { readFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';
const [folder] = process.argv.slice(1), { loadModel } = await import(pathToFileURL(`${folder}/loader.mjs`));
const asked = [], files = new Map();
const read = async (file) => {
  const bytes = new Uint8Array(await readFile(`${folder}/${file}`));
  if (file.startsWith('weights-') && !asked.includes(file)) bytes[1000] ^= 1;
  asked.push(file);
  return bytes;
};
const kept = {
  read: async (file) => files.get(file),
  open: async (file) => ({ write: (bytes) => files.set(file, bytes.slice()), close() {} }),
};
const counts = [], damaged = [];
for (let visit = 0; visit < 3; visit++) {
  if (visit === 2) for (const bytes of files.values()) bytes[5] ^= 1;
  await loadModel({ read, kept, onDamage: (file) => damaged.push(file) });
  counts.push(asked.filter((file) => file.startsWith('weights-')).length);
}
console.log(JSON.stringify([counts, damaged]));
"""


def test_a_damaged_download_is_fetched_again_and_a_sound_one_kept(site: Path) -> None:
    """Damaged weights are downloaded again, whether the download or the cached file is damaged. The first visit downloads the weights
    twice, because a bit was flipped in transit. The second visit downloads nothing. The third visit downloads them once, because the cached
    file was damaged."""
    [shard] = site.glob("weights-*.bin")
    assert json.loads(run_node(TWICE, site)) == [[2, 2, 3], [shard.name, shard.name]]


CUT = """
import { readFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';
const [folder] = process.argv.slice(1), { loadModel } = await import(pathToFileURL(`${folder}/loader.mjs`));
const asked = [], files = new Map();
const read = async (file) => new Uint8Array(await readFile(`${folder}/${file}`));
let room = 100_000;   // bytes until the connection breaks; after that, requests get no answer
async function* pieces(file, begin) {
  const bytes = await read(file);
  asked.push(begin);
  for (let at = begin; at < bytes.length; at += 40_000) {
    if (room < 40_000) throw new TypeError('Failed to fetch');
    room -= 40_000;
    yield { at, bytes: bytes.subarray(at, at + 40_000) };
  }
}
const kept = {
  read: async (file) => files.get(file),
  open: async (file) => {
    const bytes = new Uint8Array(2 ** 26);
    bytes.set(files.get(file) ?? []);
    return { write: (part, at) => bytes.set(part, at), close: (length) => files.set(file, bytes.slice(0, length)) };
  },
};
const visit = () => loadModel({ read, pieces, kept }).then(() => 'loaded', (error) => error.message);
const visits = [await visit()];
room = Infinity;
visits.push(await visit(), await visit());
console.log(JSON.stringify({ asked, visits }));
"""


def test_a_download_that_was_cut_off_goes_on_where_it_was(site: Path) -> None:
    """A download continues where it was cut off. After 80,000 bytes the connection breaks, and three more requests get nothing. The second
    visit requests only the missing bytes, and the third visit requests nothing."""
    found = json.loads(run_node(CUT, site))
    assert found == {"asked": [0, 80_000, 80_000, 80_000, 80_000], "visits": ["Failed to fetch", "loaded", "loaded"]}


STORAGE = """
import { pathToFileURL } from 'node:url';
const [folder] = process.argv.slice(1), room = Number(process.argv[2]), files = new Map();
const full = () => { throw new DOMException('no room', 'QuotaExceededError'); };
const handleOf = (file) => ({
  getSize: () => files.get(file).length,
  write(bytes, { at }) {
    const before = files.get(file), size = Math.max(before.length, at + bytes.length);
    if (size > room) full();
    const whole = new Uint8Array(size);
    whole.set(before);
    whole.set(bytes, at);
    files.set(file, whole);
    return bytes.length;
  },
  truncate(size) {
    if (size > files.get(file).length && size > room) full();
    files.set(file, Uint8Array.from({ ...files.get(file).subarray(0, size), length: size }));
  },
  close() { closed.push(file); },
});
const closed = [], place = {
  async getFileHandle(file, { create = false } = {}) {
    if (!files.has(file) && !create) throw new DOMException('absent', 'NotFoundError');
    files.set(file, files.get(file) ?? new Uint8Array(0));
    return { getFile: async () => new Blob([files.get(file)]), createSyncAccessHandle: async () => handleOf(file) };
  },
  async *keys() { yield* files.keys(); },
  async removeEntry(file) { files.delete(file); },
};
const storage = { getDirectory: async () => ({ getDirectoryHandle: async () => place }) };
Object.defineProperty(globalThis, 'navigator', { value: { storage } });
const { browserFiles, loadModel } = await import(pathToFileURL(`${folder}/loader.mjs`));
"""
FULL = (
    STORAGE
    + """
import { readFile } from 'node:fs/promises';
const read = async (file) => new Uint8Array(await readFile(`${folder}/${file}`)), asked = [], wrong = [];
async function* pieces(file, begin) {
  const bytes = await read(file);
  asked.push(begin);
  for (let at = begin; at < bytes.length; at += 40_000) yield { at, bytes: bytes.subarray(at, at + 40_000) };
}
const onDamage = (file) => wrong.push(file);
for (let visit = 0; visit < 2; visit++) await loadModel({ read, pieces, threads: 1, kept: await browserFiles('x', 'page'), onDamage });
const [shard, stored] = [...files].find(([file]) => file.startsWith('weights-')), isClose = (file) => file === shard;
const isBeginning = Buffer.compare(stored, (await read(shard)).subarray(0, stored.length)) === 0;
console.log(JSON.stringify({ asked, wrong, stored: stored.length, isBeginning, numClosed: closed.filter(isClose).length }));
"""
)


def test_a_model_loads_if_the_storage_of_the_browser_is_full(site: Path) -> None:
    """What was stored is the beginning of the file, which the next visit does not request again."""
    found = json.loads(run_node(FULL, site, "100000"))
    assert found == {"asked": [0, 80_000], "wrong": [], "stored": 80_000, "isBeginning": True, "numClosed": 2}


EARLIER = (
    STORAGE
    + """
const left = [], visit = async (page, ...shards) => {
  const kept = await browserFiles('x', page);
  await kept.keepOnly(shards);
  for (const shard of shards) (await kept.open(shard)).write(new Uint8Array(1), 0);
  left.push([...files.keys()].filter((file) => file.startsWith('weights-')).sort());
};
await visit('/web/a/', 'weights-1', 'weights-2');
await visit('/web/b/', 'weights-2', 'weights-3');
await visit('/web/a/', 'weights-4');
await visit('/web/b/', 'weights-4');
files.set('pages.json', new TextEncoder().encode('{"/web/a/":["weights-4"]}]}'));   // closing the page ended the writing of a shorter list
await visit('/web/b/', 'weights-5');
await visit('/web/a/', 'weights-5');
console.log(JSON.stringify(left));
"""
)


def test_weights_of_earlier_exports_are_removed() -> None:
    """Otherwise they would fill the storage of visitors. Pages of one origin share a folder, and maybe weights."""
    found = json.loads(run_node(EARLIER, RUNTIME, "100000"))
    numbers = [[int(file.removeprefix("weights-")) for file in files] for files in found]
    assert numbers == [[1, 2], [1, 2, 3], [2, 3, 4], [4], [4, 5], [5]], "a damaged list says nothing about other pages"


ENDED = """
import { pathToFileURL } from 'node:url';
const ended = [];
globalThis.Worker = class {
  postMessage({ id }) { setTimeout(() => this.onmessage({ data: { id, error: { name: 'Error', message: 'no memory' } } })); }
  terminate() { ended.push(this); }
};
const { RelaxServe } = await import(pathToFileURL(process.argv[1]));
const fault = await RelaxServe.load().catch((error) => error.message);
console.log(JSON.stringify([fault, ended.length]));
"""


def test_a_load_that_fails_leaves_no_worker() -> None:
    """It would keep the memory of the model until the page is closed."""
    assert json.loads(run_node(ENDED, RUNTIME / "relaxserve.mjs")) == ["no memory", 1]


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}]}],
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": text}} for text in ('{"x": 1}', '{"x', "{}")],
        }
    ],
    [
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "content": "12", "name": "now"},
    ],
    [
        {
            "role": "assistant",
            "tool_calls": [{"index": 0, "id": None, "function": {"arguments": "{}", "name": "now", "more": 1}, "further": 2}],
        }
    ],
    [{"role": "assistant", "content": None, "refusal": "I may not."}, {"role": "user", "content": "Why?", "name": None}],
    [{"role": "assistant", "content": "4", "reasoning": "2 + 2"}],
    [{"role": "assistant", "content": "4", "reasoning_content": "2 + 2", "reasoning": "other"}],
    [{"role": "assistant", "content": "so", "reasoning": "why", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "refusal", "refusal": "brief"}], "further": 1}],
]


def test_templates_get_the_messages_that_the_server_gives_them() -> None:
    script = """
    import { pathToFileURL } from 'node:url';
    const [module, given] = process.argv.slice(1), { forTemplate } = await import(pathToFileURL(module));
    console.log(JSON.stringify(JSON.parse(given).map((messages) => forTemplate(messages))));
    """
    found = json.loads(run_node(script, RUNTIME / "messages.mjs", json.dumps(CONVERSATIONS)))
    expected = [for_template([Message.model_validate(one) for one in conversation]) for conversation in CONVERSATIONS]
    assert found == expected
    written = (
        [[message.get("tool_calls") for message in messages] for messages in found],
        [[message.get("tool_calls") for message in messages] for messages in expected],
    )
    assert json.dumps(written[0]) == json.dumps(written[1]), "templates write calls in the order of their fields"


def test_a_template_that_the_browser_cannot_read_refuses_only_chats(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "site")
    program = json.loads((tmp_path / "site" / PROGRAM).read_bytes())
    program["model"]["chat_template"] = "{% raw %}a{% endraw %}"
    (tmp_path / "site" / PROGRAM).write_text(json.dumps(program))
    [[refused], [whole]] = asked(tmp_path / "site", chat(), {"method": "text", "body": {"prompt": "a", "max_tokens": 1}})
    assert refused["error"]["param"] == "messages" and "the browser cannot read it" in refused["error"]["message"]
    assert whole["usage"]["completion_tokens"] == 1


LATE = """
const { Team, CONTROL_BYTES } = await import(process.argv[1]);
const team = Object.assign(new Team(), { words: new Int32Array(new SharedArrayBuffer(CONTROL_BYTES)), numThreads: 3, opened: 0 });
const STATE = 0, CHUNKS = 1, FINISHED = 4, left = [], store = Atomics.store;
Atomics.store = (words, at, value) => {
  if (at === FINISHED) left.push((words[STATE] & 255) < words[CHUNKS]);   // the words of the record are written, but it is not open
  return store(words, at, value);
};
const ranges = [];
for (const iterations of [4, 24]) team.run((buffers, dims, begin, end) => ranges.push(Number(end - begin)), 0, iterations, 0, 0);
console.log(JSON.stringify({ left, sum: ranges.reduce((a, b) => a + b) }));
"""


def test_a_late_helper_cannot_claim_a_chunk_of_an_unfinished_record() -> None:
    """Before a record with more chunks than the last one is open, a helper that is still at the last record finds no chunk left."""
    assert json.loads(run_node(LATE, (Path(vendor.__file__).parents[1] / "team.mjs").as_uri())) == {"left": [False, False], "sum": 28}


def test_prompts_are_tokenized_as_in_python(demo: Servable, site: Path) -> None:
    """The tokenizer, the template engine and the text of each token are the same in JavaScript as in the server's Python code."""
    texts = [
        "Hello, world!",
        "  two  spaces\n\ttab",
        "naïve café — 12,345.67",
        "日本語 🙂",
        "<|im_start|>user\nhi<|im_end|>",
        "it's\u00a0odd",
        "\ufeffmarked",
    ]
    turns = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in texts]
    command = [node(), SCRIPTS / "text.mjs", site, json.dumps([texts, turns])]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    template = demo.tokenizer.chat_template
    assert template is not None
    found = json.loads(done.stdout)
    assert found["ids"] == [demo.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert found["prompts"] == [template.render(turn) for turn in turns]
    assert found["texts"] == [b"".join(map(demo.tokenizer.token_bytes, ids)).decode() for ids in found["ids"]]


PLAIN = """
import { pathToFileURL } from 'node:url';
const [folder, given] = process.argv.slice(1), [tokenizer, texts] = JSON.parse(given);
const { TextCodec } = await import(pathToFileURL(`${folder}/text.mjs`));
const codec = new TextCodec({ chat_template: null, tool_template: null, vocab_size: 0 }, JSON.parse(tokenizer), new Uint8Array(0));
console.log(JSON.stringify(texts.map((text) => codec.encode(text))));
"""


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "unigram", "table"])
def test_characters_that_a_vocabulary_lacks_are_written_as_in_python(name: str) -> None:
    """Most vocabularies have the bytes of such characters."""
    tokenizer = read(files_of(name))
    texts = ["café — 12", "two\tand\u00a0three", "日本語 🙂 and more", "\ufeffmarked", "a\u200db", "🙂"]
    found = json.loads(run_node(PLAIN, RUNTIME, json.dumps([tokenizer.to_str(), texts])))
    assert found == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def test_vendored_modules_are_those_of_npm() -> None:
    folder = Path(vendor.__file__).parent
    assert {p.name for p in folder.glob("*.mjs")} == set(vendor.SHA256)
    for name, digest in vendor.SHA256.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert (folder / f"{Path(name).stem}.LICENSE.txt").is_file()


def test_module_runtime_and_program_are_small(site: Path) -> None:
    """The module, the runtime and the program take less than 400 KB together, not counting vendored modules."""
    files = [p for p in site.iterdir() if p.suffix in (".wasm", ".mjs") or p.name == "program.json"]
    assert len(files) > 8 and sum(p.stat().st_size for p in files) < 400_000
