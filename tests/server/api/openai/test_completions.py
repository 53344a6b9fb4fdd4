"""The completions endpoint: formats of the prompt, echo, best_of, log-probabilities and their text offsets."""

from __future__ import annotations

import json

import pytest

from server.api.answer.logprobs import LogprobWriter
from server.messages import TokenLogprob
from server.text.pairs import TextTemplate
from tests.doubles.worker import ByteTokenizer


def events(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_forms_of_a_prompt(server, prompt):
    answer = server.openai().completions.create(model="null", prompt=prompt)
    # The answer is cut after 16 tokens, the API's default of `max_tokens`.
    assert answer.choices[0].text == "Hello from the n" and answer.choices[0].finish_reason == "length"
    assert bytes(server.worker.submits[-1].prompt_ids[-2:]) == b"hi"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(serve, answering, stream):
    script = answering("")
    script.answer = lambda submit, choice: [[b] for b in bytes(submit.prompt_ids[1:]) + b"%d" % choice]
    response = serve(script=script).complete(prompt=["a", "bc"], n=2, stream=stream)
    if not stream:
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
    else:
        texts = {}
        for event in events(response.text):
            choice = event["choices"][0]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "a0", 1: "a1", 2: "bc0", 3: "bc1"}


def test_usage_counts_every_prompt_once(server):
    usage = server.complete(prompt=["ab", "c"], n=2, max_tokens=3).json()["usage"]
    assert usage["prompt_tokens"] == 3 + 2 and usage["completion_tokens"] == 12


def test_logprobs_and_echo_line_up(server):
    choice = server.complete(prompt="né", echo=True, logprobs=1, max_tokens=3).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "néHel"
    assert logprobs["tokens"] == ["<s>", "n", "bytes:\\xc3", "bytes:\\xa9", "H", "e", "l"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert set(map(len, logprobs.values())) == {7}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "fields", "echoed", "offsets"),
    [
        ([256, 110], {}, "<s>n", [0, 3]),
        ([[256, 110]], {"add_special_tokens": False}, "<s>n", [0, 3]),
        ([256, 110], {"skip_special_tokens": True}, "n", [0, 0]),
        ("n", {}, "n", [0, 0]),
        (["n"], {"add_special_tokens": False}, "n", [0]),
        ("<|fim_prefix|>", {}, "<|fim_prefix|>", [0, 0]),
    ],
)
def test_an_echoed_prompt_shows_its_special_tokens_if_the_answer_does(serve, prompt, fields, echoed, offsets, stream):
    """It does not show those that the server has put before a text: clients cut the prompt that they sent from the text."""
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, "skip_special_tokens": False, "stream": stream, **fields}
    response = serve(tokenizer=ByteTokenizer(specials=["<|fim_prefix|>"])).complete(**body)
    parts = [event["choices"][0] for event in events(response.text)] if stream else response.json()["choices"]
    assert "".join(part["text"] for part in parts) == echoed + "He"
    found = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    assert found == [*offsets, len(echoed), len(echoed) + 1]


def test_an_echoed_text_lacks_the_special_tokens_behind_it(serve):
    class Ending(ByteTokenizer):
        text_template = TextTemplate(before=(256,), after=(257,))

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            ids = super().encode(text, add_special_tokens)
            return [*ids, 257] if add_special_tokens else ids

    choice = (
        serve(tokenizer=Ending()).complete(prompt="ab", echo=True, logprobs=0, max_tokens=1, skip_special_tokens=False).json()["choices"][0]
    )
    assert choice["text"] == "abH" and choice["logprobs"]["tokens"] == ["<s>", "a", "b", "</s>", "H"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_streamed_echo_is_the_whole(server, logprobs):
    body = {"prompt": "né", "echo": True, "logprobs": logprobs, "max_tokens": 4, "n": 2}
    whole = server.complete(**body).json()["choices"]
    chunks = [event["choices"][0] for event in events(server.complete(**body, stream=True).text)]
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == whole[index]["text"]
        if logprobs is not None:
            offsets = [offset for chunk in mine if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]
            assert offsets == whole[index]["logprobs"]["text_offset"]


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"echo": True}])
@pytest.mark.parametrize("prompt", ["a", ["ab", "c"]])
def test_each_streamed_choice_has_the_log_probabilities_of_its_prompt(server, monkeypatch, prompt, fields):
    """This holds also if the first event of a later choice comes first, as it may if the first choice waits for its constraint."""
    generate = server.worker.generate

    async def reversed_events(submit):
        found = [event async for event in generate(submit)]
        for event in sorted(found, key=lambda event: -event.choice):
            yield event

    body = {"prompt": prompt, "prompt_logprobs": 1, "n": 3, "max_tokens": 2, **fields}
    whole = server.complete(**body).json()["choices"]
    monkeypatch.setattr(server.worker, "generate", reversed_events)
    found: dict[int, list] = {}
    for event in events(server.complete(**body, stream=True).text):
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice.get("prompt_logprobs"))
    assert {index: chunks[0] for index, chunks in found.items()} == {choice["index"]: choice["prompt_logprobs"] for choice in whole}
    assert all(chunk is None for chunks in found.values() for chunk in chunks[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_probabilities_of_a_prompt_are_encoded_once(server, monkeypatch, stream):
    """To encode 30,000 rows again for each of 16 choices on the event loop would hold up all other streams."""
    encode, lengths = LogprobWriter.prompt, []
    monkeypatch.setattr(LogprobWriter, "prompt", lambda self, read: lengths.append(len(read)) or encode(self, read))
    assert server.complete(prompt=["ab", "c"], prompt_logprobs=1, n=3, max_tokens=2, stream=stream).status_code == 200
    assert sorted(lengths) == [2, 3]


@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_completes_the_last_character_of_the_prompt(serve, answering, echo):
    """The tokens of a prompt may end within a character."""
    script = answering("")
    script.answer = lambda _submit, _choice: [[token] for token in "🙂é!".encode()[2:]]
    server = serve(script=script)
    body = {"prompt": [104, *"🙂".encode()[:2]], "echo": echo, "logprobs": 0}
    choice = server.complete(**body).json()["choices"][0]
    assert choice["text"] == ("h🙂é!" if echo else "🙂é!")
    assert choice["logprobs"]["text_offset"][-5:] == ([1, 1, 2, 2, 3] if echo else [0, 0, 1, 1, 2])
    assert "".join(event["choices"][0]["text"] for event in events(server.complete(**body, stream=True).text)) == choice["text"]


def test_scoring_a_prompt_generates_nothing(server):
    answer = server.complete(prompt="abc", echo=True, logprobs=0, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "abc" and len(answer["choices"][0]["logprobs"]["tokens"]) == 4
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("include", [False, True])
def test_logprobs_end_where_a_stop_string_cuts(serve, answering, include):
    server = serve(script=answering("one STOP two"))
    choice = server.complete(stop="STOP", logprobs=0, include_stop_str_in_output=include).json()["choices"][0]
    assert choice["text"] == ("one STOP" if include else "one ")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "STOP"


def test_best_of_keeps_the_most_probable(serve, answering, monkeypatch):
    script = answering("")
    script.answer = lambda _submit, choice: [[ord("abc"[choice])]]
    server = serve(script=script)
    likely = {ord("a"): -3.0, ord("b"): -1.0, ord("c"): -2.0}
    monkeypatch.setattr("tests.doubles.worker._logprob", lambda token_id, _top: TokenLogprob(token_id, likely[token_id], 1))
    answer = server.complete(best_of=3, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["b", "c"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_invalid_values_are_refused_by_name(server, body, param):
    response = server.complete(**body)
    if param is None:
        assert response.status_code == 200  # the server replaces an empty prompt by the tokenizer's beginning-of-text token
        return
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_embeddings_are_refused_by_a_generator(server):
    response = server.http().post("/v1/embeddings", json={"input": "x"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "not_an_embedding_model"


def test_a_gap_is_filled_by_models_that_know_how(serve):
    server = serve(tokenizer=ByteTokenizer(specials=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]))
    assert server.complete(prompt="ab", suffix="cd").status_code == 200
    before, behind, middle = 258, 259, 260
    assert server.worker.submits[-1].prompt_ids == (256, before, *b"ab", behind, *b"cd", middle)
    assert server.complete(prompt="", suffix="cd").status_code == 200
    assert server.complete(prompt="a", suffix="b", echo=True).json()["error"]["param"] == "echo"


def test_others_say_that_they_do_not(server):
    error = server.complete(prompt="ab", suffix="cd").json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "suffix")
    assert server.complete(prompt="ab", suffix="").status_code == 200
