"""GGUF files: the container, the formats of blocks, and models, which must equal the same models in the format of the Hugging Face hub. The
`gguf` package writes the files."""

import json
import math
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from gguf.constants import GGML_QUANT_SIZES, ExpertGatingFuncType, GGMLQuantizationType, PoolingType, TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from compiler.frontend.config import BranchFactors, LayerInputs, ModelConfig, QueryGrowth
from compiler.frontend.errors import ConfigError, DamagedFile, ModelError, UnknownModel
from compiler.frontend.families import llama4
from compiler.frontend.families.phimoe import MSCALE
from compiler.frontend.finite import Checked
from compiler.frontend.gguf.dequantize import FORMATS, dequantize
from compiler.frontend.gguf.file import OTHER_FORMATS, GgufFile, Texts
from compiler.frontend.gguf.model import GgufModel
from compiler.frontend.gguf.tokenizer import end_ids, tokenizer_files
from compiler.frontend.mixture import ClippedGate
from compiler.frontend.quantized.held import HeldWeights, Offset, form_of_blocks, forms_of
from compiler.frontend.registry import GGUF_FAMILIES, decoder_family, load_config
from compiler.frontend.rope import LongScaling, Rope
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.blocks import BLOCKS, NUMBERS, Blocks
from compiler.ir.coded_blocks import CODED_BLOCKS, CodedBlocks
from compiler.ops.tables import INTERPRET
from deploy.model_loading.files import open_files
from server.text.tokenizer import Tokenizer
from tests.damage import damaged
from tests.deploy.gguf_files import write_random
from tests.golden.gguf_blocks import random_blocks
from tests.golden.gguf_models import (
    MODELS,
    OLDER,
    convert,
    decoder_tensors,
    decoder_values,
    halved,
    with_padded_inputs,
    with_tiled_heads,
    write,
)

RNG = np.random.default_rng(0)


# --- block formats ----------------------------------------------------------------------------------------------------------


def test_formats_have_the_numbers_and_sizes_of_the_reference() -> None:
    for code, format in FORMATS.items():
        kind = GGMLQuantizationType(code)
        assert (kind.name, GGML_QUANT_SIZES[kind]) == (format.name, (format.block_values, format.block_bytes))


def test_every_format_of_the_reference_has_a_name() -> None:
    names = {code: format.name for code, format in FORMATS.items()} | OTHER_FORMATS
    assert {kind.value: kind.name for kind in GGMLQuantizationType}.items() <= names.items()


QUANTIZED = [format for format in FORMATS.values() if format.blocks is not None]


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda format: format.name)
@pytest.mark.parametrize("num_blocks", [0, 1, 5000])
def test_blocks_unpack_as_the_reference_does(format: Any, num_blocks: int) -> None:
    blocks = random_blocks(format, num_blocks, RNG)
    expected = gguf.quants.dequantize(blocks.reshape(1, -1), GGMLQuantizationType[format.name]) if num_blocks else np.zeros((1, 0))
    np.testing.assert_array_equal(dequantize(blocks, format.blocks), expected[0])
    np.testing.assert_array_equal(_decoded(blocks.reshape(1, -1), format.blocks), expected)


@pytest.mark.parametrize("name", CODED_BLOCKS)
def test_matrices_of_codes_are_read_by_parts_and_must_be_finite(tmp_path: Path, name: str) -> None:
    """Rows that the model reorders keep their codes together with their scales. A float that is no number is refused."""
    kind = GGMLQuantizationType[name.upper()]
    write_random(tmp_path / "m.gguf", kind)
    model, query = GgufModel(tmp_path / "m.gguf"), "model.layers.0.self_attn.q_proj.weight"
    form, parts = model.forms[query], model.parts(query)
    assert form == form_of_blocks(CODED_BLOCKS[name]) == forms_of(HeldWeights(model).tensors)[query]
    numbers = INTERPRET["dequantize"](parts[form.numbers[0]], np.ones((256, 1), np.float32), bits=4, kind=form.kind, **PLAIN)
    scales = parts["scale"].astype(np.float32) * np.repeat(parts["scale_unit"], form.per_unit, 1) if form.per_unit else parts["scale"]
    np.testing.assert_array_equal(numbers * np.repeat(scales.astype(np.float32), form.group, 1), model.read(query))
    stored = model.file.tensors["blk.0.attn_q.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[stored.start : stored.start + stored.num_bytes] = b"\xff" * stored.num_bytes
    (tmp_path / "m.gguf").write_bytes(data)
    checked = Checked(HeldWeights(GgufModel(tmp_path / "m.gguf")))
    with pytest.raises(DamagedFile, match=rf"{query}.* has values that are not finite numbers"):
        for part in form.parts:
            checked.read(f"{query}.{part}")


PLAIN = {"group": 0, "shifted": False, "dtype": "f32"}


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (11, 4.625),
        (12, 4.75),
        (14, 8.625),
        (16, 4.375),
        (17, 4.625),
        (18, 4.375),
        (19, 4.375),
        (21, 4.375),
        (22, 4.625),
        (23, 4.375),
        (29, 4.625),
        (34, 4.0625),
        (35, 4.0625),
    ],
    ids=lambda value: FORMATS[value].name if isinstance(value, int) else str(value),
)
def test_bytes_that_a_format_takes_in_memory(number: int, bits: float) -> None:
    blocks = FORMATS[number].blocks
    assert blocks is not None
    assert sum(info.num_bytes for info in form_of_blocks(blocks).unpacked_infos((1, 256)).values()) * 8 / 256 == bits


def _decoded(blocks: Any, format: Blocks | CodedBlocks) -> Any:
    """Return the values [rows, length] that a program computes from rows of blocks."""
    form, length = form_of_blocks(format), blocks.shape[-1] // format.num_bytes * format.num_values
    if isinstance(format, CodedBlocks):
        parts = dict(zip(form.parts, format.parts(blocks), strict=True))
    else:
        stored = {form.numbers[0]: NUMBERS} | {part: part for part in (*form.numbers[1:], *form.units)}
        parts = {name: INTERPRET["unpack_blocks"](blocks, format=form.blocks, part=part) for name, part in stored.items()}
    infos = form.unpacked_infos((len(blocks), length))
    assert {name: (part.shape, part.dtype) for name, part in parts.items()} == {n: (info.shape, info.dtype) for n, info in infos.items()}
    numbers, *levels = (parts[part] for part in form.numbers)
    if form.per_unit:
        attrs = {"bits": 8, "group": form.per_unit, "shifted": False, "dtype": "f32", "kind": "int"}
        levels = [INTERPRET["dequantize"](level, parts[unit], **attrs) for level, unit in zip(levels, form.units, strict=True)]
    attrs = {"bits": form.bits, "group": form.group, "shifted": form.offset is Offset.SHIFT, "dtype": "f32", "kind": form.kind}
    return INTERPRET["dequantize"](numbers, *levels, **attrs)


# --- the container format ---------------------------------------------------------------------------------------------------


TENSORS = {
    "a": RNG.standard_normal((3, 32), np.float32),
    "b": RNG.standard_normal((2, 3, 5)).astype(np.float16),
    "c": np.array([1.5], np.float32),
}
QUANTIZED_SOURCE = RNG.standard_normal((4, 64), np.float32)


def fill(writer: gguf.GGUFWriter) -> None:
    writer.add_uint32("number", 7)
    writer.add_float64("real", 2.5)
    writer.add_bool("truth", True)
    writer.add_string("text", "Grüße")
    writer.add_array("texts", ["a", "", "世"])
    writer.add_array("numbers", [1, -2, 3])
    for name, tensor in TENSORS.items():
        writer.add_tensor(name, tensor)
    writer.add_tensor("q", gguf.quants.quantize(QUANTIZED_SOURCE, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    bf16 = TENSORS["a"].astype(ml_dtypes.bfloat16).view(np.uint8)
    writer.add_tensor("h", bf16, raw_dtype=GGMLQuantizationType.BF16)


def test_reads_what_the_reference_wrote(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "m.gguf", fill))
    metadata = file.metadata
    assert (metadata["number"], metadata["real"], metadata["truth"], metadata["text"]) == (7, 2.5, True, "Grüße")
    assert list(metadata["texts"]) == ["a", "", "世"]
    assert list(metadata["numbers"]) == [1, -2, 3]
    for name, expected in TENSORS.items():
        read = file.read(name)
        assert read.dtype == expected.dtype
        assert np.shares_memory(read, file.read(name))
        np.testing.assert_array_equal(read, expected)
    np.testing.assert_array_equal(file.read("h"), TENSORS["a"].astype(ml_dtypes.bfloat16))
    assert file.read("q").shape == (4, 64)
    np.testing.assert_allclose(file.read("q"), QUANTIZED_SOURCE, atol=0.02)
    file.release("a")
    np.testing.assert_array_equal(file.read("a"), TENSORS["a"])


def split_model(folder: Path, count: int) -> list[Path]:
    """Write a file with `TENSORS` and return its parts."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=-(-(len(TENSORS) + 2) // count))
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def test_a_split_file_is_read_as_a_whole(tmp_path: Path) -> None:
    """Any part may be named. The first one has the metadata, and each has some of the tensors."""
    whole, parts = GgufFile(write(tmp_path / "whole.gguf", fill)), split_model(tmp_path, 2)
    assert [path.name for path in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for path in parts:
        file = GgufFile(path)
        assert file.path == parts[0] and file.metadata["text"] == "Grüße" and file.tensors.keys() == whole.tensors.keys()
        for name in whole.tensors:
            np.testing.assert_array_equal(file.read(name), whole.read(name))
            file.release(name)
        np.testing.assert_array_equal(file.blocks("q"), whole.blocks("q"))
    first = GgufFile(parts[0]).digest()
    os.utime(parts[1], ns=(1, 1))
    assert GgufFile(parts[0]).digest() != first


def test_a_split_file_with_wrong_parts_is_refused(tmp_path: Path) -> None:
    parts = split_model(tmp_path, 2)
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"parts of m-00001-of-00002\.gguf are missing: m-00002-of-00002\.gguf\. Is the download complete"):
        GgufFile(parts[0])
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(DamagedFile, match=r"split\.no 0 and split\.count 2, expected 1 and 2"):
        GgufFile(parts[0])
    (lonely := tmp_path / "renamed.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"renamed\.gguf is one of 2 parts; expected a name"):
        GgufFile(lonely)


def test_digest_follows_the_content(tmp_path: Path) -> None:
    first = GgufFile(write(tmp_path / "m.gguf", fill)).digest()
    assert GgufFile(tmp_path / "m.gguf").digest() == first
    write(tmp_path / "m.gguf", lambda writer: (fill(writer), writer.add_uint32("more", 1)))
    assert GgufFile(tmp_path / "m.gguf").digest() != first


def header(version: int = 3, num_tensors: int = 0, num_entries: int = 0) -> bytes:
    return b"GGUF" + version.to_bytes(4, "little") + num_tensors.to_bytes(8, "little") + num_entries.to_bytes(8, "little")


def text(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, "little")


def described(name: str, shape: list[int], code: int, offset: int) -> bytes:
    return text(name) + number(len(shape)) + b"".join(number(n, 8) for n in shape) + number(code) + number(offset, 8)


def entry(name: str, code: int, value: bytes) -> bytes:
    return text(name) + number(code) + value


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", DamagedFile, "is empty"),
        (b"GGU", DamagedFile, "is a text of 3 bytes that begins with .GGU.; download the file again"),
        (b"PK\x03\x04" + bytes(40), DamagedFile, "begins with"),
        (header(1), ModelError, "has version 1"),
        (header(3 << 24), ModelError, "big-endian"),
        (header(num_tensors=1 << 60), DamagedFile, "announces"),
        (header(num_entries=1 << 60), DamagedFile, "announces"),
        (header(num_entries=1) + number(1 << 62, 8), DamagedFile, "announces \\d+ bytes at byte"),
        (header(num_entries=1) + entry("k", 13, b""), DamagedFile, "type 13"),
        (header(num_entries=1) + entry("k", 7, b"\2"), DamagedFile, "boolean is 2"),
        (header(num_entries=1) + entry("k", 9, number(9) + number(1, 8)), DamagedFile, "items of type 9"),
        (header(num_entries=1) + entry("k", 9, number(8) + number(1 << 40, 8)), DamagedFile, "texts; at most"),
        (header(num_entries=1) + entry("k", 9, number(12) + number(1 << 61, 8)), DamagedFile, "announces \\d+ bytes at byte"),
        (header(num_entries=1) + entry("k", 9, number(8) + number(2, 8) + number(0, 8)), DamagedFile, "announces 8 bytes at byte"),
        (
            header(num_entries=1) + entry("k", 9, number(8) + number(2, 8) + number(0, 8) + number(1 << 61, 8)),
            DamagedFile,
            f"announces {1 << 61} bytes at byte",
        ),
        (header(num_entries=2) + entry("k", 0, b"\1") * 2, DamagedFile, "more than one entry 'k'"),
        (header(num_entries=1) + entry("general.alignment", 4, number(24)), DamagedFile, "a power of two"),
        (header(num_entries=1) + entry("split.count", 2, number(3, 2)), ModelError, r"one of 3 parts; .* NAME-00001-of-00003\.gguf"),
        (header(num_tensors=1) + described("t", [1] * 5, 0, 0), DamagedFile, "5 dimensions"),
        (header(num_tensors=1) + described("t", [1], 40, 0), ModelError, r"format NVFP4 is not read; known are F32.* such as Q4_K_M"),
        (header(num_tensors=1) + described("t", [1], 99, 0), ModelError, r"format 99 is not read; known are F32.*, or a newer version of"),
        (header(num_tensors=1) + described("t", [33], 2, 0), DamagedFile, "expected a multiple of 32"),
        (header(num_tensors=1) + described("t", [1], 0, 4), DamagedFile, "not a multiple of 32"),
        (header(num_tensors=1) + described("t", [1 << 62, 1 << 62], 0, 0), DamagedFile, "ends at byte"),
        (header(num_tensors=1) + described("t", [32], 0, 1 << 62), DamagedFile, "ends at byte"),
        (header(num_tensors=2) + described("t", [1], 0, 0) * 2 + bytes(64), DamagedFile, "more than one tensor"),
        (header(num_tensors=2) + described("t", [9], 0, 0) + described("u", [1], 0, 32) + bytes(99), DamagedFile, "inside the previous"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(tmp_path: Path, content: bytes, error: type[Exception], message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        GgufFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_reads_within_its_bounds(tmp_path: Path, data: st.DataObject) -> None:
    original = tmp_path / "original.gguf"
    if not original.exists():
        write(original, fill)
    path = tmp_path / "m.gguf"
    path.unlink(missing_ok=True)
    content = damaged(original.read_bytes(), data)
    path.write_bytes(content)
    try:
        file = GgufFile(path)
    except ModelError:
        return
    with np.errstate(all="ignore"):  # a damaged scale may be infinite
        for name, tensor in file.tensors.items():
            assert tensor.start + tensor.num_bytes <= len(content)
            assert file.read(name).shape == tensor.shape


# --- models from GGUF files -------------------------------------------------------------------------------------------------

OWN_NAMES = {
    "arcee": ("arcee",),
    "chatglm": ("glm",),
    "cohere2": ("cohere2",),
    "command-r": ("cohere", "cohere-head-norms"),
    "deepseek2": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    "dots1": ("dots1",),
    "ernie4_5": ("ernie4_5",),
    "exaone": ("exaone",),
    "exaone4": ("exaone4",),
    "falcon-h1": ("falcon_h1", "falcon_h1-plain"),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3",),
    "gemma3n": ("gemma3n",),
    "gemma4": ("gemma4", "gemma4-experts", "gemma4_unified"),
    "glm4": ("glm4",),
    "glm4moe": ("glm4_moe",),
    "gpt-oss": ("gpt_oss",),
    "granite": ("granite",),
    "granitehybrid": ("granitemoehybrid", "granitemoehybrid-dense"),
    "granitemoe": ("granitemoe",),
    "hunyuan-dense": ("hunyuan_v1_dense",),
    "internlm2": ("internlm2",),
    "lfm2": ("lfm2",),
    "lfm2moe": ("lfm2_moe",),
    "llama": ("llama", "llama-bias-tied", "mistral-wide-heads", "mixtral"),
    "llama4": ("llama4-text",),
    "minicpm": ("minicpm",),
    "minimax-m2": ("minimax_m2",),
    "mistral3": ("ministral3", "mistral3"),
    "nemotron": ("nemotron",),
    "nemotron_h": (),  # read as nemotron_h_moe is
    "nemotron_h_moe": ("nemotron_h",),
    "olmo2": ("olmo2", "olmo3"),
    "olmoe": ("olmoe",),
    "phi2": ("phi",),
    "phi3": ("phi3", "phi3-longrope"),
    "phimoe": ("phimoe",),
    "qwen2": ("qwen2",),
    "qwen2vl": ("qwen2_5_vl",),
    "qwen3": ("qwen3",),
    "qwen35": ("qwen3_5",),
    "qwen35moe": ("qwen3_5_moe",),
    "qwen3moe": ("qwen3_moe",),
    "qwen3next": ("qwen3_next",),
    "qwen3vl": ("qwen3_vl",),
    "qwen3vlmoe": ("qwen3_vl_moe",),
    "seed_oss": ("seed_oss",),
    "smollm3": ("smollm3",),
    "stablelm": ("stablelm", "stablelm-parallel"),
    "starcoder2": ("starcoder2",),
}
CASES = [(arch, case) for arch, cases in OWN_NAMES.items() for case in cases]
GPT_OSS = load_config(MODELS / "gpt_oss").mixture
assert GPT_OSS is not None
HYBRIDS = {case: load_config(MODELS / case).recurrence for case in ("qwen3_5", "qwen3_5_moe")}
# Models that the program reads as the converter arranges them: the tensors differ from those of the hub, the logits do not.
APART = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "granitemoehybrid", "granitemoehybrid-dense", "internlm2", "qwen3_next")
MULTIPLIED = {case: load_config(MODELS / case).recurrence for case in ("falcon_h1", "falcon_h1-plain")}
PHI_MOE = load_config(MODELS / "phimoe")
assert PHI_MOE.mixture is not None and PHI_MOE.rope is not None and isinstance(PHI_MOE.rope.scaling, LongScaling)
LFM2_MOE = load_config(MODELS / "lfm2_moe").mixture
assert LFM2_MOE is not None
ONES = {"attention_scale": 16**-0.5, "embedding_scale": 1.0, "logit_scale": 1.0, "factors": BranchFactors(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)}
# model -> fields that converters to GGUF drop or change, with the values that the GGUF reader returns instead.
LOST: dict[str, dict[str, Any]] = {
    # GGUF does not store the attention scale. The reader derives the scale from the head size, which is right for all Gemma 2 models except
    # the largest.
    "gemma2": {"attention_scale": 16**-0.5},
    "gemma3": {"attention_scale": 16**-0.5},
    # GGUF does not store windows. All layers of the published models are before the first layer with a window.
    "dots1": {"windows": (None,) * 3},
    "gemma3n": {"layer_inputs": LayerInputs(8, 96)},
    "glm": {"norm_eps": 1e-5, "max_context": 32},
    # GGUF stores neither `alpha` nor `limit`. The reader uses the values of all gpt-oss models published so far.
    "gpt_oss": {"mixture": replace(GPT_OSS, clipped=ClippedGate(alpha=1.702, limit=7.0))},
    "hunyuan_v1_dense": {"max_context": 1 << 18},
    # GGUF stores neither the noise of the router nor the factors of rotations. The reader uses those of all published models.
    "phimoe": {
        "mixture": replace(PHI_MOE.mixture, sparse_limit=0.02),
        "rope": replace(PHI_MOE.rope, scaling=replace(PHI_MOE.rope.scaling, attention_factors=(MSCALE, MSCALE))),
    },
    "starcoder2": {"windows": (None, None)},
    # GGUF does not store the factor of the experts' output. It is 1 in all published models.
    "lfm2_moe": {"mixture": replace(LFM2_MOE, scale=1.0)},
    # GGUF stores neither which layers rotate and have chunks, nor norms and growth of queries. The reader uses what the published models
    # have.
    "llama4-text": {
        "windows": (8192,) * 3,
        "unrotated": frozenset(),
        "head_norms": True,
        "query_growth": QueryGrowth(0.1, 8192, ahead=1),
    },
    **{case: {"apart": True} for case in APART},
    # Converters multiply the weights by the factors.
    **{
        case: {**ONES, "recurrence": replace(found, factors=(1.0,) * 5, gated_behind_norm=False)}
        for case, found in MULTIPLIED.items()
        if found is not None
    },
    **{case: {"recurrence": replace(found, tiled=True)} for case, found in HYBRIDS.items() if found is not None},
}
ROPES = ("rope", "local_rope")


def test_every_architecture_has_a_golden_model() -> None:
    assert OWN_NAMES.keys() == GGUF_FAMILIES.keys()


@pytest.mark.parametrize(("arch", "case"), CASES, ids=[case for _, case in CASES])
def test_a_converted_model_is_the_one_of_the_hub(tmp_path: Path, arch: str, case: str) -> None:
    model = GgufModel(convert(case, arch, tmp_path / "m.gguf"))
    tensors = {name.replace("backbone.", "model."): tensor for name, tensor in decoder_tensors(case).items()}
    if case == "gemma3n":
        tensors = with_padded_inputs(tensors, decoder_values(case))
    if case not in (*APART, *MULTIPLIED):
        require_tensors(model, with_tiled_heads(tensors, decoder_values(case)) if case in HYBRIDS else tensors)
    expected = replace(load_config(MODELS / case), **LOST.get(case, {}))
    for name in (field.name for field in fields(ModelConfig) if field.name not in ("family", *ROPES)):
        mine, theirs = getattr(model.config, name), getattr(expected, name)
        assert mine == (pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs), name
    assert decoder_family(model.config.family).layer is decoder_family(expected.family).layer
    for name in ROPES:
        require_rope(getattr(model.config, name), getattr(expected, name))


@pytest.mark.parametrize(("arch", "case"), [("deepseek2", "deepseek_v2"), ("qwen3next", "qwen3_next")])
def test_stacked_projections_of_older_converters_are_read(tmp_path: Path, arch: str, case: str) -> None:
    model, expected = GgufModel(convert(case, arch, tmp_path / "m.gguf", converters=OLDER)), load_config(MODELS / case)
    require_tensors(model, decoder_tensors(case))
    assert (model.config.apart, model.config.recurrence, model.config.latent) == (False, expected.recurrence, expected.latent)


def test_older_files_of_minicpm_have_the_factors_of_all_published_models(tmp_path: Path) -> None:
    config = GgufModel(convert("minicpm", "minicpm", tmp_path / "m.gguf", converters=OLDER)).config
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 1.4 / 2**0.5, 8.0)


def test_keys_of_layers_that_read_those_of_others_are_left_out(tmp_path: Path) -> None:
    """Files of Gemma 4 also have key projections for layers that read the keys of earlier layers. The reader leaves these projections
    out."""
    path = convert("gemma4", "gemma4", tmp_path / "m.gguf", lambda w: w.add_tensor("blk.5.attn_k.weight", np.ones((16, 32), np.float32)))
    require_tensors(GgufModel(path), decoder_tensors("gemma4"))


@pytest.mark.parametrize(("arch", "case"), [pair for pair in CASES if pair[1] in (*HYBRIDS, *APART, *MULTIPLIED)])
def test_a_converted_hybrid_has_the_logits_of_the_hub_s(tmp_path: Path, arch: str, case: str, interpreted_from: Callable[..., Any]) -> None:
    """Converters reorder value heads, so the program pairs them with key heads in another way. They also split projections, and multiply
    weights by factors. Layers that predict further tokens are not read."""

    def predicting(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_tensor(f"blk.{load_config(MODELS / case).num_layers}.nextn.eh_proj.weight", np.ones((4, 4), np.float32))

    model = GgufModel(convert(case, arch, tmp_path / "m.gguf", predicting, num_ahead=1))
    golden = np.load(MODELS / case / "golden.npz")
    logits = interpreted_from(model.config, model).feed({"a": golden["prompt"]})["a"]
    assert np.abs(logits - golden["logits"]).max() < 2e-4 * np.abs(golden["logits"]).max()


@pytest.mark.parametrize(("arch", "case"), [pair for pair in CASES if pair[1] in (*APART, "gemma3n", "nemotron_h")])
def test_a_program_that_holds_integers_has_the_same_logits(
    tmp_path: Path, arch: str, case: str, interpreted_from: Callable[..., Any]
) -> None:
    model = GgufModel(convert(case, arch, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0))
    prompt = np.load(MODELS / case / "golden.npz")["prompt"]
    held, floats = (interpreted_from(model.config, source).feed({"a": prompt})["a"] for source in (HeldWeights(model), model))
    np.testing.assert_array_equal(held, floats)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "IQ4_NL"])
@pytest.mark.parametrize("stacks_qkv", [False, True])
def test_a_program_holds_the_integers_of_a_model(tmp_path: Path, kind: str, stacks_qkv: bool) -> None:
    """The program gets the quantised integers of the file unchanged, even if the converter permuted a matrix's rows."""
    arch, case = ("phi3", "phi3") if stacks_qkv else ("llama", "llama")
    model = GgufModel(convert(case, arch, tmp_path / "m.gguf", stacks_qkv=stacks_qkv, kind=GGMLQuantizationType[kind]))
    held = HeldWeights(model)
    shapes = {name: info.shape for name, info in model.tensors.items()}
    matrices = {name for name, shape in shapes.items() if len(shape) == 2 and shape[-1] % 32 == 0}
    assert matrices and model.forms.keys() == matrices and forms_of(held.tensors) == model.forms
    for name, form in model.forms.items():
        np.testing.assert_array_equal(_decoded(held.read(f"{name}.{form.blocks}"), BLOCKS[form.blocks]), model.read(name))


def test_maverick_has_no_norms_of_queries(tmp_path: Path) -> None:
    for count, has_norms in ((16, True), (128, False)):
        config = {"num_local_experts": count}
        llama4.complete(config, {}, ())
        assert config["use_qk_norm"] is has_norms
    path = convert("llama4-text", "llama4", tmp_path / "m.gguf", lambda writer: writer.add_sliding_window(0))
    with pytest.raises(ConfigError, match=r"attention\.sliding_window of .* is 0, expected chunks"):
        GgufModel(path)


def require_tensors(model: GgufModel, expected: dict[str, np.ndarray]) -> None:
    assert model.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert model.tensors[name].shape == tensor.shape
        assert model.tensors[name].num_bytes == tensor.nbytes
        assert model.read(name).dtype == model.tensors[name].dtype
        np.testing.assert_allclose(model.read(name), tensor, atol=1e-6)


def test_a_decoder_whose_attention_is_not_causal_is_read(tmp_path: Path) -> None:
    path = convert("qwen2-both-ways", "qwen2", tmp_path / "m.gguf", lambda writer: writer.add_causal_attention(False))
    model, hub = GgufModel(path), load_config(MODELS / "qwen2-both-ways")
    assert model.config.family == hub.family and not model.config.is_causal
    assert replace(model.config, norm_eps=hub.norm_eps, embedding=hub.embedding, tie_word_embeddings=False) == hub
    require_tensors(model, decoder_tensors("qwen2-both-ways"))


def require_rope(found: Rope | None, expected: Rope | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert (found.size, found.interleaved) == (expected.size, expected.interleaved)
    for context in (32, 256):
        for mine, theirs in zip(found.frequencies(context), expected.frequencies(context), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize(("arch", "case"), [("chatglm", "glm"), ("phi2", "phi")])
def test_stacked_queries_keys_and_values_are_split(tmp_path: Path, arch: str, case: str) -> None:
    model = GgufModel(convert(case, arch, tmp_path / "m.gguf", stacks_qkv=True))
    assert "blk.0.attn_qkv.weight" in model.file.tensors
    assert model.config.qkv_bias
    require_tensors(model, decoder_tensors(case))
    model.release("model.layers.0.self_attn.k_proj.weight")
    require_tensors(model, decoder_tensors(case))


def test_rows_of_a_model_with_sections_of_its_rope_are_put_back(tmp_path: Path) -> None:
    tensors, path = decoder_tensors("glm4"), convert("glm4", "glm4", tmp_path / "m.gguf")
    plain = GgufModel(path)
    kept = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}

    def fill(writer: gguf.GGUFWriter) -> None:
        for key, value in plain.file.metadata.items():
            if key.startswith("glm4."):
                writer.add_key_value(key, value, gguf_type(value))
        writer.add_rope_dimension_sections([2, 1, 1, 0])
        for name, tensor in kept.items():
            rotated = ".attn_q." in name or ".attn_k." in name
            writer.add_tensor(name, halved(tensor, 2 if ".attn_q." in name else 1, 8) if rotated else tensor)

    model = GgufModel(write(tmp_path / "n.gguf", fill, "glm4"))
    assert model.config == plain.config
    require_tensors(model, tensors)


@pytest.mark.parametrize(
    ("arch", "case", "add", "message"),
    [
        ("deepseek2", "deepseek_v2", lambda writer: writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID), "scoring_func"),
        ("granite", "granite", lambda writer: writer.add_rope_scaling_finetuned(False), "Granite without a rope"),
        (
            "gemma",
            "gemma",
            lambda writer: writer.add_causal_attention(False),
            "is False, expected true, because attention in decoders is causal",
        ),
        (
            "qwen3",
            "qwen3",
            lambda writer: writer.add_pooling_type(PoolingType.RANK),
            "qwen3.pooling_type is 4, a reranker; load the folder",
        ),
        ("qwen3", "qwen3", lambda writer: writer.add_uint32("qwen3.pooling_type", 9), "qwen3.pooling_type is 9, expected 0 to 4"),
        ("olmo2", "olmo3", lambda writer: writer.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor is 0.5, expected 1"),
    ],
)
def test_what_a_model_would_compute_otherwise_is_refused(tmp_path: Path, arch: str, case: str, add: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        GgufModel(convert(case, arch, tmp_path / "m.gguf", add))


@pytest.mark.parametrize(("stated", "pooling"), [(PoolingType.LAST, Pooling.LAST), (PoolingType.MEAN, Pooling.MEAN)])
def test_a_model_with_a_pooling_was_trained_for_embeddings(tmp_path: Path, stated: PoolingType, pooling: Pooling) -> None:
    path = convert("qwen3", "qwen3", tmp_path / "m.gguf", lambda writer: writer.add_pooling_type(stated))
    assert GgufModel(path).config.embedding == EmbeddingConfig(pooling, True, is_stated=True)
    assert open_files(path).is_embedder
    for plain in (lambda writer: None, lambda writer: writer.add_pooling_type(PoolingType.NONE)):
        path = convert("qwen3", "qwen3", tmp_path / "m.gguf", plain)
        assert not open_files(path).is_embedder


@pytest.mark.parametrize(("stated", "expected"), [(0.8782488562869419, 1.0), (1.25, 1.25), (1.0, 1.0), (None, 0.1 * math.log(4) + 1)])
def test_a_yarn_factor_below_one_multiplies_the_usual_factor(tmp_path: Path, stated: float | None, expected: float) -> None:
    """DeepSeek-R1-0528-Qwen3-8B states such a factor, so that rotations are not scaled."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        if stated is not None:
            writer.add_rope_scaling_yarn_attn_factor(stated)

    rope = GgufModel(convert("qwen3", "qwen3", tmp_path / "m.gguf", add)).config.rope
    assert rope is not None and rope.frequencies(128)[1] == pytest.approx(expected, rel=1e-6)


def test_a_head_whose_factor_is_unknown_is_refused(tmp_path: Path) -> None:
    path = convert("falcon_h1", "falcon-h1", tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"output.weight", b"another.names"))
    with pytest.raises(ModelError, match=r"output\.weight is missing"):
        GgufModel(path)


def test_stacked_projections_of_another_size_and_names_that_collide_are_refused(tmp_path: Path) -> None:
    def with_stacked(num_rows: int) -> Path:
        stacked = np.zeros((num_rows, 32), np.float32)
        return convert("phi", "phi2", tmp_path / "m.gguf", lambda writer: writer.add_tensor("blk.0.attn_qkv.weight", stacked))

    with pytest.raises(DamagedFile, match=r"blk\.0\.attn_qkv\.weight is \[63, 32\], expected 64 rows"):
        GgufModel(with_stacked(63))
    with pytest.raises(DamagedFile, match=r"both blk\.0\.attn_q\.weight and blk\.0\.attn_qkv\.weight"):
        GgufModel(with_stacked(64))


def test_llama3_scaling_is_a_tensor(tmp_path: Path) -> None:
    case = MODELS / "llama-llama3"
    expected = load_config(case)
    assert expected.rope is not None
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    divisors = (plain / expected.rope.frequencies(256)[0]).astype(np.float32)
    path = convert("llama-llama3", "llama", tmp_path / "m.gguf")
    file = gguf.GGUFReader(path)
    kept = {tensor.name: np.array(tensor.data) for tensor in file.tensors}
    values = json.loads((case / "config.json").read_text())

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(2)
        writer.add_context_length(256)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_rope_freq_base(values["rope_theta"])
        for name, tensor in kept.items():
            writer.add_tensor(name, tensor)
        writer.add_tensor("rope_freqs.weight", divisors)

    model = GgufModel(write(tmp_path / "n.gguf", fill))
    assert "rope_freqs.weight" not in model.tensors
    assert model.config.rope is not None
    assert isinstance(model.config.rope.scaling, LongScaling)
    frequencies, scale = model.config.rope.frequencies(256)
    np.testing.assert_allclose(frequencies, expected.rope.frequencies(256)[0], rtol=1e-6)
    assert scale == 1.0


def test_foreign_architectures_and_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="'rwkv7'; known are arcee, chatglm, cohere2"):
        GgufModel(write(tmp_path / "m.gguf", fill, "rwkv7"))
    with pytest.raises(UnknownModel, match="has 8 experts; qwen2 is supported only without"):
        convert("qwen2", "qwen2", tmp_path / "m.gguf", lambda writer: writer.add_expert_count(8))
        GgufModel(tmp_path / "m.gguf")
    path = convert("qwen2", "qwen2", tmp_path / "m.gguf")
    assert "blk.0.attn_q.weight" not in GgufModel(path).tensors


CONFIG_VALUES = st.sampled_from([0, 1, 3, 7, 1 << 31, -1]) | st.text(max_size=3) | st.booleans() | st.floats()
CONFIG_KEYS = ["block_count", "embedding_length", "attention.head_count", "attention.key_length", "rope.freq_base", "rope.scaling.type"]
CONFIG_KEYS += ["rope.dimension_count", "attention.sliding_window"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from(sorted(GGUF_FAMILIES)), st.dictionaries(st.sampled_from(CONFIG_KEYS), CONFIG_VALUES, max_size=4))
def test_any_configuration_reads_or_is_refused(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    path = tmp_path / "m.gguf"
    path.unlink(missing_ok=True)
    write(path, lambda writer: [writer.add_key_value(f"{arch}.{key}", value, gguf_type(value)) for key, value in changes.items()], arch)
    with suppress(ModelError):
        GgufModel(path)


@pytest.mark.parametrize("arch", GGUF_FAMILIES)
def test_a_number_of_layers_that_no_model_has_is_refused_at_once(tmp_path: Path, arch: str) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: writer.add_uint64(f"{arch}.block_count", 1 << 62), arch)
    with pytest.raises(ModelError, match="block_count is 4611686018427387904, expected at most 10000"):
        GgufModel(path)


def gguf_type(value: object) -> gguf.GGUFValueType:
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.INT64, float: gguf.GGUFValueType.FLOAT64}
    return kinds.get(type(value), gguf.GGUFValueType.STRING)


# --- tokenizers from GGUF files ---------------------------------------------------------------------------------------------

CORPUS = ["the quick brown fox, 12345 times", "die Grüße der Welt", "世界 and the world's 'quotes'", "  two  spaces\n\nlines"] * 3
TEXTS = [*CORPUS, "unseen: ξ 🎉", "", " ", "<|end|>the<|end|>", "1234567"]


def metadata(tokenizer: tokenizers.Tokenizer, **values: Any) -> dict[str, Any]:
    """Return the metadata that a GGUF converter writes for this tokenizer."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = tokenizer.get_added_tokens_decoder()
    kinds = [TokenType.NORMAL if id not in added else TokenType.CONTROL if added[id].special else TokenType.USER_DEFINED for _, id in vocab]
    content = {"tokens": [token for token, _ in vocab], "token_type": np.array(kinds, np.int32), **values}
    return {f"tokenizer.ggml.{name}": value for name, value in content.items()}


def byte_level(words: str | None) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [] if words is None else [pre_tokenizers.Split(tokenizers.Regex(words), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokenizer, metadata(tokenizer, model="gpt2", merges=merges, eos_token_id=0)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(("pre", "words"), [("gpt-2", None), ("llama-bpe", LLAMA3), ("qwen2", LLAMA3.replace("{1,3}", ""))])
def test_byte_level_tokenizers_come_back(pre: str, words: str | None) -> None:
    original, values = byte_level(words)
    restored = tokenizers.Tokenizer.from_str(tokenizer_files({**values, "tokenizer.ggml.pre": pre})["tokenizer.json"].decode())
    for sample in TEXTS:
        ids = original.encode(sample).ids
        assert restored.encode(sample).ids == ids
        assert restored.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("tokens", "merge", "form"),
    [
        (["a", "b", "ab"], "a b", str),
        (["a", " b", "a b"], "a  b", list),  # a text would not say where the first token ends
        (["#version", "b", "#versionb"], "#version b", list),  # as a text, the package would skip it
    ],
)
def test_a_merge_is_a_text_where_a_text_says_the_same(tokens: list[str], merge: str, form: type) -> None:
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*tokens, "<s>"],
        "tokenizer.ggml.merges": [merge],
        "tokenizer.ggml.add_bos_token": False,
    }
    made = json.loads(content := tokenizer_files(metadata)["tokenizer.json"])
    assert [type(pair) for pair in made["model"]["merges"]] == [form]
    assert json.loads(tokenizers.Tokenizer.from_buffer(content).to_str())["model"]["merges"] == [tokens[:2]]


def test_texts_of_gemma_4_begin_with_the_begin_token_whatever_the_file_says() -> None:
    """The first converters stated the opposite, and texts that no chat template renders then have poor continuations."""
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["<bos>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": np.array([TokenType.CONTROL] + [TokenType.NORMAL] * 3, np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert tokenizers.Tokenizer.from_buffer(tokenizer_files(metadata)["tokenizer.json"]).encode("ab").ids == [0, 3]


SPLIT = "HelloWorld don't 1234 東京12 a/b!\n\nx"
WORDS_OF_GPT2 = ["HelloWorld", " don", "'t", " 1234", " 東京", "12", " a", "/", "b", "!", "\n", "\n", "x"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("exaone4", WORDS_OF_GPT2),
        ("exaone", ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", " 東京", "1", "2", " a", "/", "b", "!", "\n", "\n", "x"]),
        ("glm4", ["HelloWorld", " don", "'t", " ", "123", "4", " 東京", "12", " a", "/b", "!\n\n", "x"]),
        ("deepseek-r1-qwen", ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", " 東京", "1", "2", " a", "/b", "!\n\n", "x"]),
        ("qwen35", ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", " 東京", "1", "2", " a", "/b", "!\n\n", "x"]),
        ("seed-coder", ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", " 東京", "1", "2", " a", "/b", "!", "\n\n", "x"]),
        ("tekken", ["Hello", "World", " don", "'t", " ", "1", "2", "3", "4", " 東京", "1", "2", " a", "/b", "!\n\n", "x"]),
        ("gpt-4o", ["Hello", "World", " don't", " ", "123", "4", " 東京", "12", " a", "/b", "!\n\n", "x"]),
        ("minimax-m2", ["Hello", "World", " don't", " ", "123", "4", " 東京", "12", " a", "/b", "!\n\n", "x"]),
        ("dbrx", ["HelloWorld", " don", "'t", " ", "123", "4", " 東京", "12", " a", "/b", "!\n\n", "x"]),  # Phi-4, Granite 4, OLMo 2
        ("smaug-bpe", ["HelloWorld", " don", "'t", " ", "123", "4", " 東京", "12", " a", "/b", "!\n\n", "x"]),  # SmolLM3
        ("deepseek-llm", ["HelloWorld", " don", "'", "t", " ", "1234", " ", "東京", "12", " a", "/", "b", "!", "\n", "\n", "x"]),
        (
            "deepseek-coder",
            [*["HelloWorld", " don", "'", "t", " ", "1", "2", "3", "4", " ", "東京", "1", "2", " a", "/", "b", "!", "\n", "\n", "x"]],
        ),
        ("tiny_aya", ["Hello", "World", " don't", " ", "1", "234", " 東京", "12", " a", "/b", "!\n\n", "x"]),
        ("kimi-k2", ["Hello", "World", " don't", " ", "123", "4", " ", "東京", "12", " a", "/b", "!\n\n", "x"]),
        ("deepseek-v3", ["HelloWorld", " don", "'t", " ", "123", "4", " ", "東京", "12", " a", "/b", "!\n\n", "x"]),
    ],
)
def test_texts_are_split_as_the_named_models_split_them(pre: str, words: list[str]) -> None:
    _, values = byte_level(None)
    made = tokenizers.Tokenizer.from_str(tokenizer_files({**values, "tokenizer.ggml.pre": pre})["tokenizer.json"].decode())
    assert made.pre_tokenizer is not None
    assert [SPLIT[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(SPLIT)] == words


def test_marks_belong_to_words_of_qwen_3_5() -> None:
    _, values = byte_level(None)
    made = tokenizers.Tokenizer.from_str(tokenizer_files({**values, "tokenizer.ggml.pre": "qwen35"})["tokenizer.json"].decode())
    assert made.pre_tokenizer is not None
    text = "हिन्दी भाषा"
    assert [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)] == ["हिन्दी", " भाषा"]


def test_chinese_characters_and_other_letters_share_no_words_of_kimi_k2() -> None:
    _, values = byte_level(None)
    made = tokenizers.Tokenizer.from_str(tokenizer_files({**values, "tokenizer.ggml.pre": "kimi-k2"})["tokenizer.json"].decode())
    assert made.pre_tokenizer is not None
    text = "用Kimi写code，カタカナ漢字 한국어's/\n"
    words = ["用", "Kimi", "写", "code", "，カタカナ", "漢字", " 한국어's", "/\n"]
    assert [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)] == words


def sentencepiece(has_prefix: bool) -> dict[str, Any]:
    pieces = ["the", "qu", "ick", "quick", "▁the", "▁quick", "▁t", "▁q", "he", "ic", "▁w", "or", "ld", "world", "▁world", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *"▁thequickworlda,ing"]
    tokens = list(dict.fromkeys(tokens))
    kinds = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.BYTE] * 256
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "scores": np.array([0.0 if kind != TokenType.NORMAL else -float(id) for id, kind in enumerate(kinds)], np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": has_prefix,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def best_first(text: str, ids: dict[str, int], scores: np.ndarray) -> list[int]:
    """Tokenize as sentencepiece defines it: while any two adjacent pieces can be merged, merge the pair with the best score. If several
    pairs have this score, merge the leftmost."""
    parts = list(text)
    while True:
        joined = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [id for part in parts for id in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokenizers_join_the_best_piece_first(has_prefix: bool) -> None:
    values = sentencepiece(has_prefix)
    files = tokenizer_files(values)
    restored = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    ids = {token: id for id, token in enumerate(values["tokenizer.ggml.tokens"])}
    for sample in ["the quick world", "quickworldthe  the", "Grüße 🎉", "qq"]:
        marked = ("▁" * has_prefix + sample).replace(" ", "▁")
        encoded = restored.encode(sample).ids
        assert encoded == [1, *best_first(marked, ids, values["tokenizer.ggml.scores"])]
        assert restored.decode(encoded) == sample
    assert json.loads(files["tokenizer_config.json"]) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "origin": "llama.cpp"}),
        (
            {"temp": float(np.float32(0.6)), "top_k": 20, "penalty_repeat": 1.5},
            {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.5},
        ),
        ({"top_p": 0.5, "mirostat": 0}, {"top_p": 0.5}),
    ],
)
def test_sampling_is_as_the_file_recommends_or_as_in_llama_cpp(entries: dict[str, Any], expected: dict[str, Any]) -> None:
    metadata = sentencepiece(has_prefix=True) | {f"general.sampling.{name}": value for name, value in entries.items()}
    assert json.loads(tokenizer_files(metadata)["generation_config.json"]) == {"eos_token_id": [2], **expected}


def test_tokenizers_of_gemma_4_merge_in_the_order_of_the_file() -> None:
    values = sentencepiece(has_prefix=False)
    scores, tokens = values.pop("tokenizer.ggml.scores"), values["tokenizer.ggml.tokens"]
    del values["tokenizer.ggml.add_space_prefix"]
    ids = {token: id for id, token in enumerate(tokens)}
    splits = [(-scores[ids[token]], token[:cut], token[cut:]) for token in tokens[259:] for cut in range(1, len(token))]
    merges = [f"{left} {right}" for _, left, right in sorted(splits) if left in ids and right in ids]
    files = tokenizer_files({**values, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges})
    restored = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for sample in ["the quick world", "quickworldthe  the", "Grüße 🎉", "qq"]:
        encoded = restored.encode(sample).ids
        assert encoded == [1, *best_first(sample.replace(" ", "▁"), ids, scores)]
        assert restored.decode(encoded, skip_special_tokens=True) == sample


def test_tokens_of_phi_3_take_the_spaces_that_follow_them() -> None:
    """Its tokenizer drops the line break that its chat template writes after each marker. Files do not say so."""
    values = sentencepiece(True)
    markers = ["<|endoftext|>", "<|user|>", "<|end|>"]
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], *markers]
    values["tokenizer.ggml.token_type"] = np.append(values["tokenizer.ggml.token_type"], [TokenType.CONTROL] * 3).astype(np.int32)
    values["tokenizer.ggml.scores"] = np.append(values["tokenizer.ggml.scores"], [0.0] * 3).astype(np.float32)
    for architecture, text, same in (
        ("phi3", "<|user|>\n the<|end|>\n", "<|user|>the<|end|>"),
        ("phi3", "</s> the", "</s>the"),
        ("phi3", "<|endoftext|>\nthe", None),
        ("phi3", "<s>\nthe", None),
        ("llama", "<|user|>\nthe", None),
    ):
        made = tokenizers.Tokenizer.from_buffer(tokenizer_files(values | {"general.architecture": architecture})["tokenizer.json"])
        ids = made.encode(text).ids
        assert (ids == made.encode(same).ids) if same else (3 + ord("\n") in ids), text


def user_defined(values: dict[str, Any]) -> dict[str, Any]:
    kinds = values["tokenizer.ggml.token_type"].copy()
    kinds[270:272] = TokenType.USER_DEFINED
    return values | {"tokenizer.ggml.token_type": kinds}


@pytest.mark.parametrize("values", [byte_level(None)[1], user_defined(sentencepiece(True)), user_defined(sentencepiece(False))])
def test_the_package_would_write_the_same_file(values: dict[str, Any]) -> None:
    """The file is written without building the tokenizer. It has everything that the package writes after it has read the file, except
    that merges are texts, and the package writes pairs."""
    text = tokenizer_files(values)["tokenizer.json"].decode()
    fields = json.loads(text)
    fields["model"]["merges"] = [merge.split(" ") for merge in fields["model"]["merges"]]
    assert json.loads(tokenizers.Tokenizer.from_str(text).to_str()) == fields
    assert list(fields["model"]["vocab"]) == values["tokenizer.ggml.tokens"]
    assert len(fields["added_tokens"]) == sum(int(kind) in (2, 3, 4) for kind in values["tokenizer.ggml.token_type"])


def test_ends_template_and_stops() -> None:
    _, values = byte_level(None)
    values |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    values |= {"tokenizer.ggml.eot_token_id": 5, "tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.padding_token_id": 0xFFFFFFFF}
    files = tokenizer_files(values)
    ids = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode()).encode("the").ids
    assert (ids[0], ids[-1]) == (0, 0)
    config = json.loads(files["tokenizer_config.json"])
    assert (config["chat_template"], "pad_token" in config) == ("{{ messages }}", False)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 5]


@pytest.mark.parametrize(
    ("tokens", "template", "stated", "ends"),
    [
        (["<|endoftext|>", "<|im_end|>"], "<|im_end|>", {"eos": "<|im_end|>"}, ["<|endoftext|>", "<|im_end|>"]),  # Qwen2.5 Coder
        (["<|end_of_text|>", "<|eot_id|>"], "", {"eos": "<|eot_id|>"}, ["<|end_of_text|>", "<|eot_id|>"]),  # Llama 3
        (["<|eot_id|>", "<|eom_id|>"], "<|eom_id|><|eot_id|>", {"eos": "<|eot_id|>"}, ["<|eot_id|>", "<|eom_id|>"]),  # Llama 3.1
        (["<|eot_id|>", "<|eom_id|>"], "<|eot_id|>", {"eos": "<|eot_id|>"}, ["<|eot_id|>"]),
        (["<eos>", "<end_of_turn>"], "<end_of_turn>", {"eos": "<end_of_turn>"}, ["<eos>", "<end_of_turn>"]),  # Gemma 3
        (["<eos>", "<turn|>"], "<turn|>", {"eos": "<eos>"}, ["<eos>", "<turn|>"]),  # Gemma 4
        (["<eos>", "<|tool_response>", "<turn|>"], "<turn|><|tool_response>", {"eos": "<eos>"}, ["<eos>", "<|tool_response>", "<turn|>"]),
        (["<|return|>", "<|call|>", "<|end|>"], "<|end|><|call|>", {"eos": "<|return|>"}, ["<|return|>", "<|call|>"]),  # gpt-oss
        (["</s>", "<|im_end|>", "<turn|>"], "<|im_end|><turn|>", {"eos": "</s>", "eot": "<turn|>"}, ["</s>", "<turn|>"]),
    ],
)
def test_ends_that_a_file_does_not_state(tokens: list[str], template: str, stated: dict[str, str], ends: list[str]) -> None:
    """Most files state one token that ends an answer, though their models write several: one ends a text, one a turn, and one a call."""
    values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", *tokens, "b"], "tokenizer.chat_template": template}
    values |= {f"tokenizer.ggml.{role}_token_id": 1 + tokens.index(text) for role, text in stated.items()}
    assert end_ids(values) == tuple(sorted(1 + tokens.index(text) for text in ends))


def test_a_text_is_found_without_decoding_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of equal texts is found. Bytes within a text that look like a text with its length are none."""
    monkeypatch.setattr("compiler.frontend.gguf.file.STRIDE", 4)
    written = ["b", "ab", "", "ab", "世", "x" * 20, "y", "end", "after", "ende"]
    hidden = "end", "other", "after"
    looks_alike = ["z" + b"".join(struct.pack("<Q", len(text)) + text.encode() for text in hidden).decode() for _ in range(5)]
    written = [*looks_alike, *written, *looks_alike]
    path = write(tmp_path / "m.gguf", lambda writer: writer.add_array("texts", written))
    texts = GgufFile(path).metadata["texts"]
    assert list(texts) == written
    monkeypatch.setattr(Texts, "__iter__", lambda _: pytest.fail("texts are decoded"))
    for text in (*written, *hidden, "none"):
        assert texts.place(text) == (written.index(text) if text in written else None), text
    path = write(tmp_path / "m.gguf", lambda writer: writer.add_token_list(["<s>", "<|endoftext|>"]))
    assert end_ids({**GgufFile(path).metadata, "tokenizer.ggml.model": "gpt2"}) == (1,)


def test_ends_that_a_file_lists() -> None:
    """Ollama writes all end tokens as a list, and no chat template of which the others could be read."""
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "a", "<turn|>"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert end_ids(values | {"tokenizer.ggml.eos_token_ids": np.array([1, 3], np.int32)}) == (1, 3)
    for ids in (np.array([4], np.int32), np.array([-1], np.int32), np.array([1.0], np.float32), 1, ["1"]):
        with pytest.raises(DamagedFile, match=r"eos_token_ids is .*, expected ids of the 4 tokens"):
            end_ids(values | {"tokenizer.ggml.eos_token_ids": ids})


def test_the_server_reads_the_files_as_those_of_a_directory(tmp_path: Path) -> None:
    original, values = byte_level(None)
    path = tmp_path / "m.gguf"

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(1)
        writer.add_context_length(77)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_vocab_size(320)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(values["tokenizer.ggml.tokens"])
        writer.add_token_types(values["tokenizer.ggml.token_type"].tolist())
        writer.add_token_merges(values["tokenizer.ggml.merges"])
        writer.add_eos_token_id(0)
        writer.add_chat_template("{{ eos_token }}{{ messages[0].content }}")

    files = tokenizer_files(GgufFile(write(path, fill)).metadata)
    assert json.loads(files["config.json"]) == {"max_position_embeddings": 77}
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("the world", add_special_tokens=True) == original.encode("the world").ids
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"content": "hi"}]) == "<|end|>hi"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "t5"}, ModelError, "'t5', expected gpt2, llama or gemma4"),
        ({"pre": "mystery"}, ModelError, "'mystery'; known are"),
        ({"merges": ["a b c", "zz yy"]}, DamagedFile, "two tokens whose concatenation is a token"),
        ({"merges": None}, DamagedFile, "an array of texts"),
        ({"token_type": np.zeros(3, np.int32)}, DamagedFile, "one per token"),
        ({"eos_token_id": 1 << 20}, DamagedFile, "expected the id of one of 3"),
        ({"model": "llama"}, DamagedFile, "scores is missing"),
        ({"add_bos_token": 3}, DamagedFile, "a boolean"),
        ({"pre": ["qwen2"]}, DamagedFile, "does not describe a valid tokenizer"),
        (
            {"model": "llama", "tokens": ["x" * 20_000], "token_type": None, "scores": np.zeros(1), "eos_token_id": None},
            DamagedFile,
            "the pieces are too long",
        ),
    ],
)
def test_damaged_vocabularies_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    _, values = byte_level(None)
    with pytest.raises(error, match=message):
        tokenizer_files(values | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})
