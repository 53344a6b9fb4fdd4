"""`python -m tests.lab calls`: calls of strict tools under `tool_choice: auto`, made by a real model.

A separate server serves the model with default settings. Each of 50 tools has a schema of its own, drawn from a seed; clients ask for one
call after the other at temperature 1 until there are `--calls` of them, or until three times as many requests are answered. A figure is the
number of calls whose arguments do not match the schema of their tool. The figure `cost` compares the time of answers with calls with that
of unconstrained answers of as many tokens to the same prompt, one at a time and in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from deploy.bench.measure import Figure, report
from tests.lab.serving.start import serving

NUM_TOOLS, NUM_CLIENTS, NUM_TIMED = 50, 8, 8
NUM_IN_A_ROW = 10  # requests that offer the same tools, so that their prompts begin alike
VERBS, NOUNS = ("book", "find", "update", "cancel", "rate"), ("table", "flight", "parcel", "lesson", "repair", "concert", "room", "taxi")
CITIES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Zürich")
# name, schema, what a user says
FIELDS: Sequence[tuple[str, Mapping[str, Any], str]] = (
    ("city", {"type": "string", "minLength": 2}, "in {city}"),
    ("guests", {"type": "integer", "minimum": 1, "maximum": 12}, "for {number} people"),
    ("price", {"type": "number", "exclusiveMinimum": 0}, "for at most {number}.50 euros"),
    ("urgent", {"type": "boolean"}, "as soon as possible"),
    ("class", {"type": "string", "enum": ["basic", "comfort", "first"]}, "in the best class"),
    ("date", {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}, "on 3 March 2027"),
    ("tags", {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3}, "tagged quiet and cheap"),
    ("contact", {"type": "object", "properties": {"name": {"type": "string"}, "phone": {"type": "string"}}, "required": ["name", "phone"]},
     "for Ada, telephone 555 123"),
    ("seats", {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 4}, "seats {number} and 7"),
    ("note", {"type": ["string", "null"]}, "with the note \"mind the {{dog}}\""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    tool: Mapping[str, Any]
    text: str


def tools(chance: random.Random) -> list[Asked]:
    """Draw tools with different names and schemas, and what a user asks of each."""
    names = [f"{verb}_{noun}" for verb in VERBS for noun in NOUNS] + [f"{noun}_{verb}" for verb in VERBS for noun in NOUNS]
    return [_asked(name, chance) for name in chance.sample(names, NUM_TOOLS)]


def _asked(name: str, chance: random.Random) -> Asked:
    fields = chance.sample(FIELDS, chance.randint(2, 5))
    parameters = {
        "type": "object",
        "properties": {field: _closed(schema) for field, schema, _ in fields},
        "required": [field for field, _, _ in fields],
        "additionalProperties": False,
    }
    said = ", ".join(phrase.format(city=chance.choice(CITIES), number=chance.randint(2, 9)) for _, _, phrase in fields)
    function = {"name": name, "description": name.replace("_", " "), "strict": True, "parameters": parameters}
    return Asked({"type": "function", "function": function}, f"{name.replace('_', ' ').capitalize()} {said}. Use the tool.")


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, "additionalProperties": False} if schema["type"] == "object" else schema


@dataclass(frozen=True, slots=True)
class Answered:
    num_calls: int
    faults: tuple[str, ...]  # of calls whose arguments do not match


def answer(client: httpx.Client, model: str, asked: Sequence[Asked], seed: int) -> Answered:
    """Offer a tool and up to two others, ask for the first, and check the calls of the answer. A call that was cut by the limit of tokens
    does not count."""
    number = seed // NUM_IN_A_ROW
    chance, one = random.Random(number), asked[number % len(asked)]
    offered = [one, *chance.sample(asked, 2)]
    schemas = {each.tool["function"]["name"]: each.tool["function"]["parameters"] for each in offered}
    body = {**_body(model, one, seed, 1.0), "tools": [each.tool for each in {id(each): each for each in offered}.values()]}
    choice = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    whole = calls[:-1] if choice["finish_reason"] == "length" else calls
    faults: list[str] = []
    for call in whole:
        function = call["function"]
        try:
            jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            faults.append(f"{function['name']} {function['arguments']}: {str(error).splitlines()[0]}")
    return Answered(len(whole), tuple(faults))


def _body(model: str, one: Asked, seed: int, temperature: float) -> dict[str, Any]:
    messages = [{"role": "user", "content": one.text}]
    return {"model": model, "messages": messages, "seed": seed, "temperature": temperature, "max_tokens": 256}


def collect(client: httpx.Client, model: str, num_calls: int, seed: int) -> list[Figure]:
    asked, found, faults, requests = tools(random.Random(seed)), 0, list[str](), 0
    size = NUM_TOOLS * NUM_IN_A_ROW
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        while found < num_calls and requests < 3 * num_calls:
            for one in pool.map(lambda at: answer(client, model, asked, at), range(requests, requests + size)):
                found += one.num_calls
                faults += one.faults
            requests += size
    note = f"{found} calls in {requests} answers, {NUM_TOOLS} schemas" + "".join(f"; {fault}" for fault in faults[:5])
    return [Figure("calls that do not match", len(faults), "", 0, note=note), Figure("calls", found, "", num_calls, at_least=True)]


def cost(client: httpx.Client, model: str, seed: int) -> Figure:
    constrained_s = free_s = 0.0
    num_tokens = 0
    for at, one in enumerate(tools(random.Random(seed))[:NUM_TIMED]):
        body = {**_body(model, one, at, 0.0), "tools": [one.tool]}
        prompt = client.post("/v1/chat/completions/render", json=body).raise_for_status().json()["token_ids"]
        tokens = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]["completion_tokens"]
        free = {"model": model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}
        for _ in range(3):
            constrained_s += timed(client, "/v1/chat/completions", body)
            free_s += timed(client, "/v1/completions", free)
        num_tokens += tokens
    note = f"{num_tokens} tokens of {NUM_TIMED} answers, 3 times each: {constrained_s:.1f} s, unconstrained {free_s:.1f} s"
    return Figure("cost", constrained_s / free_s - 1, "", 0.05, note=note)


def timed(client: httpx.Client, path: str, body: Mapping[str, Any]) -> float:
    began_s = time.perf_counter()
    client.post(path, json=body).raise_for_status()
    return time.perf_counter() - began_s


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab calls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="a path, or a name of `relaxserve ls --available`")
    parser.add_argument("--calls", type=int, default=1000, help="number of calls; 0: measure the cost only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="relaxserve-calls-") as place,
        serving(options.model, Path(place, "server.log")) as url,
        httpx.Client(base_url=url, timeout=600.0) as client,
    ):
        model = client.get("/v1/models").json()["data"][0]["id"]
        figures = [cost(client, model, options.seed)]
        if options.calls:
            figures += collect(client, model, options.calls, options.seed)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
