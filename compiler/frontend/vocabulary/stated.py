"""Read what tokenizer_config.json, special_tokens_map.json and added_tokens.json state about the tokens of a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compiler.frontend.errors import DamagedFile
from compiler.frontend.vocabulary.pieces import PLAIN_TOKEN

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = (*PLAIN_TOKEN, "normalized", "special")
MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Stated:
    """The statements of a folder's files about the tokens of a vocabulary. A token is a mapping of the fields that
    tokenizer.json has of a token."""

    config: Mapping[str, Any]  # tokenizer_config.json
    roles: Mapping[str, dict[str, Any]]  # special tokens by role
    further: tuple[dict[str, Any], ...]  # special tokens without a role
    added: Mapping[int, dict[str, Any]]  # tokens that are recognised in a text before it is split into words, by id

    def flag(self, name: str, default: bool) -> bool:
        """Return a flag of tokenizer_config.json, or the default if the flag is absent. Raise DamagedFile if it is neither true nor
        false."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise DamagedFile(f"{name} in {CONFIG} is {value!r:.80}, expected true or false")
        return value

    def role(self, name: str) -> str | None:
        """Return the text of the special token with this role, or None if no token has it."""
        return self.roles[name]["content"] if name in self.roles else None

    def place(self, ids: Mapping[str, int], own: list[dict[str, Any]]) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Return the vocabulary `ids` with the stated tokens, and the tokens that are recognised in a text before it is split into words,
        in the order of their ids. `own` are tokens recognised in this way that the vocabulary itself declares. A stated token with an id
        replaces the token of this id. A special token without an id is used only if the vocabulary has its text."""
        texts = {id: text for text, id in ids.items()} | {id: token["content"] for id, token in self.added.items()}
        placed = {text: id for id, text in texts.items()} | {token["content"]: id for id, token in self.added.items()}
        special = [token for token in (*self.roles.values(), *self.further) if token["content"] in placed]
        found = {token["content"]: token for token in own if placed.get(token["content"]) == token["id"]}
        found |= {token["content"]: {"id": placed[token["content"]], **token} for token in special}
        found |= {token["content"]: {"id": id, **token} for id, token in self.added.items()}
        return placed, sorted(found.values(), key=lambda token: token["id"])


def stated(files: Mapping[str, bytes], defaults: Mapping[str, str | dict[str, Any]]) -> Stated:
    """Read the files, and raise DamagedFile if one is malformed. `defaults` are the special tokens of the tokenizer's class by role, for
    roles that the files do not state."""
    config, special = _object(files, CONFIG), _object(files, SPECIAL)
    roles = {role: _token(value, role, special=True) for role, value in defaults.items()}
    for role in ROLES:
        if (value := config.get(role, special.get(role))) is not None:
            roles[role] = _token(value, role, special=True)
    listed = config.get("additional_special_tokens") or special.get("additional_special_tokens") or []
    if not isinstance(listed, list):
        raise DamagedFile(f"additional_special_tokens is a {type(listed).__name__}, expected a list of tokens")
    further = tuple(_token(value, "additional_special_tokens", special=True) for value in listed)
    are_special = {token["content"] for token in (*roles.values(), *further)}
    return Stated(config, roles, further, dict(_added(config, _object(files, ADDED), are_special)))


def _added(config: Mapping[str, Any], file: Mapping[str, Any], are_special: set[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the ids and fields of added tokens: those in tokenizer_config.json, or, if it has none, those in added_tokens.json. This file
    states no fields: its tokens are special if their texts are in `are_special`."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for key, value in decoder.items():
            yield _id(int(key) if key.isdecimal() and len(key) < 20 else key, CONFIG), _token(value, "added_tokens_decoder", special=False)
        return
    for text, id in file.items():
        yield _id(id, ADDED), _token(text, ADDED, special=text in are_special)


def _id(value: object, file: str) -> int:
    if type(value) is not int or not 0 <= value < MOST_TOKENS:
        raise DamagedFile(f"the id of a token in {file} is {value!r:.80}, expected a number from 0 to {MOST_TOKENS - 1}")
    return value


def _token(value: object, where: str, *, special: bool) -> dict[str, Any]:
    """Return the fields of a token, which is stated as a text or with its fields. If `special` is true, the token is special whatever its
    fields say. Raise DamagedFile if the statement is malformed."""
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {"content": value}
    content = fields.get("content")
    if not isinstance(content, str) or not content:
        raise DamagedFile(f"{where} is {value!r:.80}, expected a text")
    usual = {**PLAIN_TOKEN, "normalized": False, "special": special}
    flags = {name: fields.get(name, usual[name]) for name in FLAGS}
    if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
        raise DamagedFile(f"{wrong[0]} of token {content!r:.80} is {flags[wrong[0]]!r:.80}, expected true or false")
    return {"content": content, **flags, "special": flags["special"] or special}


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no such file. Raise DamagedFile if the content is anything else."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{name} holds a {type(value).__name__}, expected an object")
    return value
