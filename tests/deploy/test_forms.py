"""Before a model is compiled, the weight formats in which it can be served are compared."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file

from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.layers.tower import sees
from compiler.frontend.weights import TensorInfo, open_safetensors
from compiler.machine.target import get
from deploy import demo
from deploy.bench.synthetic import Fp8Weights
from deploy.forms import ServedForm, compare_forms, estimate_forms, quantised_bytes, recommended
from deploy.inspection import WORKER_BYTES, Inspection, inspect_model
from deploy.model_loading.facts import facts_of
from deploy.model_loading.files import open_files
from deploy.serve import compare_forms as compare_in_process
from server.interfaces import LoadError
from server.messages import Load
from tests.golden.gguf_models import convert
from tests.golden.joint import SUBJECTS as joint
from tests.golden.vision import SUBJECTS as vision

WHISPER = Path(__file__).parents[1] / "golden" / "whisper"
LOAD = Load("demo", str(demo.MODEL), "bf16", max_batch=4)

pytestmark = pytest.mark.xdist_group("inspection")  # the tests of this group share one compiled model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return inspect_model(LOAD)


def by_name(forms: list[ServedForm]) -> dict[str, ServedForm]:
    return {form.quantize: form for form in forms}


def test_bytes_are_those_of_the_plan(found: Inspection) -> None:
    forms = by_name(compare_forms(open_files(demo.MODEL), found, LOAD))
    assert forms["bf16"].weights_bytes == pytest.approx(found.plan.weights_bytes, rel=0.01)
    int4 = inspect_model(msgspec.structs.replace(LOAD, quantize="4bit"))
    assert forms["4bit"].weights_bytes == pytest.approx(int4.plan.weights_bytes, rel=0.01)


@pytest.mark.parametrize("folder", [vision["idefics3"].folder, vision["lfm2_vl"].folder, vision["gemma4"].folder, joint["clip"].folder])
def test_encoders_of_images_keep_16_bits(folder: Path) -> None:
    """The matrices of image encoders need not divide into groups: those here have 48 and 80 columns, those of SigLIP so400m 4,304."""
    files = open_files(folder)
    forms = {form.quantize: form for form in estimate_forms(files, LOAD)}
    seen = sum(math.prod(info.shape) for name, info in files.weights.tensors.items() if sees(name) and len(info.shape) > 1)
    assert seen and {"4bit", "int8"} <= forms.keys()
    for name in ("4bit", "int8"):
        assert forms[name].weights_bytes > 2 * seen and 0 < forms[name].loss < 0.2


def test_experts_take_a_multiplier_per_group_and_a_scale_per_channel_on_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.forms.host", lambda: get("amx"))
    for shape in ((64, 256), (8, 64, 256)):
        info = TensorInfo(shape, np.dtype(np.float32), 4 * math.prod(shape))
        assert quantised_bytes(info, WeightFormat.parse("int4-32")) == math.prod(shape[:-1]) * (256 // 2 + 256 // 32 + 4)


def test_the_form_that_loses_least_of_those_that_fit_is_recommended(found: Inspection) -> None:
    files = open_files(demo.MODEL)
    forms = compare_forms(files, found, LOAD)
    # the demo's checkpoint is not quantised, so the format of the checkpoint is not offered
    assert set(by_name(forms)) == {"bf16", "f32", "int8", "4bit"}
    assert by_name(forms)["bf16"].loss == 0 < by_name(forms)["int8"].loss < 0.02 < by_name(forms)["4bit"].loss < 0.2
    assert recommended(forms) is forms[0] and forms[0].quantize == "bf16"
    least = found.plan.page_bytes * (1 + found.max_context // 16) + found.plan.arena_bytes + WORKER_BYTES
    for name, expected in (("bf16", "bf16"), ("int8", "int8"), ("4bit", "4bit")):
        tight = replace(found, available_bytes=least + by_name(forms)[name].weights_bytes)
        best = recommended(compare_forms(files, tight, LOAD))
        assert best is not None and best.quantize == expected and best.num_tokens == found.max_context
    assert recommended(compare_forms(files, replace(found, available_bytes=least), LOAD)) is None


def test_a_quantised_file_loses_nothing_as_it_is(found: Inspection, tmp_path: Path) -> None:
    files = open_files(convert("qwen2", "qwen2", tmp_path / "m.gguf", kind=GGMLQuantizationType.Q4_0))
    forms = by_name(compare_forms(files, found, LOAD))
    assert forms["auto"].loss == 0 < forms["bf16"].loss < forms["4bit"].loss
    assert forms["auto"].weights_bytes < forms["int8"].weights_bytes < forms["bf16"].weights_bytes
    best = recommended(list(forms.values()))
    assert best is not None and best.quantize == "auto"


def test_a_checkpoint_in_fp8_loses_nothing_as_it_is(found: Inspection, tmp_path: Path) -> None:
    folder, source = tmp_path / "fp8", open_safetensors(demo.MODEL)
    shutil.copytree(demo.MODEL, folder)
    stored = Fp8Weights(source, 128)
    save_file({name: np.ascontiguousarray(stored.read(name)) for name in stored.tensors}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    forms = by_name(compare_forms(open_files(folder), found, LOAD))
    assert facts_of(open_files(folder)).weight_type == "FP8"
    assert forms["auto"].loss == 0 < forms["bf16"].loss < forms["int8"].loss
    assert forms["auto"].weights_bytes < forms["bf16"].weights_bytes
    best = recommended(list(forms.values()))
    assert best is not None and best.quantize == "auto"


def test_auto_is_estimated_as_the_format_that_it_stands_for(found: Inspection) -> None:
    """On CPUs, Whisper is served with integers of 8 bits, though its files are not quantised; on GPUs, in bf16."""
    files = open_files(WHISPER)
    for forms in (by_name(compare_forms(files, found, LOAD)), {form.quantize: form for form in estimate_forms(files, LOAD)}):
        assert (forms["auto"].weights_bytes, forms["auto"].loss) == (forms["int8"].weights_bytes, forms["int8"].loss)
        assert forms["auto"].loss > forms["bf16"].loss
    on_gpu = msgspec.structs.replace(LOAD, device="cuda")
    assert "auto" not in by_name(compare_forms(files, found, on_gpu))
    losses = {form.quantize: form.loss for form in estimate_forms(files, on_gpu)}
    assert losses["auto"] == losses["bf16"] > 0, "the files have f32"


def test_the_server_compares_formats_in_a_process_of_its_own() -> None:
    forms = {form.quantize: form for form in asyncio.run(compare_in_process(str(demo.MODEL)))}
    assert next(iter(forms)) == "auto" and forms["auto"].loss == 0
    assert forms["4bit"].weights_bytes < forms["bf16"].weights_bytes <= forms["f32"].weights_bytes
    assert forms["4bit"].loss > forms["int8"].loss > 0
    with pytest.raises(LoadError, match="does not exist"):
        asyncio.run(compare_in_process("/nowhere/at-all"))
