"""Errors about converted requests name the fields of the client's request."""

from __future__ import annotations

import pytest

from server.api.request.conversation import for_template
from server.api.request.prepare import invalid
from server.api.request.schema import GivenMessage, Message
from server.api.request.words import in_words
from server.errors import ApiError

NAMES = {"stop": "stop_sequences", "form": "output", "form.json.schema": "output.schema", "max_tokens": "num_predict", "input": "texts"}


@pytest.mark.parametrize(
    ("param", "message", "named", "told"),
    [
        ("stop", "stop has 17 strings", "stop_sequences", "stop_sequences has 17 strings"),
        ("stop", "a stop string is empty", "stop_sequences", "a stop string is empty"),
        ("stop_token_ids", "stop_token_ids has 9", "stop_token_ids", "stop_token_ids has 9"),
        ("form.json.schema", "form.json.schema is 1", "output.schema", "output.schema is 1"),
        ("form.json.schema.a", "form.json.schema.a is 1", "output.schema.a", "output.schema.a is 1"),
        ("form.type", "form.type is 1", "output.type", "output.type is 1"),
        ("input[3]", "input[3] is empty", "texts[3]", "texts[3] is empty"),
        ("min_tokens", "min_tokens is 5; expected at most max_tokens, 3", "min_tokens", "min_tokens is 5; expected at most num_predict, 3"),
        ("tools", "tools names 'max_tokens', which is none", "tools", "tools names 'max_tokens', which is none"),
        (None, "the input is wrong", None, "the input is wrong"),
    ],
)
def test_fields_are_renamed_in_the_path_and_in_the_message(param, message, named, told):
    with pytest.raises(ApiError) as caught, in_words(NAMES):
        raise invalid(param, message)
    assert (caught.value.param, caught.value.message) == (named, told)


def test_a_converted_message_has_the_path_of_the_client_s():
    """Conversions add and divide messages, so the index in the conversation is not that of the request."""
    marker = {"image_url": "<image>"}
    given = [Message(role="user", content="a"), GivenMessage(role="user", content="<image>", place="input[0]")]
    with pytest.raises(ApiError) as caught:
        for_template(given, marker)
    assert caught.value.param == "input[0].content"
    with pytest.raises(ApiError) as own:
        for_template([*given[:1], Message(role="user", content="<image>")], marker)
    assert own.value.param == "messages[1].content"
