"""Damaged model files are refused with an error that says what is damaged. They cause no crash, no hang and no other exception."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from deploy import demo
from tests.deploy.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "models"
SILENT_S = 300.0  # every case takes less time, even on a busy machine, so a longer silence means a hang
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with five undamaged models: three golden models, the demo, and a GGUF file."""
    folder = tmp_path_factory.mktemp("sound")
    for case in ("qwen3", "bert", "llama-yarn-sharded"):
        shutil.copytree(GOLDEN / case, folder / case, ignore=shutil.ignore_patterns("*.npz"))
        words = {f"w{number}": number for number in range(160)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / case / "tokenizer.json"))
    (folder / "qwen3" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "qwen3" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}))
    (folder / "qwen3" / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "w1"}, "bos_token": "w2"}))
    shutil.copytree(demo.MODEL, folder / "demo")
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf" / "m.gguf", chat_template=TEMPLATE)
    return folder


def run(models: Path, cache: Path, *, seed: int, first: int = 0, count: int, loads: bool) -> None:
    """Run cases of tests/deploy/mutations.py in a process. If the process crashes or hangs, fail with the number of the case."""
    command = [sys.executable, "-m", "tests.deploy.mutations", str(models), str(seed), str(first), str(count), str(int(loads))]
    said, complaint = b"", cache / "complaint"
    cache.mkdir(exist_ok=True)
    with (
        complaint.open("wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "RELAXSERVE_CACHE": str(cache)}, stdout=subprocess.PIPE, stderr=errors
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(SILENT_S):
            if not (news := os.read(process.stdout.fileno(), 1 << 16)):
                break
            said = (said + news)[-10_000:]
        else:
            process.kill()
            said += b"  (silent since)\n"
    if process.returncode != 0 or not said.endswith(b"done\n"):
        last = said.decode().splitlines()[-1:]
        pytest.fail(f"status {process.returncode} at {last}\n{complaint.read_bytes()[-6000:].decode(errors='replace')}")


def test_fifty_damaged_models_are_refused_or_sound(models: Path, tmp_path: Path) -> None:
    """The first fifty cases of the long campaign. Models are checked but not loaded."""
    run(models, tmp_path / "cache", seed=1, count=50, loads=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_five_thousand_damaged_models_are_refused_or_sound(part: int, models: Path, tmp_path: Path) -> None:
    run(models, tmp_path / "cache", seed=2, first=1000 * part, count=1000, loads=True)
