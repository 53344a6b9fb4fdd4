"""`inspect` says how much memory a model needs. If the model does not fit, `inspect` names settings with which it would fit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deploy import demo
from deploy.cli.commands import app
from deploy.export.folder import ExportError, new_folder
from deploy.inspection import WORKER_BYTES, Inspection, inspect_model, part_of, remedies
from deploy.machine import _cache_folder
from deploy.model_loading.files import Opened
from deploy.model_loading.known import begin
from deploy.model_loading.modes import format_named
from deploy.model_loading.stages import advance
from runtime.errors import UnsafeCache
from runtime.sealed import require_private
from server.interfaces import LoadError
from server.messages import Load

WHISPER = Path(__file__).parents[1] / "golden" / "whisper"
LOAD = Load("demo", str(demo.MODEL), max_batch=4)

pytestmark = pytest.mark.xdist_group("inspection")  # the tests of this group share one compiled model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        first = inspect_model(LOAD)
        again = inspect_model(LOAD)
    assert (first.cache_hit, again.cache_hit) == (False, True)
    assert replace(again, cache_hit=False, compile_s=first.compile_s, available_bytes=first.available_bytes) == first
    return first


def opened() -> Opened:
    return advance(begin(LOAD), Opened)


def test_pages_hold_what_all_sequences_may_take(found: Inspection) -> None:
    plan = found.plan
    assert plan.num_pages == 1 + 4 * 1024 // 16
    assert plan.kv_cache_bytes == plan.num_pages * plan.page_bytes
    assert [(group.num_layers, group.window, group.num_bytes) for group in plan.groups] == [(5, None, plan.kv_cache_bytes)]
    assert plan.total_bytes == plan.weights_bytes + plan.arena_bytes + plan.kv_cache_bytes


def test_a_broken_chat_template_is_refused_before_compiling(tmp_path: Path) -> None:
    """`inspect` checks the chat template like `serve`, and refuses a model with a broken template before it compiles the model."""
    for file in demo.MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("fine\n{% if %}")
    with pytest.raises(LoadError, match="the chat template is broken: chat template, line 2") as refused:
        inspect_model(Load("broken", str(tmp_path)))
    assert refused.value.code == "load_refused"


def test_a_smaller_cache_is_the_mildest_remedy(found: Inspection) -> None:
    tight = replace(found, available_bytes=found.required_bytes - found.plan.page_bytes)
    assert not tight.fits
    (remedy,) = remedies(opened(), tight)
    assert remedy.startswith("--kv-cache-bytes")


def test_nothing_makes_it_fit_where_there_is_no_room(found: Inspection) -> None:
    assert list(remedies(opened(), replace(found, quantize="int8", available_bytes=WORKER_BYTES))) == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "head"),
        ("model.layers.0.post_attention_layernorm.weight", "norms"),
        ("model.layers.0.self_attn.q_proj.bias", "attention"),
        ("model.layers.0.mlp.up_proj.weight", "mlp"),
        ("something", "other"),
    ],
)
def test_parts(name: str, part: str) -> None:
    assert part_of(name) == part


def test_a_cache_that_is_no_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert _cache_folder(tmp_path).writable and _cache_folder(tmp_path).used_bytes == 5
    assert _cache_folder(tmp_path / "none" / "yet").writable
    assert not _cache_folder(tmp_path / "file").writable
    assert not _cache_folder(tmp_path / "file" / "below").writable


def test_a_cache_where_this_user_may_not_look_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such is ~/.cache in a container that runs as another user than its home says."""
    locked, look = tmp_path / "locked", os.stat
    locked.mkdir()

    def refusing(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(locked / "cache"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != locked)
    found = _cache_folder(locked / "cache")
    assert not found.writable and found.used_bytes == 0
    with pytest.raises(UnsafeCache, match="cannot be read: Permission denied; set RELAXSERVE_CACHE to a folder of this user"):
        require_private(locked / "cache")
    monkeypatch.setenv("RELAXSERVE_CACHE", str(locked / "cache"))
    said = CliRunner().invoke(app, ["cache", "ls"], prog_name="relaxserve", env={"COLUMNS": "300"})
    assert said.exit_code == 2 and "cannot be read: Permission denied; set RELAXSERVE_CACHE to a folder" in said.output
    with pytest.raises(ExportError, match="cannot be made: Permission denied"), new_folder(locked / "cache"):
        pass


def test_a_context_beyond_the_model_s_is_refused_with_the_limit() -> None:
    """If max_context exceeds the model's limit, `inspect` refuses it with an error that names the limit. The value is not silently
    lowered."""
    with pytest.raises(LoadError, match="max_context is 1025; model has positions for 1024 tokens") as caught:
        inspect_model(msgspec.structs.replace(LOAD, max_context=1025))
    assert caught.value.code == "invalid_value"


def test_auto_is_what_the_family_serves_best() -> None:
    """Whisper's `auto` is a format of integers on CPUs. GPUs, and loads that name a format, keep theirs."""
    files = advance(begin(Load("speech", str(WHISPER))), Opened).files
    assert format_named(files.config, Load("speech", str(WHISPER))) == "int8-fast"
    assert format_named(files.config, Load("speech", str(WHISPER), device="cuda")) == "auto"
    assert format_named(files.config, Load("speech", str(WHISPER), "bf16")) == "bf16"
    assert format_named(opened().files.config, LOAD) == "auto"
