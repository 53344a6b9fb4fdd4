"""JSON answers in the training data: any field may be the last one, an answer has the requested fields, and its facts are true."""

import json
import random
from itertools import islice

import pytest

from tests.lab.training.conversation import Turn
from tests.lab.training.corpus import conversations
from tests.lab.training.skills.json_answers import answered, reshaped
from tests.lab.training.skills.json_shapes import demand, forced, schema_of, shaped

FACTS = {"animal": "ant", "legs": 6, "sound": None, "flies": False}
NESTED = {"person": {"name": "Anna", "age": 5}, "friends": [{"name": "Ben"}]}


def fields_of(turn: Turn) -> dict:
    return json.loads(turn.messages[-1]["content"])


@pytest.mark.parametrize("make", (answered, reshaped))
def test_every_field_ends_an_answer_and_stands_before_another(make):
    rng = random.Random(1)
    answers = [fields_of(make(rng)) for _ in range(4000)]
    last = {list(fields)[-1] for fields in answers}
    before = {name for fields in answers for name in list(fields)[:-1]}
    names = {
        "animal",
        "name",
        "legs",
        "sound",
        "home",
        "colour",
        "baby",
        "flies",
        "country",
        "capital",
        "thing",
        "month",
        "days",
        "age",
        "city",
    }
    assert names <= last and names <= before
    assert {"result", "names", "animals"} <= last


@pytest.mark.parametrize("seed", range(40))
def test_a_shape_is_made_of_what_is_known(seed: int):
    fields = shaped(random.Random(seed), FACTS)
    inner = [value for value in fields.values() if isinstance(value, dict)]
    values = [value for layer in (fields, *inner) for value in layer.values() if not isinstance(value, dict)]
    assert values and len(inner) <= 1
    assert all(value in FACTS.values() or value == "6" for value in values)


@pytest.mark.parametrize("fields", (FACTS, NESTED, {"legs": "6"}))
@pytest.mark.parametrize("seed", range(40))
def test_a_demand_names_every_field_in_its_order(fields: dict, seed: int):
    said = demand(random.Random(seed), fields)
    assert said.count("{ask}") == 1
    places = [said.index(name) for name in fields]
    assert places == sorted(places)


@pytest.mark.parametrize("seed", range(40))
def test_a_demand_tells_numbers_in_quotes_from_numbers(seed: int):
    """A request says whether a number must be a JSON string. Otherwise the same request would have two correct answers."""
    assert "string" in demand(random.Random(seed), {"legs": "6"})


def test_the_schema_of_an_answer():
    assert schema_of({"legs": 6, "flies": True, "names": ["Anna"]}) == {
        "type": "object",
        "properties": {"legs": {"type": "integer"}, "flies": {"type": "boolean"}, "names": {"type": "array", "items": {"type": "string"}}},
    }
    strict = schema_of(NESTED, strict=True)
    person = strict["properties"]["person"]
    assert strict["required"] == ["person", "friends"] and person["required"] == ["name", "age"]
    assert strict["additionalProperties"] is person["additionalProperties"] is False


def test_a_number_in_quotes_begins_a_token_of_its_own():
    assert forced({"animal": "ant", "legs": "6"}) == '{"animal": "ant", "legs": '
    assert forced({"animal": "ant", "legs": 6}) == ""


def test_how_an_answer_begins_is_given_where_nothing_asks_for_json():
    """If the prompt does not ask for JSON, the first characters of the JSON answer are marked as `given` and have the low loss weight of a
    prompt. Otherwise the model would learn to answer plain questions in JSON."""
    taught = [conversation for conversation in islice(conversations(4), 4000) if conversation.system is None]
    turns = [turn for conversation in taught for turn in conversation.turns if turn.skill == "json"]
    silent = [turn for turn in turns if not any(word in turn.messages[0]["content"].lower() for word in ("json", "{", "keys", "fields"))]
    assert silent
    for turn in silent:
        answer = turn.messages[-1]
        assert answer["given"] and answer["content"].startswith(answer["given"])
