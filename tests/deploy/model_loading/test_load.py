"""A worker loads a model from every kind of source, and the model computes the reference outputs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from gguf.constants import GGMLQuantizationType, PoolingType
from safetensors.numpy import save_file

from compiler.cache import Cache
from compiler.cache import load as load_entry
from compiler.frontend.decoder import BOTH
from compiler.frontend.reranker import QWEN3
from compiler.frontend.weights import open_safetensors
from compiler.ir.dtypes import DType
from compiler.ir.numbers import DOUBLED_E2M1, FLOATS_OF_CODES, Kind
from compiler.machine.formats import TABLE_PANELS, TablePanels
from compiler.machine.products import product_tiles
from compiler.machine.target import NAMED, host
from compiler.passes import lift_weights
from deploy.cache import Kept, Part
from deploy.generate import require_generator
from deploy.inspection import compiled, inspect_model, plan_load
from deploy.model_loading import modes, program
from deploy.model_loading.costs import largest_step, step_of
from deploy.model_loading.files import open_files
from deploy.model_loading.known import Progress, begin, silent
from deploy.model_loading.load import load_model
from deploy.model_loading.locate import locate, weigh
from deploy.model_loading.modes import mode_of
from deploy.model_loading.serving import CompiledModel
from deploy.model_loading.tokenizer import load_tokenizer
from deploy.verification import damage_of
from runtime.cache_groups import PAGE_SIZE
from runtime.sealed import key_of
from runtime.sections import SectionFile
from server.engine.step_model import GroupLimits, Places, StepBatch
from server.engine.worker import LoadedModel, engine_of
from server.interfaces import LoadError
from server.messages import LOCAL, Embed, Embedding, Failed, FromWorker, Load, SamplingParams, Submit
from server.models.state import ModelSpec
from server.scoring import ClassScores, Scoring
from tests.compiler.frontend.quantized_files import awq, bitsandbytes, gptq
from tests.deploy.gguf_files import VOCAB, write_gguf, write_random
from tests.disk import refuse_new_files
from tests.golden.vision import SUBJECTS

GOLDEN = Path(__file__).parents[2] / "golden" / "models"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that contains the models of this module."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def folder_of(place: Path) -> Callable[[str], Path]:
    """Return a function that copies a golden model to a folder and adds a tokenizer with one token per word."""

    def made(case: str) -> Path:
        folder = place / case
        if not folder.exists():
            shutil.copytree(GOLDEN / case, folder)
            tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(VOCAB)}, unk_token="a"))
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return made


def load(source: Path, **settings: Any) -> LoadedModel:
    return load_model(Load("m", str(source), **settings), lambda stage, fraction: None)


def texts_of(golden: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(golden["ids"], np.cumsum(golden["lengths"])[:-1])]


def embedded(loaded: LoadedModel, texts: list[list[int]], beside: Submit | None = None) -> Any:
    """Return the embeddings of texts, computed by a worker's engine. If `beside` is given, the engine generates an answer at the same
    time."""
    heard: dict[str, Embedding] = {}

    def hear(message: FromWorker) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Embedding):
            heard[message.request_id] = message

    engine = engine_of(loaded, hear, None)
    if beside is not None:
        engine.submit(beside)
        engine.step()
    for i, text in enumerate(texts):
        engine.embed(Embed(str(i), tuple(text), normalize=False))
    while engine.has_work:
        engine.step()
    engine.close()
    return np.stack([np.frombuffer(heard[str(i)].vector, "<f4") for i in range(len(texts))])


def unit(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def piece(tokens: Any, start: int, end: int, num_groups: int = 1) -> StepBatch:
    """Return a step with the tokens from `start` to `end` of one sequence, which uses the first pages of each cache group. The step gives
    the logits of its last token."""
    place = np.arange(start, end, dtype=np.int32)
    pages = np.arange(1, 2 + (end - 1) // PAGE_SIZE, dtype=np.int32)[None]
    count = np.array([end - start], np.int32)
    places = (Places(place + PAGE_SIZE, pages),) * num_groups
    return StepBatch(tokens[start:end], place, np.append(0, count).astype(np.int32), place * 0, count * 0 + end, places, count - 1)


def close(actual: Any, expected: Any) -> None:
    assert np.abs(actual - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", ["bert", "mpnet", "qwen3-embedding", "qwen2-both-ways"])
def test_embedding_models(case: str, folder_of: Callable[[str], Path]) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    loaded = load(folder_of(case), quantize="f32", max_batch=8)
    ready = loaded.ready
    assert (ready.embedding_size, ready.generates, ready.scoring) == (golden["embeddings"].shape[1], False, Scoring.COSINE)
    assert ready.embedding_note == "rerank and score compare embeddings by their cosine"
    texts = texts_of(golden)
    vectors = embedded(loaded, texts)
    close(unit(vectors), golden["embeddings"])
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(embedded(loaded, [text])[0], vector)


def test_what_sentence_transformers_wrote_reaches_the_front(folder_of: Callable[[str], Path]) -> None:
    ready = load(folder_of("bert-cls"), max_batch=8).ready
    assert (ready.normalize, dict(ready.prompts), ready.default_prompt) == (False, {"query": "Find: ", "document": ""}, "query")


@pytest.mark.parametrize(
    ("case", "names", "scores"),
    [
        ("bert-classes", ("low", "middle", "high"), ClassScores.SOFTMAX),
        ("xlm-roberta-reranker", ("LABEL_0",), ClassScores.SIGMOID),
        ("mpnet-classes", ("LABEL_0", "LABEL_1"), ClassScores.SIGMOID),
        ("llama-classes", ("low", "middle", "high"), ClassScores.SOFTMAX),
        ("qwen3-reranker", ("LABEL_0",), ClassScores.SIGMOID),
    ],
)
def test_models_that_classify(case: str, names: tuple[str, ...], scores: ClassScores, folder_of: Callable[[str], Path]) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    loaded = load(folder_of(case), quantize="f32", max_batch=8)
    ready = loaded.ready
    assert (ready.classes, ready.class_scores, ready.embedding_size, ready.generates) == (names, scores, 0, False)
    heard = list[Embedding]()
    engine = engine_of(loaded, lambda message: heard.append(message) if isinstance(message, Embedding) else None, None)
    for number, (text, second) in enumerate(zip(texts_of(golden), golden["seconds"].tolist(), strict=True)):
        engine.embed(Embed(str(number), tuple(text), normalize=False, second=second))
    while engine.has_work:
        engine.step()
    engine.close()
    found = {int(one.request_id): np.frombuffer(one.vector, "<f4") for one in heard}
    close(np.stack([found[number] for number in range(len(found))]), golden["logits"])


@pytest.mark.parametrize("stated", ["module", "field", "template"])
def test_a_decoder_judges_by_two_tokens(stated: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """A reranker that is a decoder (Qwen3-Reranker) scores a pair of texts by its last logits: the logit of `yes` minus the logit of `no`.
    The two tokens are stated in a file of sentence-transformers, or in a configuration field of vLLM. If neither is there, because the
    model was saved as one that generates, its chat template tells that it is a reranker, and the tokens are "yes" and "no"."""
    folder, golden = tmp_path / "judge", np.load(GOLDEN / "qwen3" / "golden.npz")
    shutil.copytree(folder_of("qwen3"), folder)
    config, words = json.loads((folder / "config.json").read_text()), json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    yes, no = 9, 5
    if stated == "module":
        modules = [{"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""}]
        modules.append({"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"})
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_LogitScore").mkdir()
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
        with pytest.raises(LoadError, match="expected the chat template of Qwen3-Reranker"):
            load(folder, quantize="f32", max_batch=8)
        (folder / "chat_template.jinja").write_text(QWEN3.before)
    elif stated == "template":
        (folder / "chat_template.jinja").write_text(QWEN3.before)
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
        with pytest.raises(LoadError, match=r"state classifier_from_token in config\.json; tokenizer\.json has no token 'no'"):
            load(folder, quantize="f32", max_batch=8)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        words = {{yes: "yes", no: "no"}.get(id, word): id for word, id in words.items()}
        tokenizer["model"]["vocab"] = words
        (folder / "tokenizer.json").unlink()  # the copy may be a link
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        spelled = {id: word for word, id in words.items()}
        config |= {"classifier_from_token": [spelled[no], spelled[yes]], "is_original_qwen3_reranker": True}
        (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder, quantize="f32", max_batch=8)
    ready = loaded.ready
    assert (ready.classes, ready.class_scores, ready.embedding_size) == (("relevant",), ClassScores.SIGMOID, 0)
    assert ready.pair_prompt is not None and ready.pair_prompt.before == QWEN3.before
    assert not ready.embeds_tokens and not ready.generates
    prompt = golden["prompt"].tolist()
    found = embedded(loaded, [prompt[:length] for length in (40, 3, 17, 1)])
    expected = golden["logits"][[39, 2, 16, 0]]
    close(found[:, 0], expected[:, yes] - expected[:, no])


def test_an_encoder_without_a_stated_pooling_says_so(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder_of("bert"), folder := tmp_path / "plain")
    (folder / "modules.json").unlink()
    note = load(folder, quantize="f32", max_batch=8).ready.embedding_note
    assert note.startswith("the model's files state no pooling, so the pooling is mean; rerank and score compare")


def test_a_reranker_saved_as_a_generator_scores_nothing(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Without its chat template, a folder of Qwen3-Reranker is that of any model that generates."""
    shutil.copytree(folder_of("qwen3"), folder := tmp_path / "judge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()  # the copy may be a link
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    ready = load(folder, quantize="f32", max_batch=8).ready
    assert ready.generates and ready.scoring is None
    assert (ready.embedding_size, ready.embeds_tokens, ready.embedding_note) == (0, False, "")


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_a_generating_model_embeds_beside(case: str, folder_of: Callable[[str], Path]) -> None:
    """A model that generates text can also compute embeddings, alone or while it generates. An embedding is the hidden state of the last
    token."""
    golden = np.load(GOLDEN / case / "golden.npz")
    loaded = load(folder_of(case), quantize="f32", max_batch=8, embeddings=True)
    ready = loaded.ready
    assert ready.generates and ready.embeds_tokens and ready.embedding_size == golden["hidden"].shape[1]
    assert ready.scoring is Scoring.COSINE and ready.embedding_note.startswith("the model was not trained for embeddings: ")
    prompt = golden["prompt"].tolist()
    close(embedded(loaded, [prompt])[0], golden["hidden"][-1])
    texts = [prompt[:length] for length in (40, 3, 17, 1, 16)]
    vectors = embedded(loaded, texts, beside=Submit("beside", tuple(prompt), SamplingParams(40, temperature=0.0, ignore_eos=True)))
    np.testing.assert_array_equal(vectors, [embedded(loaded, [text])[0] for text in texts])


@pytest.fixture
def with_images(folder_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes the folder of a vision model. Its decoder is the golden Gemma 3, and the names of the decoder's weights
    begin with the given prefix."""

    def made(prefix: str) -> Path:
        folder, source = tmp_path / prefix, open_safetensors(GOLDEN / "gemma3")
        folder.mkdir()
        shutil.copy(folder_of("gemma3") / "tokenizer.json", folder)
        text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
        tensors = {prefix + name.removeprefix("model."): source.read(name) for name in source.tensors}
        save_file({**tensors, "vision_tower.patch.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
        return folder

    return made


def test_the_decoder_in_a_model_with_images(with_images: Callable[[str], Path]) -> None:
    golden = np.load(GOLDEN / "gemma3" / "golden.npz")
    loaded = load(with_images("language_model.model."), quantize="f32", max_batch=8)
    close(embedded(loaded, [golden["prompt"].tolist()])[0], golden["hidden"][-1])


def test_both_places_of_a_decoder_in_a_model_with_images_are_known(with_images: Callable[[str], Path]) -> None:
    """Vision models store their decoder under one of two prefixes. The decoder is found under both, and its weights are the same, in the
    same order."""
    places = [with_images(prefix) for prefix in ("language_model.model.", "model.language_model.")]
    asked = [Load("m", str(place), "f32", max_batch=8) for place in places]
    first, second = ([w.name for w in mode_of(open_files(locate(one.source)), one).module().graph(BOTH).weights] for one in asked)
    assert len(first) == len(open_safetensors(GOLDEN / "gemma3").tensors)
    assert second == [name.replace("language_model.model.", "model.language_model.") for name in first]


@pytest.fixture(scope="module")
def packed(folder_of: Callable[[str], Path], place: Path) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that writes a golden Llama with quantised matrices to two folders. The first contains the dequantised values, the
    second the format of the quantisation method."""

    def made(method: str) -> tuple[Path, Path]:
        plain, stored = place / f"{method}-values", place / method
        if stored.exists():
            return plain, stored
        for folder in (plain, stored):
            shutil.copytree(folder_of("llama"), folder)
        source, rng = open_safetensors(plain), np.random.default_rng(0)
        floats, parts = dict[str, Any](), dict[str, Any]()
        for name in source.tensors:
            tensor = np.array(source.read(name))
            if not name.endswith("proj.weight"):
                floats[name] = parts[name] = tensor
                continue
            numbers = rng.integers(0, 16, tensor.T.shape)
            zeros = rng.integers(4, 12, (2, len(tensor))) if method == "awq" else np.full((2, len(tensor)), 8)
            scales = rng.random((2, len(tensor))).astype(np.float16) / 16
            groups = np.arange(len(numbers)) // (len(numbers) // 2)
            if method == "gptq-by-activation":
                groups = rng.permutation(groups)
            floats[name] = np.ascontiguousarray((scales.astype(np.float32)[groups] * (numbers - zeros[groups])).T.astype(np.float32))
            found = awq(numbers, zeros, scales) if method == "awq" else gptq(numbers, zeros, scales, 4, groups=groups)
            parts |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in found.items()}
        save_file(floats, plain / "model.safetensors")
        save_file(parts, stored / "model.safetensors")
        config = json.loads((stored / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method.partition("-")[0], "bits": 4, "group_size": 32} | (
            {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": method != "gptq", "sym": True}
        )
        (stored / "config.json").write_text(json.dumps(config))
        return plain, stored

    return made


def logits_of(folder: Path, quantize: str) -> tuple[Any, int]:
    """Return the logits of a prompt, and how many bytes the model's weights take."""
    loaded, tokens = load(folder, quantize=quantize, max_batch=8, kv_dtype="f32"), np.arange(1, 20, dtype=np.int32)
    assert loaded.step_model is not None
    batch = piece(tokens, 0, len(tokens), len(loaded.step_model.limits.groups))
    return loaded.step_model.download(loaded.step_model.run(batch)), loaded.ready.weights_bytes


OPENED = """
import sys
from collections import Counter
from pathlib import Path
opened = Counter()
from deploy.model_loading.files import open_files
sys.addaudithook(lambda event, args: opened.update([str(args[0])]) if event == "open" else None)
files = open_files(Path(sys.argv[1]))
print(files.held is not None, *sorted((Path(name).name, count) for name, count in opened.items() if name.startswith(sys.argv[1])))
"""


def test_each_file_of_a_folder_is_opened_once(packed: Callable[[str], tuple[Path, Path]]) -> None:
    """The values and the integers of a quantised checkpoint are two views of the same open files."""
    for folder, is_held in zip(packed("gptq"), (False, True), strict=True):
        command = [sys.executable, "-W", "error", "-c", OPENED, str(folder)]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        assert found == f"{is_held} ('config.json', 1) ('model.safetensors', 1)\n"


@pytest.mark.parametrize("method", ["gptq", "gptq-by-activation", "awq"])
def test_a_quantised_checkpoint_is_served_as_it_is(method: str, packed: Callable[[str], tuple[Path, Path]]) -> None:
    """If a quantised checkpoint is loaded as f32, its logits have the same bits as with dequantised values. If it is loaded as `auto`, its
    weights stay integers and take less memory. Then logits differ for two reasons: machines that multiply bytes round activations to 8
    bits, and the output head has 16 bits."""
    plain, stored = packed(method)
    (values, _), (read, decoded_bytes), (held, held_bytes) = logits_of(plain, "f32"), logits_of(stored, "f32"), logits_of(stored, "auto")
    assert values.tobytes() == read.tobytes()
    # Rounding activations to 8 bits causes an error of this size. Wrong zero points would cause an error of 1 or more.
    assert np.sqrt(np.square(held - values).mean()) < 0.1 * values.std()
    matrices = sum(prod(info.shape) for name, info in open_files(stored).weights.tensors.items() if name.endswith("proj.weight"))
    assert decoded_bytes - held_bytes > 3 * matrices  # each weight takes half a byte and part of a scale instead of 4 bytes


MATRICES = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")  # of attention, and of Mixtral's experts


@pytest.mark.parametrize(
    ("case", "block"), [("llama", (16, 32)), ("llama", None), ("mixtral", (16, 32))], ids=["blocks", "channels", "experts"]
)
def test_floats_of_eight_bits_are_served_as_they_are(
    case: str, block: tuple[int, int] | None, folder_of: Callable[[str], Path], place: Path
) -> None:
    """Loaded as f32, an fp8 checkpoint gives the same bits as its values. Loaded as `auto`, its weights stay in 8 bits, and logits differ
    only as much as they do if activations are rounded to bf16."""
    original, source, rng = folder_of(case), open_safetensors(folder_of(case)), np.random.default_rng(0)
    values, parts = dict[str, Any](), dict[str, Any]()
    for name in source.tensors:
        tensor = values[name] = parts[name] = np.array(source.read(name))
        if name.endswith(MATRICES):
            rows, columns = block or (1, tensor.shape[1])
            scales = (rng.random((-(-len(tensor) // rows), -(-tensor.shape[1] // columns))) / 512).astype(np.float32)
            wide = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: len(tensor), : tensor.shape[1]]
            parts[name] = (tensor.astype(np.float32) / wide).clip(-448, 448).astype(DType.E4M3.numpy)
            values[name] = parts[name].astype(np.float32) * wide
            parts[name.replace(".weight", ".weight_scale_inv")] = scales
    named = f"fp8-{case}-{'blocks' if block else 'channels'}"
    plain, stored = (shutil.copytree(original, place / f"{named}-{kind}") for kind in ("values", "stored"))
    save_file(values, plain / "model.safetensors")
    save_file(parts, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    (stored / "config.json").write_text(json.dumps(config))
    (wide, _), (read, decoded_bytes), (held, held_bytes) = logits_of(plain, "f32"), logits_of(stored, "f32"), logits_of(stored, "auto")
    again, _ = logits_of(stored, "auto")  # from the packed weights of the first load
    assert again.tobytes() == held.tobytes()
    assert wide.tobytes() == read.tobytes()
    assert np.sqrt(np.square(held - wide).mean()) < 0.03 * wide.std()
    matrices = sum(prod(info.shape) for name, info in open_files(stored).weights.tensors.items() if name.endswith(MATRICES))
    assert decoded_bytes - held_bytes > 2.7 * matrices


def test_a_mixture_in_nvfp4_is_served_as_it_is(folder_of: Callable[[str], Path], place: Path) -> None:
    """Loaded as f32, a checkpoint of Model Optimizer gives the same bits as its values. Loaded as `auto`, attention and experts stay floats
    of 4 bits, with a scale per 16 inputs."""
    original, source, rng = folder_of("mixtral"), open_safetensors(folder_of("mixtral")), np.random.default_rng(0)
    values, parts, num_matrices = dict[str, Any](), dict[str, Any](), 0
    for name in source.tensors:
        tensor = values[name] = parts[name] = source.read(name)
        if tensor.ndim == 2 and not any(part in name for part in ("embed", "lm_head", ".gate.")):
            num_matrices += tensor.size
            bits = rng.integers(0, 16, tensor.shape).astype(np.uint8)
            scales = (rng.random((len(tensor), tensor.shape[1] // 16)) + 0.5).astype(DType.E4M3.numpy)
            factor = np.array(0.02, np.float32)
            parts |= {name: bits[:, ::2] | bits[:, 1::2] << 4, f"{name}_scale": scales, f"{name}_scale_2": factor}
            wide = scales.astype(np.float32) * factor / 2
            values[name] = DOUBLED_E2M1[bits].astype(np.float32) * np.repeat(wide, 16, 1)
    plain, stored = (shutil.copytree(original, place / f"nvfp4-{kind}") for kind in ("values", "stored"))
    save_file(values, plain / "model.safetensors")
    save_file(parts, stored / "model.safetensors")
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (stored / "hf_quant_config.json").write_text(json.dumps(stated))
    (wide, _), (read, decoded_bytes), (held, held_bytes) = logits_of(plain, "f32"), logits_of(stored, "f32"), logits_of(stored, "auto")
    assert wide.tobytes() == read.tobytes()
    assert np.sqrt(np.square(held - wide).mean()) < 0.1 * wide.std()
    assert decoded_bytes - held_bytes > 3 * num_matrices


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_of_bitsandbytes_are_served_in_four_bits(folder_of: Callable[[str], Path], place: Path, kind: str) -> None:
    """Loaded as f32, a checkpoint gives the same bits as its values. Loaded as `auto`, matrices whose rows are whole groups keep their
    codes, which two products read."""
    original, source, rng = folder_of("llama"), open_safetensors(folder_of("llama")), np.random.default_rng(0)
    values, parts, num_held = dict[str, Any](), dict[str, Any](), 0
    for name in source.tensors:
        tensor = values[name] = parts[name] = source.read(name)
        if name.endswith("proj.weight"):
            num_held += tensor.size if tensor.shape[1] % 64 == 0 else 0
            codes, absmax = rng.integers(0, 16, tensor.shape).astype(np.uint8), rng.random(tensor.size // 64, np.float32) / 8
            floats = FLOATS_OF_CODES[Kind(kind)][codes].reshape(-1, 64) * absmax[:, None]
            values[name], stem = floats.reshape(tensor.shape), name.removesuffix("weight")
            del parts[name]
            parts |= {f"{stem}{part}": value for part, value in bitsandbytes(codes, absmax, kind).items()}
    plain, stored = (shutil.copytree(original, place / f"{kind}-{form}") for form in ("values", "stored"))
    save_file(values, plain / "model.safetensors")
    save_file(parts, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    (stored / "config.json").write_text(json.dumps(config))
    (wide, _), (read, decoded_bytes), (held, held_bytes) = logits_of(plain, "f32"), logits_of(stored, "f32"), logits_of(stored, "auto")
    assert wide.tobytes() == read.tobytes()
    assert np.sqrt(np.square(held - wide).mean()) < 0.03 * wide.std()
    assert num_held > 0 and decoded_bytes - held_bytes > 3.3 * num_held


def test_experts_in_mxfp4_are_served_as_they_are(folder_of: Callable[[str], Path], place: Path) -> None:
    """Loaded as f32, MXFP4 experts give the same bits as their values. Loaded as `auto`, they stay floats of 4 bits."""
    original, source, rng = folder_of("gpt_oss"), open_safetensors(folder_of("gpt_oss")), np.random.default_rng(0)
    values, parts = dict[str, Any](), dict[str, Any]()
    for name in source.tensors:
        tensor = values[name] = parts[name] = source.read(name)
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            bits = rng.integers(0, 16, (experts, outputs, inputs // 32, 32)).astype(np.uint8)
            scales = rng.integers(120, 125, (experts, outputs, inputs // 32)).astype(np.uint8)
            del parts[name]
            parts |= {f"{name}_blocks": bits[..., ::2] | bits[..., 1::2] << 4, f"{name}_scales": scales}
            floats = np.ldexp(DOUBLED_E2M1[bits].astype(np.float32), scales[..., None].astype(np.int32) - 128)
            values[name] = np.ascontiguousarray(floats.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32))
    plain, stored = (shutil.copytree(original, place / f"mxfp4-{kind}") for kind in ("values", "stored"))
    save_file(values, plain / "model.safetensors")
    save_file(parts, stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    (wide, _), (read, decoded_bytes), (held, held_bytes) = logits_of(plain, "f32"), logits_of(stored, "f32"), logits_of(stored, "auto")
    assert wide.tobytes() == read.tobytes()
    assert np.sqrt(np.square(held - wide).mean()) < 0.1 * wide.std()
    matrices = sum(prod(info.shape) for name, info in open_files(stored).weights.tensors.items() if "experts" in name)
    assert decoded_bytes - held_bytes > 3 * matrices


def test_a_small_cache_bounds_the_context(folder_of: Callable[[str], Path]) -> None:
    page_bytes = plan_load(Load("m", str(folder_of("qwen3")))).page_bytes
    loaded = load(folder_of("qwen3"), kv_cache_bytes=8 * page_bytes)
    assert loaded.step_model is not None
    assert (loaded.step_model.limits.groups[0].num_pages, loaded.ready.max_context) == (8, 7 * PAGE_SIZE)
    assert loaded.ready.context_note.startswith(f"context is {7 * PAGE_SIZE} of ")
    assert "raise kv_cache_bytes" in loaded.ready.context_note


def test_a_program_of_the_cache_binds_the_names_of_its_own_checkpoint(folder_of: Callable[[str], Path], place: Path) -> None:
    """Two checkpoints of the same encoder share a cached program, although the weight names of one checkpoint have a prefix because the
    checkpoint was saved with a task head."""
    plain, prefixed = folder_of("bert"), place / "bert-with-prefix"
    shutil.copytree(plain, prefixed)
    source = open_safetensors(plain)
    save_file({f"bert.{name}": source.read(name) for name in source.tensors}, prefixed / "model.safetensors")
    texts = texts_of(np.load(GOLDEN / "bert" / "golden.npz"))
    first, second = (load(folder, max_batch=8) for folder in (plain, prefixed))
    np.testing.assert_array_equal(embedded(first, texts), embedded(second, texts))


def test_a_decoder_embeds_texts_beyond_one_step(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "MAX_STEP_TOKENS", 64)
    loaded = load(folder_of("qwen3-embedding"), max_batch=8)
    random = np.random.default_rng(0)
    texts = [random.integers(3, 160, length).tolist() for length in (63, 1, 2, 129, 61)]
    np.testing.assert_array_equal(embedded(loaded, texts), [embedded(loaded, [text])[0] for text in texts])


def test_the_second_load_comes_from_the_cache(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    first = load(folder_of("roberta"))
    second = load(folder_of("roberta"))
    assert (first.ready.cache_hit, second.ready.cache_hit) == (False, True)
    np.testing.assert_array_equal(embedded(first, [[5, 6, 7]]), embedded(second, [[5, 6, 7]]))


def test_packed_weights_are_as_old_as_their_last_use(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    load(folder_of("llama"), quantize="int8")
    (packed,) = (item for item in Kept(tmp_path).items() if item.part is Part.WEIGHTS)
    os.utime(packed.paths[0], (0, 0))
    inode = packed.paths[0].stat().st_ino
    load(folder_of("llama"), quantize="int8")
    assert packed.paths[0].stat().st_mtime >= packed.used_s and packed.paths[0].stat().st_ino == inode
    packed.paths[0].unlink()  # delete the packed weights, as `cache prune` does
    load(folder_of("llama"), quantize="int8")
    assert packed.paths[0].exists()


@pytest.mark.parametrize("found", ["at the start", "beside the model"])
def test_packed_weights_with_a_flipped_bit_are_built_again(
    found: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a bit of the packed weights is flipped, they are packed again. If the last process that used the weights was killed, the bit is
    found before the model starts. Otherwise it is found while the model runs, and the worker is replaced."""
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    sound = embedded(load(folder_of("bert"), quantize="int8"), [[5, 6, 7]])
    (packed,) = (item.paths[0] for item in Kept(tmp_path).items() if item.part is Part.WEIGHTS)
    content = bytearray(packed.read_bytes())
    largest = max(SectionFile(packed, key_of(packed.parent))._sections.values(), key=lambda section: section.size)
    content[largest.offset + largest.size // 2] ^= 64
    packed.unlink()  # do not overwrite the file, because the first load has mapped it
    packed.write_bytes(content)
    if found == "at the start":
        packed.with_name(f"{packed.name}.used-killed").touch()
    again = load(folder_of("bert"), quantize="int8")
    assert again.damage is not None
    if found == "at the start":
        assert again.damage() == ""
    else:
        assert "its checksum differs" in again.damage() and not packed.exists()
        again = load(folder_of("bert"), quantize="int8", verify=True)
    np.testing.assert_array_equal(embedded(again, [[5, 6, 7]]), sound)
    assert damage_of(packed) == ""


def refuse_writes(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Let everything that creates a file or a folder in the cache fail, as on a full or read-only disk."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    refuse_new_files(monkeypatch, error)
    monkeypatch.setattr(Path, "mkdir", refuse)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_cache_that_cannot_be_written_is_done_without(
    error: int,
    has_folder: bool,
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full or read-only cache costs time at the start, and the log says so; the model is served."""
    sound = embedded(load(folder_of("bert"), quantize="int8"), [[5, 6, 7]])
    if has_folder:
        for name in ("executables", "weights"):
            (tmp_path / name).mkdir()
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    refuse_writes(monkeypatch, error)
    np.testing.assert_array_equal(embedded(load(folder_of("bert"), quantize="int8"), [[5, 6, 7]]), sound)
    assert "the compiled program cannot be stored in the cache" in caplog.text and "packed weights cannot be stored" in caplog.text
    assert os.strerror(error) in caplog.text


def test_a_cache_that_is_no_folder_is_done_without(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "file"))
    load(folder_of("bert"), quantize="int8")
    assert "file/executables: Not a directory; free space there or set RELAXSERVE_CACHE" in caplog.text


@pytest.mark.parametrize("part", ["", "executables", "weights", "exports"])
def test_a_cache_that_others_can_write_to_is_refused(
    part: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The refusal comes before anything is compiled or read."""
    (tmp_path / part).mkdir(exist_ok=True)
    (tmp_path / part).chmod(0o777)
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(program, "_compiled", None)
    with pytest.raises(LoadError, match=rf"the cache {tmp_path / part} can be written by others \(owner \d+, .*mode 0777.*chmod go-w"):
        load(folder_of("llama"))


def test_a_lesser_target_gets_code_of_its_own(folder_of: Callable[[str], Path], cache_folder: Path) -> None:
    least = "x86-64-v3" if host().arch == "x86_64" else "aarch64-neon"
    lesser = load(folder_of("roberta"), target=least)
    entries = [*Cache(cache_folder / "executables").entries(lesser.ready.signature)]  # earlier runs may have had other limits
    assert {load_entry(entry, key_of(entry.path.parent)).meta.target for entry in entries} == {NAMED[least].key}
    shared = load(folder_of("roberta")).ready.signature == lesser.ready.signature
    assert shared == (host().key == NAMED[least].key), "the programs are equal exactly on a machine of the least target"
    with pytest.raises(LoadError, match="unknown target 'avx3'; known: host, ") as refused:
        load(folder_of("roberta"), target="avx3")
    assert refused.value.code == "invalid_value"


def test_progress_is_told_by_stage(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path))  # the first load compiles
    monkeypatch.setattr(lift_weights, "PART_BYTES", 4096)
    told: list[tuple[str, float]] = []
    for load_number in range(2):
        told.clear()
        load_model(Load("m", str(folder_of("gemma2")), "int8"), lambda stage, fraction: told.append((stage, fraction)))
        assert list(dict.fromkeys(stage for stage, _ in told)) == ["fetch", "verify", "compile", "pack", "warm-up"]
        by_stage = {stage: [fraction for name, fraction in told if name == stage] for stage, _ in told}
        assert all(fractions == sorted(fractions) and 0 <= fractions[-1] <= 1 for fractions in by_stage.values())
        assert all(len(by_stage[stage]) > (5 if load_number == 0 else 1) for stage in ("compile", "pack"))
        assert all(by_stage[stage][-1] == pytest.approx(1) for stage in ("compile", "pack", "warm-up"))


@pytest.mark.parametrize("case", ["bert", "qwen3-embedding"])
def test_the_plan_is_what_the_load_takes(case: str, folder_of: Callable[[str], Path]) -> None:
    """Loading takes exactly the planned memory. The plan of an encoder has no KV cache. The plan of a decoder that only embeds has pages
    for the texts of two steps, whatever the memory limit."""
    plan = plan_load(Load("m", str(folder_of(case)), max_batch=8))
    ready = load(folder_of(case), max_batch=8).ready
    assert (plan.weights_bytes, plan.arena_bytes, plan.kv_cache_bytes) == (ready.weights_bytes, ready.arena_bytes, ready.kv_cache_bytes)
    assert plan.num_pages == (0 if case == "bert" else 1 + ready.max_context // PAGE_SIZE + 2 * (512 // PAGE_SIZE + 8))
    with pytest.raises(LoadError, match="the model takes"):
        load(folder_of(case), memory_limit_bytes=plan.total_bytes - max(1, plan.kv_cache_bytes))


def test_the_plan_has_memory_for_an_image_that_is_encoded_between_steps() -> None:
    asked = Load("m", str(SUBJECTS["idefics3"].folder), "f32", max_batch=8)
    plan = plan_load(asked)
    limited = msgspec.structs.replace(asked, memory_limit_bytes=plan.total_bytes, kv_cache_bytes=plan.kv_cache_bytes)
    model = load_model(limited, lambda _stage, _fraction: None).step_model
    assert isinstance(model, CompiledModel)
    size = largest_step(model.limits)
    while not model.encode({b"image": model.limits.excerpts[0].example}):
        model.run(step_of(model.limits, num_seqs=1, num_each=size, context=size))
    parts = model._session.memory.parts
    assert parts["calls in parts"] > 0 and parts["arena"] + parts["calls in parts"] <= plan.arena_bytes


def test_the_kv_cache_takes_its_share_of_the_room(folder_of: Callable[[str], Path]) -> None:
    """The KV cache gets its share of the free memory. It gets more if the share is too small for one sequence of full length."""
    asked = Load("m", str(folder_of("qwen3")), "f32", max_context=64, max_batch=64)
    whole = plan_load(asked)
    fixed_bytes, pages = whole.weights_bytes + whole.arena_bytes, 4096 // PAGE_SIZE
    limited = msgspec.structs.replace(asked, memory_limit_bytes=fixed_bytes + 100 * whole.page_bytes)
    assert plan_load(limited).num_pages == 100 < pages
    assert plan_load(msgspec.structs.replace(limited, kv_share=0.5)).num_pages == 50
    assert plan_load(msgspec.structs.replace(limited, kv_share=0.5, reserved_bytes=40 * whole.page_bytes)).num_pages == 30
    assert plan_load(msgspec.structs.replace(limited, kv_share=0.01)).num_pages == 64 // PAGE_SIZE + 1


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        pytest.param("gemma3", [(1, None, 16), (3, 12, 16)], marks=pytest.mark.slow),
        ("gemma4", [(2, None, 16), (2, 12, 16)]),  # two further layers reuse the keys and values of these layers
        pytest.param("lfm2", [(1, None, 16), (3, 17, 16)], marks=pytest.mark.slow),
        # A page of states covers 64 tokens, because a state takes as much memory as the keys and values of 59 tokens.
        ("qwen3_next", [(1, None, 16), (3, 65, 64)]),
    ],
)
def test_each_cache_group_has_pages_of_its_own(case: str, kinds: list[Any], folder_of: Callable[[str], Path]) -> None:
    """Each cache group has its own pages. A group with a window or with states needs only a fixed number of pages per sequence, however
    long the sequence. If the cache is small, all groups get fewer pages."""
    asked = Load("m", str(folder_of(case)), max_batch=64)
    whole = plan_load(asked)
    assert [(group.num_layers, group.window, group.page_size) for group in whole.groups] == kinds
    assert whole.kv_cache_bytes == sum(group.num_pages * group.page_bytes for group in whole.groups)
    kept, few = whole.groups
    assert kept.num_pages == 1 + 64 * 256 // PAGE_SIZE
    of_a_token = GroupLimits(0, few.window, page_size=few.page_size).most_pages(1)
    assert of_a_token is not None and few.num_pages <= 1 + 64 * of_a_token + 512 // PAGE_SIZE
    tight = plan_load(msgspec.structs.replace(asked, kv_cache_bytes=whole.kv_cache_bytes // 3))
    assert tight.kv_cache_bytes <= whole.kv_cache_bytes // 3
    assert all(2 <= group.num_pages < before.num_pages for group, before in zip(tight.groups, whole.groups, strict=True))


def test_a_kv_cache_may_take_a_share_of_what_other_parts_leave(folder_of: Callable[[str], Path]) -> None:
    asked = Load("m", str(folder_of("qwen3")), "f32", max_context=256, max_batch=64)
    whole = plan_load(asked)
    room = whole.kv_cache_bytes // 2
    limit = whole.weights_bytes + whole.arena_bytes + whole.graphs_bytes + room
    for share in (0.25, 0.75):
        plan = plan_load(msgspec.structs.replace(asked, kv_cache_bytes=share, memory_limit_bytes=limit))
        assert room * share - whole.page_bytes < plan.kv_cache_bytes <= room * share
    plenty = plan_load(msgspec.structs.replace(asked, kv_cache_bytes=0.5, memory_limit_bytes=1 << 50))
    assert plenty.kv_cache_bytes == whole.kv_cache_bytes, "as many pages as all sequences can use"


@pytest.mark.parametrize("kv_cache_bytes", [None, 1 << 40])
def test_the_advice_of_a_refusal_can_be_followed(kv_cache_bytes: int | None, folder_of: Callable[[str], Path]) -> None:
    asked = Load("m", str(folder_of("qwen3")), "f32", max_context=64, max_batch=8, kv_cache_bytes=kv_cache_bytes)
    whole = plan_load(msgspec.structs.replace(asked, kv_cache_bytes=None))
    room = whole.weights_bytes + whole.arena_bytes + 3 * whole.page_bytes
    with pytest.raises(LoadError, match=r"takes [\d,.]+ .iB: .* [\d,.]+ MiB are free\. (kv_cache_bytes|max_context)=\d+ fits") as refused:
        plan_load(msgspec.structs.replace(asked, memory_limit_bytes=room))
    found = re.search(r"(kv_cache_bytes|max_context)=(\d+) fits", refused.value.message)
    assert found is not None and found[1] == ("max_context" if kv_cache_bytes is None else "kv_cache_bytes")
    followed = msgspec.structs.replace(asked, memory_limit_bytes=room, **{found[1]: int(found[2])})
    assert plan_load(followed).total_bytes <= room


def test_weights_that_leave_no_room_are_told_with_other_remedies(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(LoadError, match="Its weights leave no room: choose int8 or 4bit weights, unload another model, or raise memory"):
        plan_load(Load("m", str(folder_of("qwen3")), memory_limit_bytes=1 << 10))


def test_what_weights_will_take_is_estimated_by_their_files(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert weigh(ModelSpec("m", str(folder))) == num_bytes
    assert weigh(ModelSpec("m", str(folder), "int4-64")) == num_bytes // 4
    assert weigh(ModelSpec("m", "nobody/nothing")) == 0
    elsewhere = ModelSpec("m", str(folder), stages=("there", "there too", LOCAL))
    assert weigh(elsewhere) == weigh(ModelSpec("m", str(folder))) // 3


# --- GGUF files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(place: Path) -> Path:
    (folder := place / "gguf").mkdir()
    write_gguf(folder / "m.gguf")
    return folder / "m.gguf"


def test_a_gguf_file_generates(gguf_file: Path) -> None:
    golden = np.load(GOLDEN / "qwen2" / "golden.npz")
    loaded = load(gguf_file, quantize="f32")
    model = loaded.step_model
    assert model is not None and loaded.eos_ids == (2,) and loaded.ready.generates
    prompt = golden["prompt"]
    close(model.download(model.run(piece(prompt, 0, len(prompt))))[0], golden["logits"][-1])


def test_numbers_of_iq4_are_served_in_four_bits(tmp_path: Path) -> None:
    """Loaded as f32, a file in IQ4_NL gives the logits of its values. Loaded as `auto`, its weights take half a byte and part of a scale on
    machines that multiply bytes, and a byte elsewhere."""
    write_gguf(tmp_path / "m.gguf", kind=GGMLQuantizationType.IQ4_NL)
    (values, decoded_bytes), (held, held_bytes) = logits_of(tmp_path / "m.gguf", "f32"), logits_of(tmp_path / "m.gguf", "auto")
    assert np.sqrt(np.square(held - values).mean()) < 0.1 * values.std()
    tensors = open_files(tmp_path / "m.gguf").weights.tensors
    matrices = sum(prod(info.shape) for name, info in tensors.items() if name.endswith("proj.weight"))
    in_four_bits = any(tile.format is TABLE_PANELS[Kind.IQ4] for tile in product_tiles(host()).integers)
    assert decoded_bytes - held_bytes > (3.3 if in_four_bits else 2.8) * matrices


# tests/compiler/frontend/gguf unpacks every format; here is one of each table of numbers
@pytest.mark.parametrize(
    "name",
    ["TQ2_0", "IQ1_M", "IQ2_S", "IQ3_XXS", "IQ3_S"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("TQ1_0", "IQ1_S", "IQ2_XXS", "IQ2_XS")],
)
def test_small_formats_keep_their_numbers_in_four_bits(tmp_path: Path, name: str) -> None:
    """Loaded as f32, a file gives the bits of the same model in f32. Loaded as `auto`, its weights take half a byte and part of a scale."""
    kind = GGMLQuantizationType[name]
    write_random(tmp_path / "m.gguf", kind)
    write_random(tmp_path / "values.gguf", kind, decoded=True)
    expected, _ = logits_of(tmp_path / "values.gguf", "f32")
    values, decoded_bytes = logits_of(tmp_path / "m.gguf", "f32")
    np.testing.assert_array_equal(values, expected)
    held, held_bytes = logits_of(tmp_path / "m.gguf", "auto")
    assert np.sqrt(np.square(held - values).mean()) < 0.05 * values.std()
    in_four_bits = any(isinstance(tile.format, TablePanels) for tile in product_tiles(host()).integers)
    assert decoded_bytes - held_bytes > (32 - (4.7 if in_four_bits or name[0] == "T" else 8.7)) / 32 * 0.99 * decoded_bytes


def test_a_gguf_file_with_a_pooling_embeds(tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "qwen2" / "golden.npz")
    write_gguf(tmp_path / "m.gguf", pooling=PoolingType.LAST)
    loaded = load(tmp_path / "m.gguf", quantize="f32")
    ready, hidden = loaded.ready, golden["hidden"][-1]
    assert (ready.generates, ready.scoring, ready.embedding_size) == (False, Scoring.COSINE, len(hidden))
    close(unit(embedded(loaded, [golden["prompt"].tolist()])), unit(hidden[None]))
    write_gguf(tmp_path / "mean.gguf", pooling=PoolingType.MEAN)
    with pytest.raises(LoadError, match=r"mean\.gguf pools by mean; in a decoder, only the last token attends to all others"):
        load(tmp_path / "mean.gguf", quantize="f32")


SECOND_START = """
import sys
import tempfile
from math import prod
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
from deploy.model_loading.load import load_model
from deploy.model_loading.known import silent
from server.messages import Load
ready = load_model(Load("m", sys.argv[1], quantize="f32"), silent).ready
named = [name for name in opened if isinstance(name, str | Path)]
print(ready.cache_hit, sum(Path(name).name == "m.gguf" for name in named))
print(*sys.modules)
"""


def test_a_second_start_opens_a_gguf_file_once_and_imports_no_compiler_and_no_front(gguf_file: Path) -> None:
    """A second start opens a GGUF file only once, for tokenizer, configuration and weights. It takes the compiled program from the cache,
    so it imports neither the compiler nor the HTTP front."""
    load(gguf_file, quantize="f32")
    command = [sys.executable, "-W", "error", "-c", SECOND_START, str(gguf_file)]
    found, modules = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert found == "True 1"
    needless = ("compiler.driver", "compiler.backends", "compiler.passes", "asyncio", "fastapi", "prometheus_client")
    assert [name for name in modules.split() if name.startswith(needless)] == []


def test_a_folder_with_one_gguf_file_is_that_file(gguf_file: Path) -> None:
    assert load_tokenizer(str(gguf_file.parent)).eos_ids == load_tokenizer(str(gguf_file)).eos_ids == (2,)
    shutil.copy(gguf_file, gguf_file.with_name("n.gguf"))
    with pytest.raises(LoadError, match=r"m\.gguf, n\.gguf; name one of the files"):
        load_tokenizer(str(gguf_file.parent))


# --- refused models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_module(*_: object) -> None:
        raise AssertionError("it was compiled before it was refused")

    monkeypatch.setattr(program, "_compiled", compile_module)
    monkeypatch.setenv("RELAXSERVE_NO_CACHE", "1")


def classifies_tokens(folder_of: Callable[[str], Path], folder: Path) -> str:
    shutil.copytree(folder_of("bert"), folder)
    source = open_safetensors(folder_of("bert"))
    head = {"classifier.weight": np.zeros((1, 64), np.float32), "classifier.bias": np.zeros(1, np.float32)}
    save_file({**{f"bert.{name}": source.read(name) for name in source.tensors}, **head}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForTokenClassification"]}))
    return r"Tensors 2 not part of the model: classifier.bias, classifier.weight. The model is a BertForTokenClassification: its"


def a_gguf_without_merges(folder_of: Callable[[str], Path], folder: Path) -> str:
    folder.mkdir()
    write_gguf(folder / "m.gguf", merges=False)
    return r"tokenizer.ggml.merges is a NoneType, expected an array of texts"


def lacks_a_tensor(folder_of: Callable[[str], Path], folder: Path) -> str:
    shutil.copytree(folder_of("qwen3"), folder)
    source = open_safetensors(folder_of("qwen3"))
    save_file({name: source.read(name) for name in source.tensors if name != "model.norm.weight"}, folder / "model.safetensors")
    return r"Tensors 1 missing: model.norm.weight \["


def lacks_a_tokenizer(folder_of: Callable[[str], Path], folder: Path) -> str:
    shutil.copytree(folder_of("qwen3"), folder)
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json is missing"


@pytest.mark.parametrize("make", [classifies_tokens, a_gguf_without_merges, lacks_a_tensor, lacks_a_tokenizer])
def test_inspect_and_serve_refuse_the_same_before_anything_is_compiled(
    make: Callable[[Callable[[str], Path], Path], str], folder_of: Callable[[str], Path], tmp_path: Path, no_compiler: None
) -> None:
    def served(load: Load, progress: Progress) -> None:
        """Load a model as the front and the worker do together."""
        load_tokenizer(load.source)
        load_model(load, progress)

    def compiled_only(load: Load, progress: Progress) -> None:
        compiled(begin(load, progress))

    complaint = make(folder_of, folder := tmp_path / "model")
    asked = Load("m", str(folder))
    for use in (served, inspect_model, compiled_only):
        with pytest.raises(LoadError, match=complaint):
            use(asked, silent)
    with pytest.raises(LoadError, match=complaint):
        plan_load(asked)


@pytest.mark.parametrize("case", ["bert", "qwen3-embedding"])
def test_generate_refuses_a_model_of_embeddings_before_it_is_compiled(
    case: str, folder_of: Callable[[str], Path], no_compiler: None
) -> None:
    with pytest.raises(LoadError, match="gives embeddings and generates no text") as refused:
        require_generator(Load("m", str(folder_of(case))), silent)
    assert refused.value.code == "not_a_generative_model"
    assert require_generator(Load("m", str(folder_of("qwen3"))), silent).mode.generates


def test_a_decoder_that_pools_otherwise_is_refused(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3-embedding").parent / "mean"
    shutil.copytree(folder_of("qwen3-embedding"), folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with pytest.raises(LoadError, match="pools by mean; in a decoder, only the last token attends to all others"):
        load(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_weight_that_is_missing_is_named(name: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    lacking = shutil.copytree(folder_of("qwen3"), tmp_path / "model")
    source = open_safetensors(folder_of("qwen3"))
    save_file({other: source.read(other) for other in source.tensors if other != name}, lacking / "model.safetensors")
    with pytest.raises(LoadError, match=rf"Tensors 1 missing: {name} \["):
        load(lacking)


@pytest.mark.parametrize("case", ["bert", "qwen3", "qwen3-embedding"])
def test_weights_that_are_no_numbers_are_refused(case: str, folder_of: Callable[[str], Path], place: Path) -> None:
    damaged = place / f"damaged-{case}"
    shutil.copytree(folder_of(case), damaged)
    source = open_safetensors(damaged)
    tensors = {name: np.array(source.read(name)) for name in source.tensors}
    max(tensors.values(), key=lambda tensor: tensor.size)[0, 0] = np.nan
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(LoadError, match="has values that are not finite numbers; its file may be damaged"):
        load(damaged, max_batch=8)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config\.json"):
        load(tmp_path)
