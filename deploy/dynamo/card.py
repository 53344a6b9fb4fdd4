"""Write the files from which Dynamo's frontend makes prompts of a model: its tokenizer, chat template and configuration.

The server reads the same files, or makes the same from a GGUF file, so the frontend and the server have the same tokens. The files are in
the cache, in a folder that is named by their digest: Dynamo sends requests of a model only to workers whose files have the same paths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.cache import kept
from deploy.model_loading.tokenizer import load_files
from runtime.own_folder import OwnFolder
from server.settings import SettingsError
from server.text.tokenizer_files import TokenizerFiles

CONFIG = "config.json"
TEMPLATE, HOLDERS = "chat_template.jinja", ("tokenizer_config.json", "chat_template.json")  # a template; files that may contain one


@dataclass(frozen=True, slots=True)
class Card:
    """The files that Dynamo's frontend reads for a model."""

    folder: Path
    has_template: bool  # whether the model has a chat template


def write_card(source: str) -> Card:
    """Write the files of a model, without those in subfolders, and with the fields of the configuration that Dynamo needs. Raise LoadError
    if they cannot be read, and SettingsError if the cache is disabled."""
    files = load_files(source)
    contents = {name: content for name, content in files.contents.items() if "/" not in name}
    # Dynamo requires the first two fields, which the configuration of a GGUF file lacks, and reads in the third which tokens end an answer.
    needed = {"model_type": "relaxserve", "architectures": ["relaxserve"], "eos_token_id": [*files.eos_ids()]}
    config = {**needed, **files.object(CONFIG)}
    return Card(_written({**contents, CONFIG: json.dumps(config).encode()}), _has_template(files))


def _written(contents: Mapping[str, bytes]) -> Path:
    """Write files into the folder of the cache that is named by their digest, unless it exists. Return the folder. Raise SettingsError if
    the cache is disabled."""
    cache = kept()
    if cache is None:
        raise SettingsError(
            "RELAXSERVE_NO_CACHE is set; expected a cache, in which the frontend and all workers of Dynamo find the model's files: unset it"
        )
    key = hashlib.blake2b(msgspec.msgpack.encode(sorted(contents.items())), digest_size=16).hexdigest()
    place = cache.card_of(key)
    if not place.is_dir():
        with OwnFolder(place.parent, f".{key}.") as made:
            for name, content in contents.items():
                (made.path / name).write_bytes(content)
            made.move_to(place)
    return place


def _has_template(files: TokenizerFiles) -> bool:
    """Return whether one of a model's files has a chat template."""
    return TEMPLATE in files.contents or any(files.object(name).get("chat_template") for name in HOLDERS)
