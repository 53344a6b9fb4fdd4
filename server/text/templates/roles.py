"""Change a conversation that a chat template has refused. Some templates take a system message only at the beginning, and demand that the
user and the assistant take turns. The APIs demand neither: agents send several messages of the user in a row, system messages between them,
or text of the user behind the results of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

BETWEEN = "\n\n"  # separates the texts of messages that are joined into one
JOINED = ("system", "user", "assistant")
TEXTS = ("reasoning_content", "thinking")  # fields of a message, beside its content, that are texts


def forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the conversation in forms that more templates accept, those with fewer changes first: later system messages as the user's;
    messages of one role joined; both; and the last two with the user's texts appended to the results before them. Each form has only its
    own changes to the messages as they came, so that a change which the template does not need does not alter the prompts of later
    turns."""
    alone = _with_one_system(messages)
    joined, both = _joined(messages), _joined(alone)
    tried: list[Sequence[Message]] = [list(messages)]
    for form in (alone, joined, both, _behind_results(joined), _behind_results(both)):
        if form is not None and form not in tried:
            tried.append(form)
            yield form


def _with_one_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the conversation with the system messages at its beginning joined into one, and each later system message as a message of the
    user."""
    begin = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    later = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[begin:]]
    return [*([_one(messages[:begin])] if begin else []), *later]


def _joined(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the conversation with consecutive messages of one role joined into one message, if the role is one of JOINED. Nothing is
    joined to a message with calls, because its calls come last."""
    groups: list[list[Message]] = []
    for message in messages:
        before = groups[-1][-1] if groups else None
        if before is not None and before["role"] == message["role"] in JOINED and not before.get("tool_calls"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_one(group) for group in groups]


def _behind_results(messages: Sequence[Message]) -> Sequence[Message] | None:
    """Return the conversation with the user's messages after the result of a call appended to this result. Return None if one of these
    messages has a content that is not text."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and groups[-1][0]["role"] == "tool" and message["role"] == "user":
            if not isinstance(message.get("content"), str):
                return None  # templates write a result as a text, so an image in it would be lost
            groups[-1].append(message)
        else:
            groups.append([message])
    return [{**group[0], "content": _content(group)} if len(group) > 1 else group[0] for group in groups]


def _one(group: Sequence[Message]) -> Message:
    """Return messages of one role as one message."""
    if len(group) == 1:
        return group[0]
    made: dict[str, Any] = {}
    for message in group:
        made.update(message)
    for name in TEXTS:
        if texts := [text for message in group if isinstance(text := message.get(name), str) and text]:
            made[name] = BETWEEN.join(texts)
    return {**made, "content": _content(group)}


def _content(group: Sequence[Message]) -> Any:
    """Return the contents of messages as one: a text if all are texts, or else a list of parts."""
    contents = [content for message in group if (content := message.get("content"))]
    if len(contents) < 2:
        return contents[0] if contents else group[-1].get("content")
    if all(isinstance(content, str) for content in contents):
        return BETWEEN.join(contents)
    made: list[Any] = []  # parts; a text is a list of its pieces until all contents are there
    for content in contents:
        parts = [_text(content)] if isinstance(content, str) else content
        more = [[part["text"]] if part.get("type") == "text" else part for part in parts]
        # The separator is part of a text beside it: templates such as Gemma 3's trim each part, and would lose it.
        if made and isinstance(made[-1], list):
            made[-1].append(BETWEEN)
            if isinstance(more[0], list):
                made[-1] += more.pop(0)
        elif made and isinstance(more[0], list):
            more[0].insert(0, BETWEEN)
        made += more
    return [_text("".join(part)) if isinstance(part, list) else part for part in made]


def _text(text: str) -> Message:
    """Return the part for a text."""
    return {"type": "text", "text": text}
