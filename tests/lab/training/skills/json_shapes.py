"""The shape of an answer in JSON: its fields, their order and names, and the words with which the question demands these fields."""

import json
import random
import re
from typing import Any

Fields = dict[str, Any]

_NUMBER_IN_QUOTES = re.compile(r'"\d+"')
OPENING = '{"'  # beginning of the answer, which a schema forces

_ALSO_CALLED = {
    "animal": ("name", "name", "species"), "country": ("name", "country_name"), "thing": ("name", "object", "item"),
    "month": ("name",), "legs": ("number_of_legs", "num_legs"), "sound": ("noise",), "home": ("habitat", "lives_in"),
    "colour": ("color",), "baby": ("young",), "flies": ("can_fly",), "capital": ("city", "capital_city"),
    "days": ("number_of_days", "num_days"), "result": ("answer", "answer", "value", "total"), "age": ("years",),
    "city": ("town", "lives_in"), "names": ("people", "friends"), "count": ("number", "how_many"),
}  # fmt: skip
_WORDS = (
    "{{ask}} (answer|reply|respond) (in|with|as) json with the (fields|keys) {fields}.",
    "{{ask}} (give|return) (me |)json with {fields}.",
    "{{ask}} use the (fields|keys) {fields}( in json|).",
    "in json with the (fields|keys) {fields}: {{ask}}",
    "{{ask}} (as|in) json: {fields}.",
)
_FORMS = (
    "{{ask}} (answer|reply) (in|as|with) (json like|json of the form|the form|) {form}",
    "{{ask}} use (this|the) (schema|form|format): {form}",
    "fill in {form}: {{ask}}",
    "{{ask}} {form}",
)


def shaped(rng: random.Random, known: Fields, *, free: bool = False) -> Fields:
    """Choose some fields of `known`, whose first field is the subject. Fields may get other names, numbers may become texts, and some
    fields may move into an inner object. With `free`, an empty text may replace null, which no question demands."""
    subject = next(iter(known))
    chosen = rng.sample(list(known), min(len(known), rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5))))
    if rng.random() < 0.5:
        chosen.sort(key=lambda name: name != subject)
    as_text, blank = rng.random() < 0.2, free and rng.random() < 0.5
    fields = {_called(rng, name): _value(known[name], as_text=as_text, blank=blank) for name in chosen}
    form = rng.random()
    if form < 0.07 and isinstance(known[subject], str):
        return {"person" if subject == "name" else subject: {"name" if name == subject else name: value for name, value in fields.items()}}
    if form < 0.14 and len(fields) > 1:
        first = next(iter(fields))
        return {first: fields.pop(first), rng.choice(("facts", "details", "about")): fields}
    return fields


def _called(rng: random.Random, name: str) -> str:
    return rng.choice(_ALSO_CALLED[name]) if name in _ALSO_CALLED and rng.random() < 0.2 else name


def forced(fields: Fields) -> str:
    """Return the answer's text up to its first number in quotes, or "" if there is none. A schema forces this prefix, so the space before
    the quote is a separate token, as before a number without quotes. In plain text, space and quote are one token."""
    text = json.dumps(fields, ensure_ascii=False)
    quoted = _NUMBER_IN_QUOTES.search(text)
    return text[: quoted.start()] if quoted else ""


def _value(value: object, *, as_text: bool, blank: bool) -> object:
    if value is None:
        return "" if blank else None
    return str(value) if as_text and type(value) is int else value


def demand(rng: random.Random, fields: Fields) -> str:
    """Return a pattern around {ask} that names the fields of the answer."""
    is_plain = not any(isinstance(value, dict) or (isinstance(value, str) and value.isdigit()) for value in fields.values())
    if is_plain and rng.random() < 0.6:
        quote = rng.choice(("", "", '"'))
        *before, last = [f"{quote}{name}{quote}" for name in fields]
        joined = f"{', '.join(before)}{rng.choice((' and ', ', '))}{last}" if before else last
        return rng.choice(_WORDS).format(fields=joined)
    # the open form cannot express numbers in quotes or nested objects
    form = rng.choice((_typed_form, _typed_form, _open_form, _short_schema) if is_plain else (_typed_form, _short_schema))(fields)
    return rng.choice(_FORMS).format(form=form.replace("{", "{{").replace("}", "}}"))


def _open_form(fields: Fields) -> str:
    return "{" + ", ".join(f'"{name}": ...' for name in fields) + "}"


def _typed_form(fields: Fields) -> str:
    return json.dumps(_types(fields))


def _types(value: Any) -> Any:
    match value:
        case dict():
            return {name: _types(inner) for name, inner in value.items()}
        case list():
            return [_types(value[0])]
        case _:
            return _type(value)


def _short_schema(fields: Fields) -> str:
    return json.dumps(schema_of(fields))


def schema_of(value: Any, *, strict: bool = False) -> Fields:
    """Return a JSON schema of `value`. With `strict`, as servers require, every field is required and no other field is allowed."""
    match value:
        case dict():
            properties = {name: schema_of(inner, strict=strict) for name, inner in value.items()}
            rest = {"required": list(properties), "additionalProperties": False} if strict else {}
            return {"type": "object", "properties": properties, **rest}
        case list():
            return {"type": "array", "items": schema_of(value[0], strict=strict)}
        case _:
            return {"type": _type(value)}


def _type(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case _:
            return "string"
