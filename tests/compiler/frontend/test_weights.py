"""Safetensors files, single or in shards: tensors are mapped without a copy, and every header is checked."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from compiler.frontend.errors import DamagedFile, ModelError, UnsafeFile
from compiler.frontend.weights import DTYPES, Renamed, open_safetensors
from tests.damage import damaged

RNG = np.random.default_rng(0)
TENSORS = {
    "a.weight": RNG.standard_normal((5, 7), np.float32),
    "a.bias": RNG.standard_normal(3).astype(ml_dtypes.bfloat16),
    "scalar": np.array(2.5, np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "ids": np.arange(6, dtype=np.int64).reshape(1, 2, 3),
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def shard(directory: Path, assignment: Mapping[str, str], **changes: str) -> None:
    for file in set(assignment.values()):
        save_file({name: TENSORS[name] for name, of in assignment.items() if of == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**assignment, **changes}}))


def test_reads_what_the_reference_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_safetensors(tmp_path)
    assert source.tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        info, read = source.tensors[name], source.read(name)
        assert (info.shape, info.dtype, info.num_bytes) == (expected.shape, expected.dtype, expected.nbytes)
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected)


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path / "model.safetensors")
    first, second = source.read("a.weight"), source.read("a.weight")
    assert np.shares_memory(first, second)
    assert not first.flags.writeable


@pytest.mark.parametrize("length", range(48, 56))
def test_a_header_of_any_length_gives_aligned_tensors(tmp_path: Path, length: int) -> None:
    """Tensors are aligned in memory whatever the length of the file's header. The format does not demand padding, but kernels need elements
    at multiples of their size."""
    data = np.arange(6, dtype=np.float32)
    header = json.dumps({"x": entry(0, 24, [2, 3])}).ljust(length + 20).encode()
    read = open_safetensors(write(tmp_path / "m.safetensors", header, data.tobytes())).read("x")
    assert read.flags.aligned and read.flags.c_contiguous
    np.testing.assert_array_equal(read, data.reshape(2, 3))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A model file that is no regular file is refused at once: opening a named pipe would block until somebody writes to it."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(DamagedFile, match="it is a FIFO, expected a regular file"):
        open_safetensors(tmp_path)


def test_released_pages_come_back(tmp_path: Path) -> None:
    big = np.arange(1 << 20, dtype=np.float32)
    save_file({"big": big}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    view = source.read("big")
    assert view.sum() == big.sum()
    source.release("big")
    np.testing.assert_array_equal(view, big)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_digest_leaves_no_page_of_the_file_in_memory(tmp_path: Path) -> None:
    save_file({"big": np.ones(1 << 20, np.float32)}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path / "model.safetensors")
    found = source.digest()
    mapped = Path("/proc/self/smaps").read_text().split(str(tmp_path / "model.safetensors"))[1]
    assert next(line for line in mapped.splitlines() if line.startswith("Rss:")).split()[1] == "0"
    assert source.digest() == found and source.read("big").all()


def test_every_dtype_has_the_width_of_its_name() -> None:
    for name, dtype in DTYPES.items():
        digits = "".join(c for c in name.removesuffix("_E4M3").removesuffix("_E5M2") if c.isdigit())
        assert dtype.itemsize * 8 == int(digits or 8)


def test_shards_are_one_source(tmp_path: Path) -> None:
    shard(tmp_path, {name: f"model-{i % 2}.safetensors" for i, name in enumerate(TENSORS)})
    source = open_safetensors(tmp_path)
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(source.read(name), expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a.bias": "../other.safetensors"}, DamagedFile, "same directory"),
        ({"a.bias": "gone.safetensors"}, ModelError, r"missing: gone\.safetensors"),
        ({"more": "one.safetensors"}, DamagedFile, "no shard holds: more"),
    ],
)
def test_an_index_must_match_its_shards(tmp_path: Path, changes: dict[str, str], error: type[Exception], message: str) -> None:
    shard(tmp_path, dict.fromkeys(TENSORS, "one.safetensors"), **changes)
    with pytest.raises(error, match=message):
        open_safetensors(tmp_path)


def test_a_whole_file_is_read_beside_an_index_without_its_shards(tmp_path: Path) -> None:
    """transformers removes the shards of an earlier save in the same folder, but not their index, and then reads model.safetensors."""
    shard(tmp_path, {name: f"model-{i % 2}.safetensors" for i, name in enumerate(TENSORS)})
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors\. Is the download complete\? If model\.safetensors has the newer weights"):
        open_safetensors(tmp_path)
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(DamagedFile, match=r"model\.safetensors is a Git LFS pointer"):
        open_safetensors(tmp_path)
    save_file({**TENSORS, "a.bias": TENSORS["a.bias"] + 1}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(open_safetensors(tmp_path).read("a.bias"), TENSORS["a.bias"] + 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"a.weight": TENSORS["a.weight"] + 1},
        {"a.bias": TENSORS["a.bias"].astype(np.float32)},
        {"scalar": np.array(2.0, np.float16), "more": TENSORS["ids"]},
    ],
)
def test_shards_and_a_whole_file_may_not_differ(changed: Mapping[str, Any], tmp_path: Path) -> None:
    """vLLM reads the shards, and transformers the whole file. Nothing says which of the two are the weights of an earlier save."""
    shard(tmp_path, {name: f"model-{i % 2}.safetensors" for i, name in enumerate(TENSORS)})
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert open_safetensors(tmp_path).tensors.keys() == TENSORS.keys()
    save_file({**TENSORS, **changed}, tmp_path / "model.safetensors")
    message = rf"different values or types of {next(iter(changed))}\. Load a copy of the folder without those that are out of date: model\."
    with pytest.raises(ModelError, match=message):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "whole",
    [
        POINTER,
        save({}),
        save({"other": TENSORS["ids"]}),
        save({"a.weight": np.zeros(0, np.float32), "a.bias": TENSORS["a.bias"] + 1}),
        save(TENSORS)[:-1],
    ],
    ids=["pointer", "empty", "other tensors", "other shapes", "cut off"],
)
def test_shards_are_read_beside_a_file_that_is_no_whole_model(whole: bytes, tmp_path: Path) -> None:
    """Trainers of transformers left a file without values, or with those of small tensors only, beside which DeepSpeed writes shards."""
    shard(tmp_path, {name: f"model-{i % 2}.safetensors" for i, name in enumerate(TENSORS)})
    (tmp_path / "model.safetensors").write_bytes(whole)
    source = open_safetensors(tmp_path)
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(source.read(name), expected)


def test_an_index_may_name_the_whole_file_among_others(tmp_path: Path) -> None:
    shard(tmp_path, {name: "model.safetensors" if name == "ids" else "other.safetensors" for name in TENSORS})
    assert open_safetensors(tmp_path).tensors.keys() == TENSORS.keys()


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    shard(tmp_path, {"a.bias": "one.safetensors", "ids": "two.safetensors"})
    save_file({"ids": TENSORS["ids"]}, tmp_path / "one.safetensors")
    with pytest.raises(DamagedFile, match=r"'ids' is in both one\.safetensors and two\.safetensors"):
        open_safetensors(tmp_path)


def test_what_a_directory_holds_decides(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        open_safetensors(tmp_path / "gone")
    with pytest.raises(ModelError, match="has no weights"):
        open_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsafeFile, match=r"pytorch_model\.bin.*save_pretrained"):
        open_safetensors(tmp_path)
    with pytest.raises(UnsafeFile, match=r"model\.pth"):
        open_safetensors(tmp_path / "model.pth")
    save_file(TENSORS, tmp_path / "other.safetensors")
    assert open_safetensors(tmp_path).tensors.keys() == TENSORS.keys()
    save_file(TENSORS, tmp_path / "another.safetensors")
    with pytest.raises(ModelError, match=r"another\.safetensors, other\.safetensors"):
        open_safetensors(tmp_path)


def test_digest_follows_content_and_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    first = open_safetensors(path).digest()
    assert open_safetensors(tmp_path).digest() == first
    status, content = path.stat(), bytearray(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert open_safetensors(path).digest() != first
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_safetensors(path).digest() != first


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "expected an object"),
        (b"[" * 100_000, b"", "not JSON"),
        (b'{"a": 1}', b"", "expected an object of dtype"),
        (b'{"a":1,"b":2,"a":3}', b"1234", "more than one entry 'a'"),
        ({"a": entry(0, 4, [1], "F31")}, b"1234", "'F31' is none of F64, F32"),
        ({"a": entry(0, 4, [2])}, b"1234", "do not span the 8 bytes"),
        ({"a": entry(0, 4, [-1])}, b"1234", "non-negative"),
        ({"a": entry(0, 4, [True])}, b"1234", "non-negative"),
        ({"a": entry(0, 4, [1.0])}, b"1234", "non-negative"),
        ({"a": entry(0, 4, [1] * 9)}, b"1234", "9 dimensions"),
        ({"a": entry(0, 0, [0, 1 << 62, 1 << 62, 1 << 62])}, b"1234", "describes 0"),
        ({"a": entry(4, 0, [1])}, b"1234", "do not span"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, b"1234", "overlaps"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"123412341234", "leaves a gap"),
        ({"a": entry(0, 4, [1])}, b"12345678", "holds 8 bytes of data; its header describes 4"),
        ({"a": entry(0, 1 << 40, [1 << 38])}, b"1234", "Is the download complete"),
    ],
)  # fmt: skip
def test_hostile_headers_are_refused(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(DamagedFile, match=message):
        open_safetensors(write(tmp_path / "model.safetensors", header, data))


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", (1 << 63).to_bytes(8, "little") + b"{}", (17 << 20).to_bytes(8, "little") + b" " * (18 << 20)],
    ids=["empty", "cut off", "longer than any file", "longer than is allowed"],
)
def test_announced_lengths_are_limited(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        open_safetensors(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_reads_within_its_bounds(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    content = damaged(path.read_bytes(), data)
    path.unlink()  # do not overwrite the file: the previous example may still map it
    path.write_bytes(content)
    try:
        source = open_safetensors(path)
    except DamagedFile:
        return
    assert sum(source.read(name).nbytes for name in source.tensors) <= len(content)


def test_tensors_with_other_names_are_the_same(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    found = Renamed(source, {"a.": "b.", "b.b": "b.c"})
    assert found.tensors.keys() == {"b.weight", "b.cias", "scalar", "empty", "ids"}
    np.testing.assert_array_equal(found.read("b.weight"), TENSORS["a.weight"])
    found.release("b.weight")
    assert found.digest() == source.digest()
    with pytest.raises(DamagedFile, match="are the same parameter"):
        Renamed(source, {"a.bias": "a.weight"})
