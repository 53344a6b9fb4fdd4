"""Compare the weight formats in which a model can be served: bytes of the weights, the context that fits into the memory next to them, and
rounding error.

Nothing is compiled here. The error is measured on rows of some matrices, with the operators that round them when a model loads. For a
format with a budget of bits, the error is only estimated (`rounded`).

python -m deploy.forms < LOAD      LOAD is a message `Load` as JSON; prints {"forms": [...]} with the bytes and the error of each format, or
                                   {"code", "message"} if the files cannot be read
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.layers.nn import AS_STORED, WeightFormat
from compiler.frontend.layers.tower import sees
from compiler.frontend.listening import listens
from compiler.frontend.quantized.held import SCALE, Form, forms_of, is_matrix
from compiler.frontend.weights import TensorInfo, WeightSource
from compiler.ir.numbers import SPLIT
from compiler.machine.formats import TABLE_PANELS
from compiler.machine.products import product_tiles
from compiler.machine.target import host
from compiler.ops.tables import INTERPRET
from deploy.inspection import Inspection
from deploy.model_loading.files import ModelFiles, Opened
from deploy.model_loading.known import begin
from deploy.model_loading.modes import format_named
from deploy.model_loading.plan import WORKER_BYTES
from deploy.model_loading.stages import advance
from runtime import generated_code
from runtime.cache_groups import PAGE_SIZE
from server.interfaces import LoadError
from server.messages import Load
from server.models.model import FormEstimate

if TYPE_CHECKING:
    from deploy.quality.speed import Quality

FORMS = ("auto", "bf16", "int8", "4bit", "f32")
HEADS = ("lm_head.weight", "output.weight")  # endings of the names that the language head may have
UNNOTICED = 1e-3  # a form counts as lossless up to this KL divergence, in nats per token
SAMPLES = 3  # number of matrices on which the error is measured
BUDGET_GROUP = 32  # columns of a matrix that share a scale in formats with a budget of bits
SAMPLE_VALUES = 1 << 19  # maximum number of values per matrix on which the error is measured


@dataclass(frozen=True, slots=True)
class ServedForm:
    """A format of the weights, the memory that a model needs in this format, and the error of its weights."""

    quantize: str  # name of the format, one of FORMS
    weights_bytes: int
    num_tokens: int  # tokens that fit next to the weights, summed over all sequences; 0 without a KV cache
    max_context: int  # longest context of one sequence that fits and that the model supports; 0 without a KV cache
    fits: bool  # whether the free memory holds the weights and, with a KV cache, the shortest context that the load demands
    loss: float  # root mean square of the rounding error, relative to that of the weights; 0 if matrices stay quantised as in the files


def compare_forms(files: ModelFiles, found: Inspection, load: Load) -> list[ServedForm]:
    """Return all formats of FORMS that the model's matrices can have, sorted by their rounding error, and by size if errors are equal.
    Leave out `auto` if it stands for the format of the files and they are not quantised: then the weights are the same as with `bf16`.
    `found` is the inspection of the model, which says how much memory there is besides the weights."""
    formats = _formats(files, load)
    if files.held is None and formats.get("auto") == AS_STORED:
        del formats["auto"]
    forms = [_form(files, found, name, format) for name, format in formats.items()]
    return sorted(forms, key=lambda form: (form.loss, form.weights_bytes))


def recommended(forms: Sequence[ServedForm]) -> ServedForm | None:
    """Return the first of these forms that fits, or None if none fits. In the order of `compare_forms`, this is the form with the least
    rounding error, and if several have the same error, the smallest."""
    return next((form for form in forms if form.fits), None)


def fastest_without_loss(forms: Sequence[ServedForm], qualities: Mapping[str, Quality]) -> ServedForm | None:
    """Return the fastest of the measured forms whose KL divergence is at most UNNOTICED. If there is none, return the measured form with
    the least divergence. Return None if no form was measured. `qualities` has the measurements, by the names of the formats."""
    measured = [form for form in forms if form.quantize in qualities]
    exact = [form for form in measured if qualities[form.quantize].label.kl_divergence <= UNNOTICED]
    if exact:
        return max(exact, key=lambda form: qualities[form.quantize].speed.tokens_per_s)
    return min(measured, key=lambda form: qualities[form.quantize].label.kl_divergence, default=None)


def _form(files: ModelFiles, found: Inspection, name: str, format: WeightFormat) -> ServedForm:
    """Return the memory and the error of the inspected model in a format. `found` is the inspection of the model in one format. The memory
    besides the weights is assumed to be the same in all formats."""
    plan = found.plan
    # The plan has the exact bytes of the inspected format. Programs of other formats are not compiled, so `bytes_of` omits the padding of
    # panels.
    is_inspected = (name, str(files.path)) == (found.quantize, found.source)
    weights_bytes = plan.weights_bytes if is_inspected else bytes_of(files, format)
    room = found.available_bytes - WORKER_BYTES - plan.arena_bytes - weights_bytes
    if not plan.page_bytes:
        return ServedForm(name, weights_bytes, 0, 0, room >= 0, _loss(files, format))
    num_tokens = max(0, room // plan.page_bytes - 1) * PAGE_SIZE
    longest = min(num_tokens, found.model_context)
    return ServedForm(name, weights_bytes, num_tokens, longest, num_tokens >= found.least_context, _loss(files, format))


def estimate_forms(files: ModelFiles, load: Load) -> list[FormEstimate]:
    """Return all formats of FORMS that the matrices can have, with the bytes of their weights and their rounding error, the default first.
    Nothing is compiled, so the bytes lack the padding of panels."""
    return [FormEstimate(name, bytes_of(files, format), _loss(files, format)) for name, format in _formats(files, load).items()]


def _formats(files: ModelFiles, load: Load) -> dict[str, WeightFormat]:
    """Return the formats in which the model can be served, by their names. The value of `auto` is the format that `auto` stands for in this
    load."""
    named = {name: format_named(files.config, msgspec.structs.replace(load, quantize=name)) for name in FORMS}
    formats = {name: WeightFormat.parse(format) for name, format in named.items()}
    return {name: format for name, format in formats.items() if _divides(files, format)}


# --- size in bytes -----------------------------------------------------------------------------------------------------


def bytes_of(files: ModelFiles, format: WeightFormat) -> int:
    """Estimate the bytes of the weights, without the padding of the last panels."""
    tensors = (files.weights if format.budget else files.source(format)).tensors
    forms = forms_of(tensors)
    stored = {f"{name}.{part}" for name, form in forms.items() for part in form.parts}
    shapes = {name: files.weights.tensors[name].shape for name in forms if not _is_copied(files, name)}
    total = sum(_bytes_in(forms[name], shape) for name, shape in shapes.items())
    total += sum(_bytes(name, info, format) for name, info in tensors.items() if name not in stored and not _is_copied(files, name))
    if not files.config.tie_word_embeddings:
        return total
    # A table of floats that is also the language head counts twice: it is stored once as rows and once in panels.
    return total + sum(_bytes(HEADS[0], info, format) for name, info in tensors.items() if name.endswith("embed_tokens.weight"))


def _bytes_in(form: Form, shape: tuple[int, ...]) -> int:
    """Return the bytes in memory of a matrix that the checkpoint stores quantised in a form. Codes that take 4 bits each in the form may
    take fewer in the panels of TABLE_PANELS. Kinds in SPLIT store each number as two integers, so a second array of scales is counted."""
    infos = form.unpacked_infos(shape)
    codes = infos[form.numbers[0]].num_bytes
    saved = codes - codes * TABLE_PANELS[form.kind].bits // 4 if form.kind in TABLE_PANELS else 0
    return sum(info.num_bytes for info in infos.values()) - saved + (infos[SCALE].num_bytes if form.kind in SPLIT else 0)


def _is_copied(files: ModelFiles, name: str) -> bool:
    """Return whether the tensor is a language head that the program replaces by the table of embeddings, as the configuration demands."""
    return files.config.tie_word_embeddings and name.endswith(HEADS)


def _bytes(name: str, info: TensorInfo, format: WeightFormat) -> int:
    """Estimate the bytes in memory of a tensor of the checkpoint if the model is served in this format."""
    count = prod(info.shape)
    if len(info.shape) < 2:
        return 4 * count
    format = WeightFormat(16) if _encodes(name) and format.bits != 32 else format
    if format.budget and is_matrix(name):
        return round(count * (_head_bits() if name.endswith(HEADS) else format.budget) / 8)
    if not is_matrix(name) or format.bits == 32 or (format.bits == 16 and info.dtype.itemsize == 2):
        return count * info.dtype.itemsize
    if format.bits == 16:
        return 2 * count
    return quantised_bytes(info, WeightFormat(8) if name.endswith(HEADS) and format.bits < 8 else format)


def _head_bits() -> float:
    """Return the bits per weight, scales included, of the language head of a model whose other matrices have a budget of bits. The head's
    numbers have 6 bits. A machine without kernels for numbers of 6 bits stores each in a byte."""
    return (6 if any(tile.format.bits == 6 for tile in product_tiles(host()).integers) else 8) + 0.4


def quantised_bytes(info: TensorInfo, format: WeightFormat) -> int:
    """Return the bytes in memory of a matrix in a format of 8 or 4 bits: the bytes of its numbers, and of the scales that the products of
    this machine read."""
    *rows, length = info.shape
    groups, widened = length // format.group if format.group else 1, product_tiles(host()).widened
    scales = groups * (2 if format.bits == 4 else 4)
    # For AMX, each group has a multiplier of 1 byte, and each channel a scale of 4 bytes (compiler/ops/products/widened.py).
    if widened is not None and widened.format.bits == format.bits and widened.widens(length, format.group or length):
        scales = groups + 4
    return prod(rows) * (length * format.bits // 8 + scales)


def _is_rounded(name: str, info: TensorInfo) -> bool:
    """Return whether the tensor is a matrix that a format of few bits rounds. Encoders of images and audio keep 16 bits (decision 0107)."""
    return is_matrix(name) and len(info.shape) > 1 and not _encodes(name)


def _encodes(name: str) -> bool:
    return sees(name) or listens(name)


# --- rounding error -----------------------------------------------------------------------------------------------------


def _divides(files: ModelFiles, format: WeightFormat) -> bool:
    """Return whether the group size divides the length of the rows of all matrices that the format rounds. Return True if the format has no
    groups. With a budget of bits, return True, because matrices whose rows are not divided keep 16 bits."""
    if format.budget:
        return True
    matrices = (info for name, info in files.weights.tensors.items() if _is_rounded(name, info))
    return not format.group or all(info.shape[-1] % format.group == 0 for info in matrices)


def _loss(files: ModelFiles, format: WeightFormat) -> float:
    """Return the rounding error of a format relative to the weights, from samples of the matrices. Return 0 if the format leaves matrices
    quantised as the files store them, or if there is nothing to round."""
    if format.as_stored and not format.budget and files.held is not None:
        return 0.0
    power, error = 0.0, 0.0
    for w in _samples(files.weights):
        wide = w.astype(np.float32)
        difference = (wide - rounded(w, format)).astype(np.float64)
        power, error = power + float(np.square(wide, dtype=np.float64).sum()), error + float(np.square(difference).sum())
    return sqrt(error / power) if power else 0.0


def rounded(w: NDArray[Any], format: WeightFormat) -> NDArray[np.float32]:
    """Return the values of a matrix after rounding to this format. With a budget of bits, the result is an estimate: the search that
    chooses the bits of each matrix does not run."""
    wide = w.astype(np.float32)
    is_narrow = bool(format.budget) and wide.shape[-1] % BUDGET_GROUP == 0  # with a budget, all other matrices keep 16 bits
    if is_narrow:  # an estimate: 4 bits, rounded plainly; the search makes other errors, because it minimises the effect on predictions
        parts = INTERPRET["quantize"](wide, bits=4, group=BUDGET_GROUP, symmetric=False, dtype="f32")
        return INTERPRET["dequantize"](*parts, bits=4, group=BUDGET_GROUP, shifted=False, dtype="f32", kind="int")
    if format.bits == 32 or (format.bits == 16 and w.dtype.itemsize == 2):
        return wide
    if format.bits == 16:
        return INTERPRET["cast"](wide, dtype="bf16").astype(np.float32)
    attrs = {"bits": format.bits, "group": format.group}
    parts = INTERPRET["quantize"](wide, **attrs, symmetric=True, dtype=format.scale_dtype)
    return INTERPRET["dequantize"](*parts, **attrs, shifted=False, dtype="f32", kind="int")


def _samples(source: WeightSource) -> Iterator[NDArray[Any]]:
    """Yield the first rows of at most SAMPLES matrices, evenly spaced among all matrices that a format rounds, except the language head."""
    names = [name for name, info in source.tensors.items() if _is_rounded(name, info) and not name.endswith(HEADS)]
    for name in names[:: max(1, -(-len(names) // SAMPLES))]:
        w = source.read(name)
        yield w.reshape(-1, w.shape[-1])[: max(1, SAMPLE_VALUES // w.shape[-1])]
        source.release(name)


# --- the command that compares -----------------------------------------------------------------------------------------


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    try:
        print(msgspec.json.encode({"forms": estimate_forms(advance(begin(load), Opened).files, load)}).decode())
    except LoadError as error:
        print(msgspec.json.encode({"code": error.code, "message": error.message}).decode())
    generated_code.keep()


if __name__ == "__main__":
    main()
