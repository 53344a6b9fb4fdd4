"""`relaxserve bench quality`: the effect of each quantisation scheme on a model's predictions, compared with plain rounding of the same
weights.

The reference is the float program, entirely in f32. The measures are the KL divergence from the reference's distribution of the next token,
how often the most probable token is the same, and the perplexity. The text is a file (`--text`), cut into sequences that begin without
context, or else it is sampled from the float model itself, so that no corpus is needed. `rounded` is the float program with weights that
NumPy rounds to nearest in the same format. `auto` and formats with a budget of bits have no `rounded`, because they do not round all
weights to one format. The difference between `rounded` and the scheme is caused by our kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from compiler.bind import bind_weights
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.weights import TensorInfo, WeightSource
from compiler.ir.dtypes import DType
from deploy import demo
from deploy.bench.arguments import at_least, whole
from deploy.bench.checkpoint import PREFIX, model_folder
from deploy.bench.synthetic import SHAPES
from deploy.model_loading.costs import tables_of
from deploy.model_loading.files import ModelFiles, Opened, open_files
from deploy.model_loading.known import Asked, begin, carried
from deploy.model_loading.locate import locate
from deploy.model_loading.plan import Planned
from deploy.model_loading.serving import CompiledModel, serve
from deploy.model_loading.stages import advance
from deploy.model_loading.tokenizer import TokenizerSource
from deploy.model_loading.weights import Bound
from deploy.quality.text import tokens_of
from server.engine.step_model import Places, StepBatch
from server.interfaces import LoadError
from server.messages import ErrorCode, Load

SCHEMES = ("bf16", "int8", "int8-fast", "int8-128", "4bit", "int4-32", "int4-64", "int4-128")
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"

Floats = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """How far the predictions of a scheme are from those of the reference. The fields `rounded_...` are those of plainly rounded weights,
    or None for a scheme without `rounded`."""

    scheme: str
    kl_divergence: float  # nats per token
    top1_agreement: float  # share of tokens after which the same next token is the most probable
    perplexity: float  # perplexity of the scheme
    exact_perplexity: float  # perplexity of the reference
    rounded_kl_divergence: float | None = None
    rounded_top1_agreement: float | None = None


# --- rounded weights ----------------------------------------------------------------------------------------------------


def round_to_nearest(w: Floats, format: WeightFormat) -> Floats:
    """Quantise symmetrically, so that the largest magnitude of each group becomes the largest integer, and return the dequantised
    values."""
    if format.bits == 32:
        return w
    if format.bits == 16:
        return w.astype(DType.BF16.numpy).astype(np.float32)
    groups = w.reshape(w.shape[0], -1, format.group or w.shape[1])
    scale = np.abs(groups).max(-1, keepdims=True) / (2 ** (format.bits - 1) - 1)
    return (np.rint(groups / np.where(scale == 0, 1, scale)) * scale).reshape(w.shape).astype(np.float32)


class Rounded:
    """A float checkpoint whose product weights are rounded to a format and returned as f32. Embeddings are not rounded, so a head tied to
    the embedding becomes a separate tensor."""

    def __init__(self, source: WeightSource, format: WeightFormat, *, head_from: str | None) -> None:
        """`head_from`: the table of embeddings from which the head is made; None: the checkpoint has a head."""
        self._source = source
        self._format = format
        # The format in which the program holds the head.
        self._head_format = WeightFormat(max(format.bits, 8), format.group if format.bits >= 8 else 0)
        self._sources = {name: name for name in source.tensors} | ({HEAD: head_from} if head_from else {})
        shapes = {name: source.tensors[origin].shape for name, origin in self._sources.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, np.dtype(np.float32), 4 * int(np.prod(shape))) for name, shape in shapes.items()
        }

    def read(self, name: str) -> NDArray[Any]:
        w = np.asarray(self._source.read(self._sources[name])).astype(np.float32)
        if w.ndim != 2 or name.endswith(EMBEDDINGS):
            return w
        return round_to_nearest(w, self._head_format if name == HEAD else self._format)

    def release(self, name: str) -> None:
        self._source.release(self._sources[name])

    def digest(self) -> str:
        return f"{self._format}-{self._source.digest()}"


def rounded_files(files: ModelFiles, format: WeightFormat) -> ModelFiles:
    """Return the model's files with rounded weights, and with a head that is not tied to the embeddings."""
    tied = files.config.tie_word_embeddings
    head_from = next(name for name in files.weights.tensors if name.endswith(EMBEDDINGS)) if tied else None
    weights = Rounded(files.weights, format, head_from=head_from)
    return replace(files, config=replace(files.config, tie_word_embeddings=False), weights=weights, held=None)


# --- logits -------------------------------------------------------------------------------------------------------------


def _places(table: NDArray[np.int32], position: int, size: int) -> Places:
    """Return the slots and page tables for one token per sequence at this position, with pages of `size` tokens."""
    page, offset = divmod(position, size)
    return Places(table[:, page] * size + offset, table[:, : page + 1].copy())


@dataclass(frozen=True, slots=True)
class Texts:
    """Equally long sequences that run in the same batch. Each step computes one token of each sequence."""

    num_seqs: int
    length: int  # tokens of each sequence
    seed: int  # the seed with which `draw` samples tokens

    def logits(self, model: CompiledModel, next_tokens: Callable[[int, Floats | None], NDArray[np.int32]]) -> list[Floats]:
        """Return the logits at every position. `next_tokens` returns the tokens at a position, given the logits of the previous
        position."""
        assert self.length <= model.limits.capacity, model.limits
        sizes = [group.page_size for group in model.limits.groups]
        tables = [tables_of(of, self.num_seqs, -(-self.length // of.page_size)) for of in model.limits.groups]
        rows, starts = np.arange(self.num_seqs, dtype=np.int32), np.arange(self.num_seqs + 1, dtype=np.int32)
        found: list[Floats] = []
        for position in range(self.length):
            batch = StepBatch(
                tokens=next_tokens(position, found[-1] if found else None),
                positions=np.full(self.num_seqs, position, np.int32),
                query_starts=starts,
                seq_ids=rows,
                context_lens=np.full(self.num_seqs, position + 1, np.int32),
                places=tuple(_places(table, position, size) for table, size in zip(tables, sizes, strict=True)),
                logit_rows=rows,
            )
            found.append(model.download(model.run(batch)))
        return found

    def draw(self, model: CompiledModel) -> tuple[NDArray[np.int32], list[Floats]]:
        """Sample tokens from the model after a random first token. Return the tokens, [length, sequences], and the logits after each
        token."""
        rng = np.random.default_rng(self.seed)
        tokens = np.empty((self.length, self.num_seqs), np.int32)

        def choose(position: int, logits: Floats | None) -> NDArray[np.int32]:
            if logits is None:
                tokens[position] = rng.integers(0, model.limits.vocab_size, self.num_seqs)
            else:
                tokens[position] = np.argmax(logits + rng.gumbel(size=logits.shape), -1)
            return tokens[position]

        return tokens, self.logits(model, choose)


def compare(expected: list[Floats], found: list[Floats]) -> tuple[float, float]:
    """Return the KL divergence of `found` from `expected` in nats, averaged over all tokens, and the share of tokens after which the most
    probable next token is the same. Both lists have an array of logits per position."""
    divergences, agreements = [], []
    for e, f in zip(expected, found, strict=True):
        p, q = _log_softmax(e), _log_softmax(f)
        divergences.append(np.mean(np.sum(np.exp(p) * (p - q), -1)))
        agreements.append(np.mean(e.argmax(-1) == f.argmax(-1)))
    return float(np.mean(divergences)), float(np.mean(agreements))


def perplexity(tokens: NDArray[np.int32], logits: list[Floats]) -> float:
    """Return the perplexity of tokens [length, sequences] after the first, given the logits after each token."""
    predicted = [np.take_along_axis(_log_softmax(row), after[:, None], -1) for row, after in zip(logits, tokens[1:], strict=False)]
    return float(np.exp(-np.mean(predicted)))


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), -1, keepdims=True))


# --- models -------------------------------------------------------------------------------------------------------------


def measure(folder: Path, schemes: list[str], texts: Texts, text: Path | None = None) -> list[Row]:
    """Measure each scheme on the beginning of a file, `text`, or on texts that the float model writes. Raise LoadError if the model cannot
    be loaded or does not generate text, or if the file has too few tokens."""
    files = open_files(locate(str(folder)))
    if not files.config.is_causal:
        raise LoadError(
            ErrorCode.NOT_A_GENERATIVE_MODEL, f"{folder} computes embeddings; quality can only be measured of models that generate text"
        )
    floats = WeightFormat.parse("f32")
    exact = rounded_files(files, floats)
    if text is None:
        tokens, expected = _with_model(exact, "f32", texts, texts.draw)
    else:
        tokens = _sequences(tokens_of(TokenizerSource(files.path, files.gguf), text), texts)
        expected = _with_model(exact, "f32", texts, lambda model: texts.logits(model, lambda position, _: tokens[position]))
    rows: list[Row] = []
    for scheme in schemes:

        def read(model: CompiledModel) -> list[Floats]:
            return texts.logits(model, lambda position, _: tokens[position])

        found = _with_model(files, scheme, texts, read)
        measures = *compare(expected, found), perplexity(tokens, found), perplexity(tokens, expected)
        format = WeightFormat.parse(scheme)
        is_plain = not format.as_stored
        rounded = compare(expected, _with_model(rounded_files(files, format), "f32", texts, read)) if is_plain else ()
        rows.append(Row(scheme, *measures, *rounded))
    return rows


def _sequences(tokens: list[int], texts: Texts) -> NDArray[np.int32]:
    """Cut a text into sequences: tokens [length, sequences]. Raise LoadError if the text is too short."""
    needed = texts.num_seqs * texts.length
    if len(tokens) < needed:
        raise LoadError(
            ErrorCode.INVALID_VALUE, f"the text has {len(tokens)} tokens; {texts.num_seqs} sequences of {texts.length} need {needed}"
        )
    return np.ascontiguousarray(np.array(tokens[:needed], np.int32).reshape(texts.num_seqs, texts.length).T)


def _with_model(files: ModelFiles, quantize: str, texts: Texts, use: Callable[[CompiledModel], T]) -> T:
    """Load a model in a format of weights, return what `use` returns for it, and unload it."""
    asked = begin(Load("quality", str(files.path), quantize, max_context=texts.length, max_batch=texts.num_seqs))
    files = replace(files, is_embedder=False)  # also measure the predictions of a decoder that was trained for embeddings
    opened = Opened(**carried(asked, Asked), path=files.path, files=files, tokenizer_source=TokenizerSource(files.path), eos_ids=())
    known = advance(opened, Planned)
    try:
        bind_weights(known.session, known.program.executable, known.mode.entry, known.mode.weights)  # without storing packed weights
        model = serve(Bound(**carried(known, Planned), packed=())).step_model
        assert isinstance(model, CompiledModel)
        return use(model)
    finally:
        known.session.close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="relaxserve bench quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic = ", ".join(PREFIX + name for name in SHAPES)
    parser.add_argument("--model", default=demo.NAME, help=f"{demo.NAME}, a path, {synthetic}")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="as int8,int4-64")
    parser.add_argument("--sequences", type=whole, default=32)
    parser.add_argument("--length", type=at_least(2), default=64, help="number of tokens of each sequence")
    parser.add_argument("--text", type=Path, help="file whose beginning is the text")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    schemes: list[str] = options.schemes.split(",")
    with model_folder(options.model) as folder:
        rows = measure(folder, schemes, Texts(options.sequences, options.length, options.seed), options.text)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    title = f"{options.model}: against f32, over {options.sequences * options.length} tokens"
    table = Table("scheme", "KL, nats", "rounded", "top-1", "rounded", "perplexity", "exact", title=title)
    for row in rows:
        divergences = (f"{row.kl_divergence:.2e}", "" if row.rounded_kl_divergence is None else f"{row.rounded_kl_divergence:.2e}")
        agreements = (f"{row.top1_agreement:.2%}", "" if row.rounded_top1_agreement is None else f"{row.rounded_top1_agreement:.2%}")
        table.add_row(row.scheme, *divergences, *agreements, f"{row.perplexity:.4g}", f"{row.exact_perplexity:.4g}")
    Console().print(table)


if __name__ == "__main__":
    main()
