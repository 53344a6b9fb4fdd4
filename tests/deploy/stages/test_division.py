"""The layers of a model, and the memory of machines, are divided among stages."""

from __future__ import annotations

import msgspec
import pytest

from deploy import demo
from deploy.model_loading.files import ModelFiles, open_files
from deploy.model_loading.plan import WORKER_BYTES
from deploy.stages.division import loads_of_stages
from server.messages import LOCAL, Load

LOAD = Load("demo", str(demo.MODEL), hub_token="token", stage_secret="secret", reserved_bytes=5, kv_share=0.5)
GIB = 1 << 30


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_files(demo.MODEL)


def layers_of(loads: list[Load]) -> list[tuple[int, int] | None]:
    return [load.layers for load in loads]


def test_every_layer_has_one_stage(files: ModelFiles) -> None:
    for num_stages in (2, 3, 5):
        ends = layers_of(loads_of_stages(LOAD, files, [LOCAL] * num_stages, {LOCAL: 8 * GIB}))
        assert [layer for begin, end in ends for layer in range(begin, end)] == list(range(files.config.num_layers))


def test_only_the_last_stage_has_the_head(files: ModelFiles) -> None:
    loads = loads_of_stages(LOAD, files, ["a", "b", LOCAL], {"a": GIB, "b": GIB, LOCAL: GIB})
    assert [load.is_early for load in loads] == [True, True, False]


def test_a_server_without_layers_has_the_head(files: ModelFiles) -> None:
    load = msgspec.structs.replace(LOAD, stages=("a", "b", "head"), kv_cache_bytes=50 << 20)
    loads = loads_of_stages(load, files, ["a", "b", LOCAL], {"a": 8 * GIB, "b": 8 * GIB, LOCAL: 4 * GIB})
    first, second, last = layers_of(loads)
    assert first is not None and second is not None and first[1] == second[0] and 0 < first[1] < 5
    assert (first[0], second[1], last) == (0, 5, (5, 5))
    assert loads[-1].memory_limit_bytes == 4 * GIB - WORKER_BYTES and loads[-1].kv_cache_bytes == 0
    again = msgspec.structs.replace(load, cuts=(first[1], 5))
    assert layers_of(loads_of_stages(again, files, ["a", "b", LOCAL], {"a": 1, "b": GIB, LOCAL: GIB})) == [first, second, last]


def test_a_machine_with_little_memory_gets_few_layers(files: ModelFiles) -> None:
    machines, much = ["small", LOCAL], 64 * GIB
    assert layers_of(loads_of_stages(LOAD, files, machines, {"small": WORKER_BYTES + GIB, LOCAL: much}))[0] == (0, 1)
    assert layers_of(loads_of_stages(LOAD, files, machines, {"small": much, LOCAL: WORKER_BYTES + GIB}))[1] == (4, 5)


def test_stages_of_one_machine_share_its_memory(files: ModelFiles) -> None:
    loads = loads_of_stages(LOAD, files, ["a", "a", LOCAL], {"a": 8 * GIB, LOCAL: 4 * GIB})
    limits = [load.memory_limit_bytes or 0 for load in loads]
    assert limits[2] == 4 * GIB - WORKER_BYTES
    assert limits[0] > 0 and limits[1] > 0 and 8 * GIB - 2 * WORKER_BYTES - 2 <= limits[0] + limits[1] <= 8 * GIB - 2 * WORKER_BYTES
    limited = msgspec.structs.replace(LOAD, memory_limit_bytes=GIB)
    assert sum(load.memory_limit_bytes or 0 for load in loads_of_stages(limited, files, [LOCAL] * 2, {LOCAL: 8 * GIB})) in (GIB, GIB - 1)


def test_other_machines_get_no_secrets_of_this_one(files: ModelFiles) -> None:
    other, own = loads_of_stages(LOAD, files, ["a", LOCAL], {"a": GIB, LOCAL: GIB})
    assert (other.hub_token, other.stage_secret, other.stages) == (None, "", ())
    assert (other.reserved_bytes, other.kv_share) == (0, 1.0) and (own.reserved_bytes, own.kv_share) == (5, 0.5)


def test_given_cuts_are_kept(files: ModelFiles) -> None:
    """A worker that replaces another one has the same stages, so that their programs are in the cache, however much memory is free now."""
    load = msgspec.structs.replace(LOAD, cuts=(1, 4))
    assert layers_of(loads_of_stages(load, files, ["a", "b", LOCAL], {"a": 1, "b": GIB, LOCAL: GIB})) == [(0, 1), (1, 4), (4, 5)]


def test_bytes_of_the_cache_are_divided_by_layers(files: ModelFiles) -> None:
    load = msgspec.structs.replace(LOAD, cuts=(2,), kv_cache_bytes=50 << 20)
    assert [load.kv_cache_bytes for load in loads_of_stages(load, files, [LOCAL, LOCAL], {LOCAL: GIB})] == [20 << 20, 30 << 20]
    share = msgspec.structs.replace(LOAD, kv_cache_bytes=0.5)
    assert [load.kv_cache_bytes for load in loads_of_stages(share, files, [LOCAL, LOCAL], {LOCAL: GIB})] == [0.5, 0.5]
