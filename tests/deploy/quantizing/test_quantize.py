"""A model that is quantised to a number of bits: what it costs, where it is kept, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.quantized.held import Width
from compiler.machine.target import GPU, NAMED
from deploy import demo
from deploy.bench.compute.quality import round_to_nearest
from deploy.cache import Kept, Part, kept
from deploy.cli.commands import app
from deploy.forms import estimate_forms
from deploy.model_loading.files import Formed, ModelFiles, Opened, open_files
from deploy.model_loading.known import begin, silent
from deploy.model_loading.load import load_model
from deploy.model_loading.stages import advance
from deploy.model_loading.tokenizer import TokenizerSource
from deploy.quality.observe import Observer, divergence, rows_of
from deploy.quality.text import CALIBRATION, tokens_of
from deploy.quantizing import kept as kept_module
from deploy.quantizing.kept import Quantised, form_weights, heads_of, in_format
from deploy.quantizing.matrices import values_of
from deploy.quantizing.mix import CPU_WIDTHS, GPU_WIDTHS, bits_of
from deploy.quantizing.quantize import affordable, apart, num_multiplied, quantise
from deploy.quantizing.sensitivity import Replaced
from runtime.sealed import key_of
from runtime.sections import SectionFile
from server.interfaces import LoadError
from server.messages import Load
from tests.conftest import ROOT

MODELS = ROOT / "tests/golden/models"
pytestmark = pytest.mark.xdist_group("quantising")  # the tests of this file share one quantised model

BUDGET = "4.75"


def formed(budget: str = BUDGET, calibrate: str = "", source: Path = demo.MODEL) -> ModelFiles:
    return advance(begin(Load("m", str(source), budget, calibrate=calibrate)), Formed).files


@pytest.mark.parametrize("quantize", ["auto", "int8", "bf16"])
def test_a_text_for_a_format_that_measures_nothing_is_refused(quantize: str) -> None:
    expected = f"calibrate is '/own.txt', and quantize is '{quantize}', for which nothing is measured: leave calibrate out"
    with pytest.raises(LoadError, match=expected):
        formed(quantize, "/own.txt")


def test_a_text_to_calibrate_on_counts_only_for_formats_that_are_measured() -> None:
    """Such as in `inspect --quality --calibrate FILE`, which loads the model in several formats."""
    load = Load("m", "m", "auto", calibrate="/own.txt")
    assert [in_format(load, quantize).calibrate for quantize in ("int8", "4bit", "4.6")] == ["", "/own.txt", "/own.txt"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def files(cache: None) -> ModelFiles:
    return open_files(demo.MODEL)


@pytest.fixture(scope="module")
def quantised(cache: None) -> Quantised:
    made = formed()
    assert made.quantised is not None and not made.config.tie_word_embeddings
    return made.quantised._source  # type: ignore[attr-defined, return-value]


def test_matrices_keep_to_the_budget_and_the_head_is_wider(quantised: Quantised):
    widths = {name: width for name, width in quantised._result.widths.items() if name != "lm_head.weight"}
    sizes = {name: int(np.prod(quantised.tensors[name].shape)) for name in widths}
    bits = sum(bits_of(quantised.forms[name]) * size for name, size in sizes.items()) / sum(sizes.values())
    assert 4.6 < bits <= 4.75
    assert quantised._result.widths["lm_head.weight"] == Width(6, 32)
    assert {name.rpartition(".layers.")[2].partition(".")[2] for name in widths} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


def test_predictions_change_far_less_than_by_plain_rounding(files: ModelFiles, quantised: Quantised):
    """The logits are compared at the end of the calibration text. Only the matrices that were quantised are replaced."""
    window = tokens_of(TokenizerSource(files.path), CALIBRATION)[-256:]
    names = [name for name in quantised._result.widths if name in files.weights.tensors]
    observer = Observer(files, 256)
    rows = rows_of(len(window), 256)

    def plain(name: str) -> np.ndarray:
        return round_to_nearest(files.weights.read(name).astype(np.float32), WeightFormat.parse("int4-32"))

    def ours(name: str) -> np.ndarray:
        return values_of(quantised.parts(name), quantised._result.widths[name])

    with observer.bound(files.weights) as bound:
        exact = bound.run(window, rows).logits
        found = []
        for values in (plain, ours):
            bound.binding.bind(Replaced(files.weights, names, values), set(names))
            found.append(divergence(exact, bound.run(window, rows).logits))
        bound.binding.bind(files.weights, set(names))
        assert bound.run(window, rows).logits.tobytes() == exact.tobytes()
    assert 0 < found[1] < 0.5 * found[0]


def test_a_second_start_reads_the_file_and_serves_it(quantised: Quantised, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deploy.quantizing.quantize.quantise", lambda *_: pytest.fail("quantised again"))
    again = formed()
    for name, parts in quantised._result.parts.items():
        for part, array in parts.items():
            np.testing.assert_array_equal(again.quantised.read(f"{name}.{part}"), array)  # type: ignore[union-attr]
    loaded = load_model(Load("m", str(demo.MODEL), BUDGET, max_context=64, max_batch=2), silent)
    assert loaded.ready.generates


def test_a_damaged_file_is_built_again(quantised: Quantised, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    folder = kept()
    assert folder is not None
    path = folder.quantised_of(quantised.digest())
    content = path.read_bytes()
    monkeypatch.setattr("deploy.quantizing.quantize.quantise", lambda *_: quantised._result)
    try:
        path.write_bytes(b"\1" + content[1:])
        formed()
        assert path.read_bytes() == content and "removed and built again" in caplog.text
    finally:
        path.write_bytes(content)


def test_a_flipped_bit_is_never_packed(quantised: Quantised, monkeypatch: pytest.MonkeyPatch):
    """Packed weights get checksums of their own, so damage that was packed would never be found."""
    folder = kept()
    assert folder is not None
    path = folder.quantised_of(quantised.digest())
    content = bytearray(path.read_bytes())
    sections = SectionFile(path, key_of(path.parent))._sections
    largest = max(sections.values(), key=lambda section: section.size)
    content[largest.offset + largest.size // 2] ^= 64
    sound = path.rename(path.with_name("sound"))
    path.write_bytes(content)
    matrix, _, part = largest.name.rpartition(".")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    damaged = formed().quantised
    assert damaged is not None
    monkeypatch.setattr("deploy.quantizing.quantize.quantise", lambda *_: quantised._result)
    try:
        with pytest.raises(LoadError, match=f"section '{largest.name}' is damaged: its checksum differs; it is removed: load the model"):
            damaged.read(largest.name)
        assert not path.exists()
        path.write_bytes(content)
        damaged = formed().quantised
        assert damaged is not None
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refuse)
            with pytest.raises(LoadError, match="differs; it cannot be removed: remove it as the user that owns the folder"):
                damaged.read(largest.name)
        path.unlink()
        again = formed().quantised
        assert again is not None and again.read(largest.name).tobytes() == quantised.parts(matrix)[part].tobytes()
    finally:
        sound.rename(path)


def test_a_start_with_packed_weights_reads_no_quantised_matrix(quantised: Quantised, monkeypatch: pytest.MonkeyPatch):
    load = Load("m", str(demo.MODEL), BUDGET, max_context=64, max_batch=2)
    load_model(load, silent)
    monkeypatch.setattr(Quantised, "parts", lambda _, name: pytest.fail(f"{name} was read"))
    assert load_model(load, silent).ready.generates


def test_an_inspection_compares_the_formats_of_the_files(files: ModelFiles, quantised: Quantised):
    """The inspected form has a head of its own, and matrices that are quantised already. The other formats are made from the files."""
    command = ["inspect", "demo", "--json", "--quantize", BUDGET, "--max-context", "64", "--max-batch", "2"]
    said = CliRunner().invoke(app, command, prog_name="relaxserve")
    assert said.exit_code == 0, said.exception
    shown = json.loads(said.stdout)
    assert shown["dtypes"] == {"BF16": shown["num_parameters"]}, "what the files store"
    found = {form["quantize"]: form["loss"] for form in shown["forms"]}
    expected = {form.quantize: form.loss for form in estimate_forms(files, Load("m", str(demo.MODEL)))}
    assert found.keys() == {"f32", "bf16", "int8", "4bit"} and found.items() <= expected.items()


def test_the_cache_lists_verifies_and_prunes_it(quantised: Quantised):
    folder = kept()
    assert folder is not None
    (item,) = (item for item in folder.items() if item.part is Part.QUANTISED)
    assert item.key == quantised.digest() and item.num_bytes > 0
    assert (item.paths[0], "") in list(folder.verify())
    assert item not in folder.prune(dry_run=True) and item in folder.prune(keep_bytes=0, dry_run=True)
    assert isinstance(folder, Kept)


def test_the_result_depends_on_budget_and_text(cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Path] = []
    monkeypatch.setattr(kept_module, "read_kept", lambda place, _: seen.append(place))
    monkeypatch.setattr("deploy.quantizing.quantize.quantise", lambda *_: kept_module.Result({}, {}))
    monkeypatch.setattr(kept_module, "_keep", lambda *_: None)
    text = tmp_path / "text.txt"
    text.write_text("Some other words. " * 100)
    for budget, calibrate in (("4bit", ""), (BUDGET, ""), ("5bit", ""), ("4bit", str(text))):
        formed(budget, calibrate)
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_the_result_depends_on_the_files_beside_the_weights(cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The configuration and the tokenizer decide what the matrices read on the text, so other ones give other numbers."""
    seen: list[Path] = []
    monkeypatch.setattr(kept_module, "read_kept", lambda place, _: seen.append(place))
    monkeypatch.setattr("deploy.quantizing.quantize.quantise", lambda *_: kept_module.Result({}, {}))
    monkeypatch.setattr(kept_module, "_keep", lambda *_: None)
    shutil.copytree(demo.MODEL, copy := tmp_path / "copy")
    formed(source=copy)
    for name in ("generation_config.json", "config.json", "tokenizer.json"):  # the first one changes only how tokens are sampled
        (copy / name).write_text((copy / name).read_text() + "\n" if (copy / name).exists() else "{}")
        formed(source=copy)
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_gpus_get_integers_and_other_numbers_than_cpus(cache: None, monkeypatch: pytest.MonkeyPatch):
    given: list[Sequence[Width]] = []
    monkeypatch.setattr(kept_module, "read_kept", lambda *_: None)
    monkeypatch.setattr(
        "deploy.quantizing.quantize.quantise", lambda _, __, widths, *___: given.append(widths) or kept_module.Result({}, {})
    )
    monkeypatch.setattr(kept_module, "_keep", lambda *_: None)
    known = advance(begin(Load("m", str(demo.MODEL), BUDGET)), Opened)
    gpu = next(target for target in NAMED.values() if target.system == GPU)
    settings = [form_weights(replace(known, target=target)).quantised_by for target in (known.target, gpu)]
    assert given == [CPU_WIDTHS, GPU_WIDTHS] and settings[0] != settings[1]


@pytest.mark.parametrize("billions", [3, 8, 30, 70, 10_000])
def test_large_models_are_measured_on_short_parts_from_the_whole_text(billions: int):
    tokens = range(2500)
    parts = affordable(tokens, 512, billions * 10**9)
    assert {len(part) for part in parts} == {128}
    assert sum(map(len, parts)) <= max(5e12 / (billions * 1e9), 4 * 128) and len(parts) >= 4
    quarters = [part[0] * 4 // len(tokens) for part in parts]
    assert quarters == sorted(quarters) and set(quarters) == {0, 1, 2, 3}


def test_small_models_are_measured_on_the_whole_text_or_long_parts_from_it():
    tokens = range(100_000)
    assert affordable(tokens[:2500], 512, 10**9) == [tokens[i : i + 512] for i in range(0, 2048, 512)]
    parts = affordable(tokens, 512, 10**9)  # which has 20 times more tokens than can be measured
    assert {len(part) for part in parts} == {512} and 4000 < sum(map(len, parts)) <= 5000
    starts = np.array([part[0] for part in parts])
    assert starts[0] > 0 and (np.diff(starts) > 10_000).all() and starts[-1] > 90_000


def test_a_short_text_is_measured_whole():
    tokens = range(100)
    assert affordable(tokens, 64, 10**13) == [tokens[:64]]
    assert affordable(tokens, 512, 10**13) == affordable(tokens, 512, 10**6) == [tokens]


def test_the_sensitivities_are_measured_in_the_middle_of_the_text(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")

    class Measured(Exception):
        pass

    def divergences(*args: Any) -> None:
        raise Measured(args[4])

    tokens = tokens_of(TokenizerSource(files.path), CALIBRATION)[:2100]
    monkeypatch.setattr("deploy.quantizing.quantize._plain", lambda *_: {})
    monkeypatch.setattr("deploy.quantizing.quantize.divergences", divergences)
    with pytest.raises(Measured) as stopped:
        quantise(files, 4.75, CPU_WIDTHS, tokens, silent)
    assert stopped.value.args == (tokens[1024:1280],)
    assert "model is quantised on 2048 of 2100 tokens of the text" in caplog.text


def test_a_mixture_multiplies_the_chosen_experts_only():
    files = open_files(MODELS / "mixtral")  # 2 of 4 experts
    block = "model.layers.0.block_sparse_moe"
    experts = [f"{block}.experts.w{i}.weight" for i in (1, 2, 3)]
    assert {files.weights.tensors[name].shape for name in experts} == {(4, 96, 64), (4, 64, 96)}
    assert num_multiplied(files, [experts[:2], experts[2:]]) == 3 * 2 * 96 * 64
    assert num_multiplied(files, [["model.layers.0.self_attn.q_proj.weight"], ["missing"]]) == 64 * 64


def quantised_of(files: ModelFiles) -> Quantised:
    result = quantise(files, 4.75, CPU_WIDTHS, [7 * i % files.config.vocab_size for i in range(64)], silent)
    return Quantised(files.weights, result, "", heads_of(files.config, files.weights.tensors))


@pytest.mark.parametrize("case", ["gemma3n", "qwen2_5_vl"])
def test_only_the_table_of_embeddings_becomes_the_head(case: str):
    """Other matrices may be called embeddings, too: per-layer embeddings, Gemma 3n's unembeddings of its streams, those of patches."""
    files = open_files(MODELS / case)
    assert sum("embed" in name for name in files.weights.tensors) > 1 and files.config.tie_word_embeddings
    made, vocab, size = quantised_of(files), files.config.vocab_size, files.config.hidden_size
    assert made.tensors["lm_head.weight"].shape == (vocab, size)
    assert made.parts("lm_head.weight")["q6"].shape == (vocab, size)
    if case == "gemma3n":
        assert {f"model.altup_unembed_projections.{number}.weight" for number in range(3)} < made.forms.keys()


def test_matrices_of_zeros_are_quantised_without_loss(tmp_path: Path):
    """Layers that were added to a model begin with such matrices."""
    shutil.copytree(MODELS / "llama-bias-tied", copy := tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    zeros = [name for name in tensors if name.endswith("o_proj.weight")]
    save_file({**tensors, **{name: np.zeros_like(tensors[name]) for name in zeros}}, copy / "model.safetensors")
    made = quantised_of(open_files(copy))
    assert zeros and all(not values_of(made.parts(name), made._result.widths[name]).any() for name in zeros)


def test_values_have_a_width_of_their_own():
    names = tuple(f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv")
    assert apart(names) == [names[:2], names[2:]]
    assert apart(names[:1]) == [names[:1]] and apart(names[2:]) == [names[2:]]


def test_what_cannot_be_measured_is_refused(cache: None, tmp_path: Path):
    with pytest.raises(LoadError, match=r"the text .*missing.txt cannot be read: No such file"):
        formed("4bit", str(tmp_path / "missing.txt"))
    short = tmp_path / "short.txt"
    short.write_text("Few words.")
    with pytest.raises(LoadError, match=r"has \d tokens, expected at least 64"):
        formed("4bit", str(short))
