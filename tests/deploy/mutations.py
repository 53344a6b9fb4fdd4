"""Damage model files at random and load them: `python -m tests.deploy.mutations FOLDER SEED FIRST COUNT LOADS`.

FOLDER contains one folder per model. Case N depends only on SEED and N: it mutates one file of one model and checks the model. If the check
passes and LOADS is 1, the case also loads the model. Before each case, its number and its mutation are printed, so that a crash or hang can
be attributed to a case. A LoadError is expected, and so is a TemplateError while rendering; any other exception ends the run with a
traceback.
"""

from __future__ import annotations

import json
import math
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.model_loading.known import begin, silent
from deploy.model_loading.load import load_model
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from runtime import flags
from server.interfaces import LoadError
from server.messages import Load
from server.text.templates.errors import TemplateError
from server.text.tokenizer import Tokenizer

MEMORY_BYTES = 8 << 30  # Limit of address space, which an allocation of an unchecked length from a damaged file exceeds.
# Most mutations hit this many bytes at the start of a binary file. The rest are weights, for which every value is valid.
HEADER_BYTES = 1 << 16
KINDS = (".gguf", ".safetensors", ".json", ".jinja")
MESSAGES = ([{"role": "user", "content": "Hi"}], [{"role": "system", "content": ""}, {"role": "user", "content": "é\n{{ x }}"}])
TEXTS = ("Hello, world", "", "日本 \U0001f600\r\n\t", "<|im_end|> a" * 20, "a" * 2000)


def main(folder: Path, seed: int, first: int, count: int, loads: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    models = sorted(path for path in folder.iterdir() if path.is_dir())
    sound = {model: advance(begin(_load(model)), Servable) for model in models}
    programs = {model: str(found.module) for model, found in sound.items()}
    for number in range(first, first + count):
        dice = random.Random(f"{seed} {number}")
        model = dice.choice(models)
        path = dice.choice(sorted(file for file in model.rglob("*") if file.suffix in KINDS))
        content, how = mutated(path.read_bytes(), path.suffix, dice)
        print(f"case {number}: {model.name}/{path.relative_to(model)}: {how}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="mutant-") as scratch:
            mutant = _copied(model, Path(scratch), path.relative_to(model), content)
            try:
                found = advance(begin(_load(mutant)), Servable)
                _use_tokenizer(found.tokenizer)
                # load only if the program is unchanged, because compiling a different program takes seconds
                if loads and str(found.module) == programs[model]:
                    load_model(_load(mutant), silent)
                    shutil.rmtree(flags.current().cache / "weights")
            except LoadError as error:
                assert str(error), "a refusal without a message"
    print("done", flush=True)


def _load(folder: Path) -> Load:
    return Load("mutant", str(folder), max_batch=2, max_context=64)


def _copied(model: Path, scratch: Path, mutated: Path, content: bytes) -> Path:
    """Return a folder with links to the model's files. Only the file `mutated` is a new file, with the given content."""
    for file in model.rglob("*"):
        place = scratch / file.relative_to(model)
        if file.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif file.relative_to(model) != mutated:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
    (scratch / mutated).parent.mkdir(parents=True, exist_ok=True)
    (scratch / mutated).write_bytes(content)
    return scratch


def _use_tokenizer(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        tokenizer.decode(ids)
        for id in ids:
            tokenizer.token_bytes(id)
    if tokenizer.chat_template is not None:
        for messages in MESSAGES:
            with suppress(TemplateError):
                tokenizer.chat_template.render(messages)


# --- mutations -----------------------------------------------------------------------------------------------------------


def mutated(content: bytes, suffix: str, dice: random.Random) -> tuple[bytes, str]:
    """Return a mutated copy of a file and the name of the mutation."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [flip_bits, cut, repeat, drop, put_number]
    match suffix:
        case ".json":
            ways = [change_json, change_json, change_json, change_json, flip_bits, cut]
        case ".jinja":
            ways = [flip_bits, cut, repeat, drop, splice_template, splice_template]
        case ".safetensors":
            ways += [change_header, change_header]
        case _:
            pass
    way = dice.choice(ways)
    return way(content, dice), way.__name__


def _place(content: bytes, dice: random.Random) -> int:
    return dice.randrange(max(1, min(len(content), HEADER_BYTES if dice.random() < 0.8 else len(content))))


def flip_bits(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 4, 64))):
        if changed:
            changed[_place(content, dice)] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(content: bytes, dice: random.Random) -> bytes:
    return content[: _place(content, dice)]


def repeat(content: bytes, dice: random.Random) -> bytes:
    start = _place(content, dice)
    return content[:start] + content[start : start + dice.randrange(1, 4096)] + content[start:]


def drop(content: bytes, dice: random.Random) -> bytes:
    start = _place(content, dice)
    return content[:start] + content[start + dice.randrange(1, 4096) :]


def put_number(content: bytes, dice: random.Random) -> bytes:
    """Overwrite four or eight bytes with an extreme length or count, such as 0 or 2**63 - 1."""
    size = dice.choice((4, 8))
    value = dice.choice((0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    start = _place(content, dice)
    return content[:start] + (value % (1 << 8 * size)).to_bytes(size, "little") + content[start + size :]


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 63, 65, 1 << 31, 1 << 53, 1 << 70, -(1 << 63), 0.0, -0.5, 1e-300, 1e300, math.nan, math.inf),
    *("", "x", "\ud800", "\0", "é" * 10, "../../etc/passwd", "/dev/zero", "9" * 5000, "a" * 100_000),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, {"type": "x"}, {"type": "Sequence", "normalizers": []}),
)


DEEP = "nested deeper than parsers recurse"


def change_json(content: bytes, dice: random.Random) -> bytes:
    """Replace, remove, copy or nest one to three values of a JSON file."""
    value = json.loads(content)
    for _ in range(dice.choice((1, 1, 2, 3))):
        value = _changed(value, dice)
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).encode()


def _changed(value: Any, dice: random.Random) -> Any:
    here = dice.random() < 0.15
    if isinstance(value, dict) and value and not here:
        key = dice.choice(list(value))
        match dice.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, dice.choice((*value, "model_type", "type", "\ud800", "")): value[key]}
            case _:
                return {**value, key: _changed(value[key], dice)}
    if isinstance(value, list) and value and not here:
        at = dice.randrange(len(value))
        match dice.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], _changed(value[at], dice), *value[at + 1 :]]
    if dice.random() < 0.03:
        return DEEP
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.5:
        return dice.choice((value + 1, value - 1, -value, value * 2, value // 2, value * 1000))
    if isinstance(value, str) and dice.random() < 0.3:
        at = dice.randrange(len(value) + 1)
        return value[:at] + dice.choice(("\ud800", "{{", "%}", "\0", "▁", " ", "(", "[^", "\\")) + value[at:]
    return dice.choice(STRANGE)


def change_header(content: bytes, dice: random.Random) -> bytes:
    """Mutate the JSON header of a safetensors file. Before the header, write its right length or a length that is wrong by one."""
    length = int.from_bytes(content[:8], "little")
    header = change_json(content[8 : 8 + length], dice)
    announced = len(header) + dice.choice((0, 0, 0, 0, 1, -1))
    return max(0, announced).to_bytes(8, "little") + header + content[8 + length :]


PIECES = (
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if",
        "{% endif %}",
        "{% macro f(x) %}",
        "{{ f( }}",
    ),
    *(
        "{{ messages[99].content }}",
        "{{ 1 // 0 }}",
        "{{ 'x' * 9999999999 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ x|unknown }}",
    ),
    *(
        "{% set ns = namespace() %}{{ ns.y.z }}",
        "{{ raise_exception('no') }}",
        "\ud800",
        "\0",
        "{% include 'x' %}",
        "{{ (" * 500,
        "{{ [" * 300,
    ),
    *(
        "{% extends 'y' %}",
        "{{ messages|tojson|tojson }}",
        "{{ messages.__class__ }}",
        "{% generation %}",
        "{% break %}",
        "{{ -" * 200 + "1",
    ),
)


def splice_template(content: bytes, dice: random.Random) -> bytes:
    text = content.decode(errors="replace")
    for _ in range(dice.choice((1, 2, 5))):
        at = dice.randrange(len(text) + 1)
        text = text[:at] + dice.choice(PIECES) + text[at:]
    return text.encode(errors="surrogatepass")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
