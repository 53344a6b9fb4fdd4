"""Every field of every request body has a size limit. The server checks the limit before it does work that grows with the size."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.api.request import texts
from server.errors import ApiError
from server.http.json_scan import MAX_NUMBERS, MAX_PARTS
from server.text.pairs import TextTemplate
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles
from tests.doubles.worker import ByteTokenizer

LIMITS = {"string": ("maxLength", "enum", "const"), "array": ("maxItems",), "object": ("maxProperties", "properties")}


def unlimited(schema, document, path, seen):
    """Yield the paths of all values in a schema that may be arbitrarily large."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen:
            return
        seen.add(name)
        schema = document["components"]["schemas"][name]
    kind = schema.get("type")
    if kind in LIMITS and not any(limit in schema for limit in LIMITS[kind]):
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from unlimited(inner, document, f"{path}.{name}", seen)
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from unlimited(inner, document, path, seen)


def test_every_text_list_and_object_of_every_body_has_a_limit(server):
    """In the OpenAPI document, every string, list and object of every request body has a size limit. So a new field without a limit fails
    this test."""
    document = server.http().get("/openapi.json").json()
    bodies = [
        (path, operation["requestBody"]["content"]["application/json"]["schema"])
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if "requestBody" in operation
    ]
    assert len(bodies) >= 10
    seen = set()
    assert [place for path, schema in bodies for place in unlimited(schema, document, path, seen)] == []


class Counting(ByteTokenizer):
    """A tokenizer that counts how many characters the server encodes with it."""

    num_chars = 0

    def encode(self, text, add_special_tokens):
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens)

    def count(self, text):
        self.num_chars += len(text)
        return super().count(text)


@pytest.fixture
def counting(serve):
    tokenizer = Counting()
    return serve(tokenizer=tokenizer), tokenizer


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/v1/completions", {"prompt": "x" * (8 << 20)}, 413, id="body"),
        pytest.param("/v1/completions", {"prompt": "x" * (4 << 20)}, 400, id="prompt"),
        pytest.param("/v1/completions", {"prompt": ["x"] * 2000}, 400, id="prompts"),
        pytest.param("/v1/completions", {"prompt": ["x"] * (MAX_PARTS + 1)}, 413, id="a million prompts"),
        pytest.param("/v1/completions", {"prompt": [1] * (MAX_NUMBERS + MAX_PARTS + 1)}, 413, id="a million tokens"),
        pytest.param("/v1/completions", {"prompt": [[]] * 20_000}, 400, id="wrongly typed prompts"),
        pytest.param("/v1/completions", {"prompt": "x", "bad_words": ["x"] * 1025}, 400, id="bad words"),
        pytest.param("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 0 for i in range(1025)}}, 400, id="bias"),
        pytest.param("/v1/completions", {"prompt": "x", **{f"x{i}": 0 for i in range(MAX_PARTS)}}, 413, id="unknown fields"),
        pytest.param("/v1/embeddings", {"input": ["x"] * 2049}, 400, id="inputs"),
        pytest.param("/tokenize", {"prompt": "x" * (8 << 20)}, 413, id="tokenize"),
        pytest.param("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (4 << 20)}]}, 400, id="content"),
        pytest.param(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": "x" * (2 << 20)}}],
            },
            400,
            id="tools",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "documents": [{"a": "x" * (2 << 20)}]},
            400,
            id="documents",
        ),
    ],
)
def test_too_much_is_refused_before_it_is_tokenised(counting, path, body, status):
    server, tokenizer = counting
    before = tokenizer.num_chars
    response = server.http().post(path, json=body)
    assert response.status_code == status, response.text[:300]
    assert len(response.content) < 2000 and tokenizer.num_chars == before


def test_a_long_text_is_counted_only_until_it_is_too_long():
    tokenizer = Counting()
    with pytest.raises(ApiError, match="more than 20000 tokens"):
        texts.encode_prompts(["x" * 2_000_000], tokenizer, "prompt", special=False, context=20_000)
    assert tokenizer.num_chars == texts.PIECE_CHARS


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_to_be_cut_is_encoded_where_it_is_kept(side):
    tokenizer = Counting()
    text = "a" * 300_000 + "b" * 300_000
    (ids,) = texts.encode_prompts([text], tokenizer, "prompt", special=False, context=100, keep=100, side=side)
    assert ids == [ord("a" if side == "right" else "b")] * 100
    assert tokenizer.num_chars <= 2 * texts.PIECE_CHARS


def test_a_real_tokenizer_cuts_a_long_text_as_it_cuts_the_whole():
    """If a long text is truncated, the server encodes only the part that it keeps. The kept tokens are those that the demo model's
    tokenizer gives for that part of the whole text."""
    tokenizer = Tokenizer(TokenizerFiles.from_dir(Path("deploy/demo/model")).contents)
    text = " ".join(f"word {i} of a tale" for i in range(30_000))
    whole = tokenizer.encode(text, True)
    for side, expected in (("left", whole[-500:]), ("right", whole[:500])):
        (ids,) = texts.encode_prompts([text], tokenizer, "prompt", special=True, context=1024, keep=500, side=side)
        assert ids == expected


TALE = " ".join(f"word {i} of a tale," if i % 7 else f"line{i}\n\n" for i in range(3000))


@pytest.mark.parametrize("text", [TALE, "a" * 9000, "\u6f22\u5b57" * 4000, "a b " * 3000, " " * 9000 + "end"], ids=lambda text: text[-4:])
@pytest.mark.parametrize("keep", [1, 8, 100])
@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_kept_of_a_text_are_those_of_the_whole(text, keep, side):
    tokenizer = Tokenizer(TokenizerFiles.from_dir(Path("deploy/demo/model")).contents)
    expected = texts.truncate(tokenizer.encode(text, True), keep, side)
    (ids,) = texts.encode_prompts([text], tokenizer, "prompt", special=True, context=1024, keep=keep, side=side)
    assert ids == expected


@pytest.mark.parametrize(
    ("ids", "keep", "left", "right"),
    [
        ([1, 5, 6, 7, 2], 4, [1, 6, 7, 2], [1, 5, 6, 2]),
        ([1, 5, 6, 7, 2], 5, [1, 5, 6, 7, 2], [1, 5, 6, 7, 2]),
        ([1, 5, 6, 7, 2], 2, [1, 2], [1, 2]),
        ([1, 5, 6, 7, 2], 1, [2], [2]),
        ([5, 6, 7], 2, [6, 7], [5, 6]),  # token ids without special tokens
        ([5, 6, 7, 2], 2, [7, 2], [5, 2]),
    ],
)
def test_the_special_tokens_around_a_text_are_kept(ids, keep, left, right):
    around = TextTemplate((1,), (2,))
    assert texts.truncate(ids, keep, "left", around) == texts.truncate(ids, keep, None, around) == left
    assert texts.truncate(ids, keep, "right", around) == right
    assert texts.truncate(ids, keep, "right") == ids[:keep]


def test_of_a_text_to_be_cut_little_more_than_is_kept_is_encoded():
    tokenizer = Counting()
    texts.encode_prompts([TALE], tokenizer, "prompt", special=False, context=1024, keep=8)
    assert tokenizer.num_chars < 200


def test_arguments_within_texts_are_held_to_the_same_limits(server):
    """The arguments of a tool call are JSON inside a string, and the limits of the request body also apply to this JSON. With too many
    parts the request is refused. JSON that nests too deeply or is incomplete remains a string."""
    for arguments, status in (("[" * 1000, 200), ("[" + "{}," * MAX_PARTS + "{}]", 413), ('{"a": "b', 200)):
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "x"}]
        response = server.http().post("/v1/chat/completions/render", json={"messages": messages})
        assert response.status_code == status, response.text[:300]


def test_a_schema_within_a_text_is_held_to_the_same_limits(server):
    response = server.complete(guided_json="[" * 5000)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_schema"


def test_log_probabilities_of_prompts_are_limited(server):
    response = server.complete(prompt=[[5] * 2000] * 4, prompt_logprobs=20, max_tokens=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"
