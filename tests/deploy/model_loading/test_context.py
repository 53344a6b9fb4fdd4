"""Without `max_context`, a model serves its own context, or as much of it as the memory allows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from deploy.export.model import DEFAULT_CONTEXT, servable
from deploy.inspection import inspect_model, plan_load
from deploy.model_loading.files import open_files
from deploy.model_loading.known import begin, silent
from deploy.model_loading.load import load_model
from deploy.model_loading.modes import MOST_CONTEXT, SHORT_CONTEXT, Generator, Pages, mode_of
from deploy.model_loading.plan import _num_pages
from runtime.cache_groups import PAGE_SIZE, KVGroup
from server.engine.step_model import GroupLimits, StepLimits
from server.interfaces import LoadError
from server.messages import Load, Ready
from tests.deploy.gguf_files import VOCAB

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
LONG = 32_768


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def folder_of(place: Path, case: str, context: int = LONG, **fields: Any) -> Path:
    """Return a golden model whose configuration allows `context` tokens."""
    folder = place / f"{case}-{context}"
    if not folder.exists():
        shutil.copytree(GOLDEN / case, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context, **fields}))
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(VOCAB)}, unk_token="a"))
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def generator_of(folder: Path, **settings: Any) -> Generator:
    mode = mode_of(open_files(folder), Load("m", str(folder), **settings))
    assert isinstance(mode, Generator)
    return mode


def loaded(folder: Path, **settings: Any) -> Ready:
    return load_model(Load("m", str(folder), "f32", max_batch=4, **settings), silent).ready


def test_the_context_is_the_model_s_own(place: Path) -> None:
    folder = folder_of(place, "qwen3")
    ready = loaded(folder)
    assert (ready.max_context, ready.context_note) == (LONG, "")
    found = inspect_model(Load("m", str(folder), "f32", max_batch=4))
    assert (found.max_context, found.model_context, found.fits) == (LONG, LONG, True)


def test_the_memory_bounds_the_context_and_the_note_says_so(place: Path) -> None:
    """If the full context of a model does not fit into memory, the model gets a shorter one. A model is refused only if not even a short
    context fits."""
    folder = folder_of(place, "qwen3")
    asked = Load("m", str(folder), "f32", max_batch=4)
    whole = plan_load(asked)
    fixed_bytes = whole.weights_bytes + whole.arena_bytes
    limit = fixed_bytes + (1 + 8192 // PAGE_SIZE) * whole.page_bytes
    ready = loaded(folder, memory_limit_bytes=limit)
    assert (ready.max_context, ready.kv_cache_bytes) == (8192, limit - fixed_bytes)
    assert ready.context_note.startswith(f"context is 8192 of {LONG} tokens: the memory left for this model's KV cache is ")
    assert ready.context_note.endswith("set kv_cache_bytes to extend it")
    least_bytes = fixed_bytes + (1 + SHORT_CONTEXT // PAGE_SIZE) * whole.page_bytes
    assert loaded(folder, memory_limit_bytes=least_bytes).max_context == SHORT_CONTEXT
    with pytest.raises(LoadError, match="the model takes"):
        plan_load(msgspec.structs.replace(asked, memory_limit_bytes=least_bytes - 1))


def test_a_worker_that_replaces_another_has_at_least_its_context(place: Path) -> None:
    """Otherwise the requests that the old worker ran might not fit the new one."""
    asked = Load("m", str(folder_of(place, "qwen3")), "f32", max_batch=4)
    whole = plan_load(asked)
    needed = whole.weights_bytes + whole.arena_bytes + (1 + 8192 // PAGE_SIZE) * whole.page_bytes
    again = msgspec.structs.replace(asked, least_context=8192, restart=True)
    assert plan_load(msgspec.structs.replace(again, memory_limit_bytes=needed)).num_pages == 1 + 8192 // PAGE_SIZE
    with pytest.raises(LoadError, match="the model takes"):
        plan_load(msgspec.structs.replace(again, memory_limit_bytes=needed - 1))


# Groups of a large model: 128 KiB per token, of which a quarter in layers with a window of 1024 tokens.
WHOLE = KVGroup(tuple(range(24)), 8, 128, "bf16")
WINDOW = KVGroup(tuple(range(24, 32)), 8, 128, "bf16", window=1024)
BATCH, STEP, CONTEXT = 64, 512, 131_072


def contexts(room_bytes: int, **settings: Any) -> tuple[int, int]:
    """Return the longest sequence of a model with these groups, and the bytes of its KV cache."""
    least_context = settings.get("max_context") or SHORT_CONTEXT
    pages = []
    for group in (WHOLE, WINDOW):
        limits = GroupLimits(0, group.window)
        least = 1 + (limits.most_pages(STEP) or CONTEXT // PAGE_SIZE)
        floor = least if group.window else 1 + least_context // PAGE_SIZE
        pages.append(Pages(group, floor, least, least + (limits.most_pages(1) or CONTEXT // PAGE_SIZE) * (BATCH - 1)))
    counts = _num_pages(pages, Load("m", "m", **settings), room_bytes)
    groups = tuple(GroupLimits(count, of.window) for count, of in zip(counts, (WHOLE, WINDOW), strict=True))
    num_bytes = sum(count * of.bytes_per_page for count, of in zip(counts, (WHOLE, WINDOW), strict=True))
    return StepLimits(1, CONTEXT, STEP, BATCH, groups).capacity, num_bytes


GIB = 1 << 30


@pytest.mark.parametrize(
    ("room_bytes", "settings", "context"),
    [
        (100 * GIB, {}, CONTEXT),  # 12 GiB suffice for one full sequence
        (16 * GIB, {}, range(CONTEXT // 2, CONTEXT)),  # the other half stays free
        (16 * GIB, {"max_context": CONTEXT}, CONTEXT),
        (2 * GIB, {}, range(8192, 16_384)),
        (GIB, {}, range(8192, 16_384)),  # a default cache may take all of a small memory
        (16 * GIB, {"kv_share": 0.25}, range(32_768, CONTEXT // 2)),
        (16 * GIB, {"reserved_bytes": 14 * GIB}, range(16_384, 32_768)),
        (1 << 20, {}, SHORT_CONTEXT),
        (2 * GIB, {"kv_cache_bytes": 1 << 29}, range(SHORT_CONTEXT, 8192)),
        (2 * GIB, {"kv_cache_bytes": 0.75}, range(8192, 20_000)),
    ],
)
def test_the_longest_sequence_in_a_room(room_bytes: int, settings: dict[str, Any], context: int | range) -> None:
    """Windows get their pages first: a group with too few would end all sequences long before the others are full."""
    found, num_bytes = contexts(room_bytes, **settings)
    assert found == context if isinstance(context, int) else found in context
    assert num_bytes <= room_bytes or found <= SHORT_CONTEXT


def test_exports_keep_a_short_context(place: Path) -> None:
    folder = folder_of(place, "qwen3")
    assert servable(begin(Load("m", str(folder)))).mode.max_context == DEFAULT_CONTEXT
    assert servable(begin(Load("m", str(folder), max_context=LONG))).mode.max_context == LONG
    assert servable(begin(Load("m", str(folder_of(place, "qwen3", 1024))))).mode.max_context == 1024


def test_an_enormous_context_is_served_on_request_only(place: Path) -> None:
    folder = folder_of(place, "qwen3", 1 << 20)
    assert generator_of(folder).max_context == MOST_CONTEXT
    assert generator_of(folder, max_context=1 << 20).max_context == 1 << 20
