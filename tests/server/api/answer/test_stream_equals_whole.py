"""A streamed answer, with its chunks joined, equals the unstreamed answer. The tests vary how the answer is split into tokens, the stop
strings and the number of choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from server.api.answer.generate import Generation
from server.api.answer.respond import Answer
from server.api.answer.shapes import ChatChunk, ChatCompletion, Completion, CompletionChunk
from server.api.anthropic import input as anthropic_input
from server.api.anthropic.answer import AnthropicAnswer, MessageAnswer, MessageEvent
from server.api.anthropic.body import MessagesBody
from server.api.context import Caller
from server.api.llama_cpp.answer import LlamaAnswer, LlamaCompletion, LlamaPart
from server.api.llama_cpp.body import LlamaCompletionBody
from server.api.ollama import body as ollama_input
from server.api.ollama.answer import OllamaAnswer, OllamaChat, OllamaGenerated
from server.api.ollama.body import OllamaChatBody, OllamaGenerateBody, completion_of
from server.api.openai.chat import plan_chat
from server.api.openai.chat_answer import ChatAnswer
from server.api.openai.completion_answer import CompletionAnswer
from server.api.openai.completions import plan_completion
from server.api.openai.responses.answer import ResponseAnswer
from server.api.openai.responses.body import InputItem, ResponseBody
from server.api.openai.responses.input import chat_of
from server.api.openai.responses.shapes import ResponseEvent, ResponseObject
from server.api.request.prepare import ChatPlan, job_like
from server.api.request.schema import ChatBody, CompletionBody
from server.messages import Submit, TokenEvent
from server.metrics import Metrics
from server.models.admission import Admission
from server.models.model import Loaded, Model
from server.models.operations import Operation
from server.models.state import ModelSpec
from server.settings import ServerSettings
from server.text.dialects.dialect import Dialect
from tests.doubles.worker import ByteTokenizer, NullScript, NullTemplate, NullWorker

LlamaCompletions = list[LlamaCompletion]
OPENAI = (ChatChunk, ChatCompletion, CompletionChunk, Completion, ResponseEvent, ResponseObject)
SHAPES = {
    shape: TypeAdapter(shape)
    for shape in (*OPENAI, MessageEvent, AnthropicAnswer, LlamaPart, LlamaCompletions, OllamaChat, OllamaGenerated)
}
SERIES = Metrics().of("null")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "ß"}}\n</tool_call>'
WORDS = ["<think>", "</think>", CALL, "<tool_call>", "STOP", "ST", "a", "b ", "ß", "€", "\n", "🙂", "{", '"']

answers = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=6).map(lambda parts: "".join(parts).encode(errors="replace"))
raw = st.binary(max_size=12)
sizes = st.lists(st.integers(1, 6), max_size=30)
stops = st.lists(st.sampled_from(["STOP", "a", "ß€", "</think>", "\n"]), max_size=2, unique=True)


class Shuffled(NullWorker):
    """A fake worker. It answers with the bytes `answers`, split into tokens of the sizes `cuts`, and sends the events of several choices in
    the order that `order` states. It sends all events even if the request is aborted."""

    def __init__(self, answers: list[bytes], cuts: list[int], order: list[int]) -> None:
        super().__init__(NullScript(answer=lambda _submit, choice: list(cut(answers[choice], cuts))))
        self.order = order

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenEvent, None]:
        queues: dict[int, list[TokenEvent]] = {}
        async for event in super().generate(submit):
            queues.setdefault(event.choice, []).append(event)
        order = iter(self.order)
        while queues:
            choice = sorted(queues)[next(order, 0) % len(queues)]
            yield queues[choice].pop(0)
            if not queues[choice]:
                del queues[choice]


def cut(data: bytes, cuts: list[int]) -> list[list[int]]:
    pieces, at, sizes = [], 0, iter(cuts)
    while at < len(data):
        size = next(sizes, 1)
        pieces.append(list(data[at : at + size]))
        at += size
    return pieces or [[]]


def loaded(worker: NullWorker) -> tuple[Model, Loaded]:
    ready = asyncio.run(worker.start())
    admission = Admission("null", max_running=64, max_queued=64, max_queued_tokens=1 << 20)
    made = Loaded(worker, ready, ByteTokenizer(), Dialect.of(ByteTokenizer(), "hermes", True), admission, NullTemplate().renderer())
    return Model(ModelSpec("null", "null"), Operation("load", "null"), loaded=made), made


async def read(answer: Answer, shape: type, *, stream: bool):
    """Read an answer in chunks, or as a whole if not `stream`. Validate everything read against `shape`, the type that the API
    documents."""
    texts = [chunk async for chunk in answer.chunks()] if stream else [b"".join(await answer.whole())]
    read = [json.loads(text) for text in texts]
    for one in read:
        SHAPES[shape].validate_python(one, strict=True)
    return read if stream else read[0]


def chat(worker: NullWorker, fields: dict, *, stream: bool):
    model, made = loaded(worker)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields})

    async def run():
        plan = await plan_chat(body, model, made, Caller("id", ""), ServerSettings())
        answer = ChatAnswer(body, plan, Generation(made, plan.job, SERIES, Caller("id")), model, made)
        result = await read(answer, ChatChunk if stream else ChatCompletion, stream=stream)
        assert made.admission.num_sequences == 0 and made.admission.num_queued_tokens == 0
        return result

    return asyncio.run(run())


def completion(worker: NullWorker, fields: dict, *, stream: bool):
    model, made = loaded(worker)
    body = CompletionBody.model_validate({"prompt": "hi", "stream": stream, "max_tokens": 500, **fields})

    async def run():
        jobs = plan_completion(body, model, made, Caller("id", ""), ServerSettings())
        generations = [Generation(made, job, SERIES, Caller("id")) for job in jobs]
        answer = CompletionAnswer(body, jobs, generations, model, made)
        return await read(answer, CompletionChunk if stream else Completion, stream=stream)

    return asyncio.run(run())


def put_together(chunks: list[dict], num_choices: int) -> list[dict]:
    """Join the chunks of a stream into one complete message per choice, as a client does."""
    made = [{"content": "", "reasoning": "", "calls": [], "tokens": [], "finish": [], "ids": []} for _ in range(num_choices)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine, delta = made[choice["index"]], choice["delta"]
            assert not mine["finish"], "a choice received a chunk after its end"
            mine["content"] += delta.get("content") or ""
            mine["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(mine["calls"]):
                    mine["calls"].append([call["function"]["name"], ""])
                mine["calls"][call["index"]][1] += call["function"]["arguments"]
            mine["tokens"] += (choice["logprobs"] or {}).get("content", [])
            mine["ids"] += choice.get("token_ids", [])
            mine["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return made


def respond(worker: NullWorker, fields: dict, *, stream: bool):
    model, made = loaded(worker)
    body = ResponseBody.model_validate({"input": "hi", "stream": stream, **fields})
    chat = chat_of(body, [InputItem(role="user", content="hi")], 0)

    async def run():
        plan = await plan_chat(chat, model, made, Caller("id", ""), ServerSettings())
        answer = ResponseAnswer(body, plan, Generation(made, plan.job, SERIES, Caller("id")), model, made, keep=lambda *_: None)
        return await read(answer, ResponseEvent if stream else ResponseObject, stream=stream)

    return asyncio.run(run())


def without_ids(output: list[dict]) -> list[dict]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


@given(answers | raw, sizes, sizes, stops, st.booleans(), st.integers(1, 40))
def test_responses(data, cuts_a, cuts_b, stop, with_tools, max_tokens):
    fields: dict = {"stop": stop, "top_logprobs": 1, "max_output_tokens": max_tokens}
    if with_tools:
        fields["tools"] = [{"type": "function", "name": "f"}]
    whole = respond(Shuffled([data], cuts_a, []), fields, stream=False)
    events = respond(Shuffled([data], cuts_b, []), fields, stream=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    for response in (whole, final):
        for item in response["output"]:
            for part in item.get("content", []):
                # A step that contains both text and thoughts has no log-probabilities for the text. The streamed answer consists of other
                # steps than the unstreamed answer, so their log-probabilities may differ.
                part.pop("logprobs", None)
    assert without_ids(final["output"]) == without_ids(whole["output"]) and final["status"] == whole["status"]
    grown = {}
    for event in events:
        if "delta" in event:
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(final["output"]):
        written = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert grown.get(index, "") == written


def message(worker: NullWorker, fields: dict, *, stream: bool):
    model, made = loaded(worker)
    body = MessagesBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields})

    async def run():
        plan = await plan_chat(anthropic_input.chat_of(body, made.dialect), model, made, Caller("id", ""), ServerSettings())
        job = job_like(plan.job, plan.job.submit.prompt_ids, body.max_tokens)
        plan = ChatPlan(plan.prompt, job, plan.rules)
        answer = MessageAnswer(
            plan, Generation(made, job, SERIES, Caller("id")), "null", is_capped=False, is_empty=False, omits_thoughts=False, has_stops=True
        )
        return await read(answer, MessageEvent if stream else AnthropicAnswer, stream=stream)

    return asyncio.run(run())


@given(answers | raw, sizes, sizes, stops, st.booleans(), st.integers(1, 40))
def test_messages(data, cuts_a, cuts_b, stop, with_tools, max_tokens):
    fields: dict = {"stop_sequences": stop, "max_tokens": max_tokens}
    if with_tools:
        fields["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    whole = message(Shuffled([data], cuts_a, []), fields, stream=False)
    begin, *events, end, last = message(Shuffled([data], cuts_b, []), fields, stream=True)
    assert (begin["type"], end["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    blocks, is_open = [], False
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open = True
                blocks.append({**event["content_block"], "partial_json": ""})
            case "content_block_stop":
                is_open = False
            case _:
                assert is_open
                for name in event["delta"].keys() - {"type"}:
                    blocks[-1][name] += event["delta"][name]
    assert not is_open and end["delta"]["stop_reason"] == whole["stop_reason"] and end["usage"] == whole["usage"]
    for mine, theirs in zip(blocks, whole["content"], strict=True):
        if theirs["type"] == "tool_use":
            assert mine["name"] == theirs["name"]
            assert whole["stop_reason"] == "max_tokens" or json.loads(mine["partial_json"]) == theirs["input"]
        else:
            kind = "text" if theirs["type"] == "text" else "thinking"
            assert mine[kind] == theirs[kind]


@given(st.lists(answers | raw, min_size=1, max_size=3), sizes, sizes, st.lists(st.integers(0, 9), max_size=60), stops, st.booleans())
def test_chat(data, cuts_a, cuts_b, order, stop, with_tools):
    fields: dict = {"n": len(data), "stop": stop, "logprobs": True, "return_token_ids": True, "stream_options": None}
    if with_tools:
        fields["tools"] = [{"type": "function", "function": {"name": "f"}}]
    whole = chat(Shuffled(data, cuts_a, []), fields, stream=False)
    chunks = chat(Shuffled(data, cuts_b, order), fields, stream=True)
    for choice, mine in zip(whole["choices"], put_together(chunks, len(data)), strict=True):
        message = choice["message"]
        assert mine["content"] == (message["content"] or "")
        assert mine["reasoning"] == message.get("reasoning_content", "")
        assert mine["calls"] == [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
        assert mine["tokens"] == choice["logprobs"]["content"]
        assert mine["finish"] == [choice["finish_reason"]]
        assert mine["ids"] == choice["token_ids"]


def llama(worker: NullWorker, fields: dict, *, stream: bool):
    model, made = loaded(worker)
    body = LlamaCompletionBody.model_validate({"prompt": "hi", "stream": stream, "n_predict": 500, **fields})

    async def run():
        jobs = plan_completion(body.completion(body.prompt, made.tokenizer, None), model, made, Caller("id", ""), ServerSettings())
        answer = LlamaAnswer(body, jobs, [Generation(made, job, SERIES, Caller("id")) for job in jobs], "null", made)
        return await read(answer, LlamaPart if stream else LlamaCompletions, stream=stream)

    return asyncio.run(run())


@given(st.lists(answers | raw, min_size=2, max_size=3), sizes, sizes, st.lists(st.integers(0, 9), max_size=60), stops)
def test_llama_cpp(data, cuts_a, cuts_b, order, stop):
    fields = {"n_cmpl": len(data), "stop": stop, "n_probs": 1, "return_tokens": True}
    whole = llama(Shuffled(data, cuts_a, []), fields, stream=False)
    parts = llama(Shuffled(data, cuts_b, order), fields, stream=True)
    for one in whole:
        *mine, last = [part for part in parts if part["index"] == one["index"]]
        assert last["stop"] and not any(part["stop"] for part in mine)
        assert "".join(part["content"] for part in mine) == one["content"]
        for name in ("tokens", "completion_probabilities"):
            assert [value for part in mine for value in part.get(name, [])] == one.get(name, [])
        for name in ("stop_type", "stopping_word", "tokens_predicted", "has_new_line", "prompt"):
            assert last[name] == one[name], name


def ollama(worker: NullWorker, body: OllamaChatBody | OllamaGenerateBody):
    model, made = loaded(worker)
    is_chat = isinstance(body, OllamaChatBody)

    async def run():
        if isinstance(body, OllamaGenerateBody) and body.raw:
            (job,) = plan_completion(completion_of(body, None), model, made, Caller("id", ""), ServerSettings())
            plan = ChatPlan(body.prompt, job, made.dialect.rules(split_reasoning=False))
        else:
            chat = ollama_input.chat_of(body) if is_chat else ollama_input.chat_of_prompt(body)
            plan = await plan_chat(chat, model, made, Caller("id", ""), ServerSettings())
        answer = OllamaAnswer(plan, Generation(made, plan.job, SERIES, Caller("id")), made, "null", is_chat=is_chat)
        return await read(answer, OllamaChat if is_chat else OllamaGenerated, stream=body.streams)

    return asyncio.run(run())


def without_times(counts: dict) -> dict:
    return {name: counts[name] for name in ("done", "done_reason", "model", "prompt_eval_count", "eval_count")}


@given(answers | raw, sizes, sizes, stops, st.booleans(), st.integers(1, 40))
def test_ollama_chat(data, cuts_a, cuts_b, stop, with_tools, num_predict):
    fields: dict = {"model": "null", "messages": [{"role": "user", "content": "hi"}], "options": {"stop": stop, "num_predict": num_predict}}
    if with_tools:
        fields["tools"] = [{"type": "function", "function": {"name": "f"}}]
    whole = ollama(Shuffled([data], cuts_a, []), OllamaChatBody(stream=False, **fields))
    *lines, last = ollama(Shuffled([data], cuts_b, []), OllamaChatBody(**fields))
    assert not any(line["done"] for line in lines) and without_times(last) == without_times(whole)
    said, told = [line["message"] for line in [*lines, last]], whole["message"]
    assert "".join(message["content"] for message in said) == told["content"]
    assert "".join(message.get("thinking", "") for message in said) == told.get("thinking", "")
    calls, of_whole = ([call["function"] for message in made for call in message.get("tool_calls", [])] for made in (said, [told]))
    assert calls == of_whole


@given(answers | raw, sizes, sizes, stops, st.booleans(), st.integers(1, 40))
def test_ollama_generate(data, cuts_a, cuts_b, stop, is_raw, num_predict):
    fields: dict = {"model": "null", "prompt": "hi", "raw": is_raw, "options": {"stop": stop, "num_predict": num_predict}}
    whole = ollama(Shuffled([data], cuts_a, []), OllamaGenerateBody(stream=False, **fields))
    *lines, last = ollama(Shuffled([data], cuts_b, []), OllamaGenerateBody(**fields))
    assert not any(line["done"] for line in lines) and without_times(last) == without_times(whole)
    for name in ("response", "thinking"):
        assert "".join(line.get(name, "") for line in [*lines, last]) == whole.get(name, "")


@given(st.lists(answers | raw, min_size=1, max_size=3), sizes, sizes, st.lists(st.integers(0, 9), max_size=60), stops, st.booleans())
def test_completion(data, cuts_a, cuts_b, order, stop, echo):
    fields = {"n": len(data), "stop": stop, "logprobs": 1, "echo": echo}
    whole = completion(Shuffled(data, cuts_a, []), fields, stream=False)
    chunks = completion(Shuffled(data, cuts_b, order), fields, stream=True)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert [chunk["finish_reason"] for chunk in mine if chunk["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in mine for value in (chunk["logprobs"] or {}).get(name, [])] == values, name
        for offset, token in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
            # An invalid byte appears as U+FFFD only when the next byte is known, so the offset of such a token is one character too low.
            if not token.startswith(("bytes:", "<s>")) and "\ufffd" not in choice["text"]:
                assert choice["text"].startswith(token[:1], offset)
