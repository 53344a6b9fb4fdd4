"""Layers that emit IR: a function under construction, and the weights it asks for by the names they have in the checkpoint.

Weights enter as they lie in the file. What a step needs of them in another form (stacked, transposed, quantised) is ordinary program
text here; the compiler moves it to load time. So there is no table of conversions beside the model: the model is the table.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiler.frontend.errors import ConfigError
from compiler.frontend.quantized.held import Form, Offset
from compiler.ir.dims import Dim, DimLike
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import TupleGet
from compiler.ir.op import OpDef
from compiler.ir.types import TensorType, tensor
from compiler.ops.elementwise import ADD, CAST, MULTIPLY
from compiler.ops.embedding import EMBEDDING
from compiler.ops.manipulate import CONCAT, RESHAPE, SLICE
from compiler.ops.normalize import LAYER_NORM, RMS_NORM
from compiler.ops.products.experts import EXPERT_LINEAR
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.quantize import DEQUANTIZE, QUANTIZE

F32 = DType.F32
GROUPS = (32, 64, 128)  # inputs that may share a scale


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of products are held in memory: 16 or 32 bits as floats, or 8 or 4 as integers with a scale per `group` of inputs (0:
    one for all of them). Floats of 16 bits stay as they are in the file."""

    bits: int
    group: int = 0
    as_stored: bool = False  # integers of a quantised checkpoint stay as they are, too

    @property
    def scale_dtype(self) -> str:
        """Beside 4 bits the scales weigh, and their rounding does not: numbers are rounded to the scale as it is stored."""
        return "bf16" if self.bits == 4 else "f32"

    @staticmethod
    def parse(text: str) -> WeightFormat:
        """`auto`, `f32`, `bf16`, `int8`, `int8-128`, `int4` (groups of 32), `int4-64`, `int4-128`."""
        if text == "auto":
            return AS_STORED
        kind, _, group = text.partition("-")
        bits = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}.get(kind)
        if bits is None or (group and (bits > 8 or group not in map(str, GROUPS))):
            raise ConfigError(
                f"quantize is {text!r}; expected auto, f32, bf16, int8, int4, or int8-GROUP, int4-GROUP with a group of "
                + ", ".join(map(str, GROUPS))
            )
        return WeightFormat(bits, int(group) if group else (32 if bits == 4 else 0))


DEFAULT_FORMAT = WeightFormat(16)
AS_STORED = WeightFormat(16, as_stored=True)


@dataclass(slots=True)
class Net:
    """`dtypes` tells the element type of every tensor in the checkpoint; `weights` collects those that were asked for. The head is held
    in at least 8 bits: its errors go straight to the logits. `forms` tells the matrices that the checkpoint gives as integers."""

    dtypes: Mapping[str, DType]
    format: WeightFormat = DEFAULT_FORMAT
    builder: Builder = field(default_factory=Builder)
    weights: dict[str, Var] = field(default_factory=dict[str, Var])
    prefix: str = ""  # of the names in the checkpoint: "model."
    forms: Mapping[str, Form] = field(default_factory=dict[str, Form])
    _decoded: set[Var] = field(default_factory=set[Var])  # what `held` gave

    @contextmanager
    def function(self, name: str, inputs: Sequence[Var], *, pure: bool = True) -> Generator[None]:
        params = list(inputs)
        self.weights = {}
        with self.builder.function(name, params, num_inputs=len(inputs), pure=pure):
            with self.builder.dataflow():
                yield
            params.extend(self.weights.values())

    # --- weights -------------------------------------------------------------------------------------------------------

    def weight(self, name: str, *shape: int) -> Var:
        """A tensor of the checkpoint, by its full name."""
        if name in self.forms:
            return self.held([name], [shape])
        if name not in self.weights:
            self.weights[name] = Var(name, tensor(shape, self.dtypes.get(name, F32)))
        return self.weights[name]

    def held(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Var:
        """Matrices of one form that the checkpoint gives as integers, one below the other, decoded."""
        form = self.forms[names[0]]
        infos = [form.infos(shape) for shape in shapes]
        parts = [
            self.stacked([self.weight(f"{name}.{part}", *info[part].shape) for name, info in zip(names, infos, strict=True)])
            for part in form.parts
        ]
        group = 0 if form.group == shapes[0][-1] else form.group
        found = self.call(DEQUANTIZE, *parts, bits=form.bits, group=group, shifted=form.offset is Offset.SHIFT)
        self._decoded.add(found)
        return found

    def vector(self, name: str, size: int) -> Var:
        """A weight of one axis, as the arithmetic wants it."""
        return self.as_f32(self.weight(name, size))

    # --- values --------------------------------------------------------------------------------------------------------

    def call(self, op: OpDef, *args: Atom, **attrs: Any) -> Var:
        return self.builder.call(op, *args, **attrs)

    def as_f32(self, x: Var) -> Var:
        return x if isinstance(x.type, TensorType) and x.type.dtype is F32 else self.call(CAST, x, dtype="f32")

    def field(self, value: Atom, index: int) -> Var:
        return self.builder.emit(TupleGet(value, index))

    def reshape(self, x: Atom, *dims: DimLike) -> Var:
        return self.call(RESHAPE, x, ShapeValue(tuple(Dim.of(d) for d in dims)))

    def slice(self, x: Atom, axis: int, begin: int, end: int) -> Var:
        return self.call(SLICE, x, axis=axis, begin=begin, end=end)

    def scale(self, x: Atom, factor: float) -> Var:
        return self.call(MULTIPLY, x, ScalarValue(factor, "f32"))

    def add(self, a: Atom, b: Atom) -> Var:
        return self.call(ADD, a, b)

    # --- layers --------------------------------------------------------------------------------------------------------

    def embedding(self, name: str, ids: Atom, vocab: int, size: int) -> Var:
        return self.as_f32(self.call(EMBEDDING, self.weight(f"{name}.weight", vocab, size), ids))

    def linear(
        self,
        x: Atom,
        names: str | Sequence[str],
        in_size: int,
        sizes: int | Sequence[int],
        *,
        bias: bool = False,
        format: WeightFormat | None = None,
    ) -> Var:
        """One product for one or several layers over the same input: their outputs stand side by side."""
        names = (names,) if isinstance(names, str) else names
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        pairs = list(zip(names, sizes, strict=True))
        forms = {self.forms.get(f"{n}.weight") for n in names}
        if len(forms) > 1:  # each is multiplied as it is held
            products = [self.linear(x, n, in_size, s, bias=bias, format=format) for n, s in pairs]
            return self.call(CONCAT, *products, axis=1)
        if forms != {None}:
            w = self.held([f"{n}.weight" for n in names], [(s, in_size) for s in sizes])
        else:
            w = self.stacked([self.weight(f"{n}.weight", s, in_size) for n, s in pairs])
        return self.product(x, w, self.stacked([self.vector(f"{n}.bias", s) for n, s in pairs]) if bias else None, format=format)

    def product(self, x: Atom, w: Var, bias: Var | None = None, *, format: WeightFormat | None = None) -> Var:
        """The product with a matrix [outputs, inputs] that is made of weights. One that is decoded on the way is not rounded again."""
        format = format or self.format
        if self._is_decoded(w):
            return self.call(LINEAR, x, w, *([] if bias is None else [bias]))
        operands = (x, self._held(w, format), *([] if bias is None else [bias]))
        return self.call(LINEAR, *operands, tolerates="bf16" if format.bits == 16 else None)

    def expert_linear(self, x: Atom, name: str, experts: Atom, count: int, in_size: int, size: int, *, bias: bool = False) -> Var:
        """The product of each row with the matrix of its expert; `name` is that of the tensor of all of them."""
        w = self.weight(f"{name}.weight", count, size, in_size)
        return self.chosen_product(x, w, experts, self.as_f32(self.weight(f"{name}.bias", count, size)) if bias else None)

    def chosen_product(self, x: Atom, w: Var, choice: Atom, bias: Var | None = None) -> Var:
        """The product of each row with the matrix of `w[matrices, outputs, inputs]` that it chooses."""
        decoded = self._is_decoded(w)
        operands = (x, w if decoded else self._held(w, self.format), choice, *([] if bias is None else [bias]))
        return self.call(EXPERT_LINEAR, *operands, tolerates="bf16" if self.format.bits == 16 and not decoded else None)

    def rms_norm(self, x: Atom, name: str, size: int, eps: float, *, offset: float = 0.0) -> Var:
        return self.call(RMS_NORM, x, self.vector(f"{name}.weight", size), eps=eps, weight_offset=offset)

    def unit_norm(self, x: Atom, size: int, eps: float) -> Var:
        """An RMS norm without weights."""
        return self.call(RMS_NORM, x, Constant(np.ones(size, np.float32)), eps=eps)

    def layer_norm(self, x: Atom, name: str, size: int, eps: float, *, offset: float = 0.0, bias: bool = True) -> Var:
        weight = self.vector(f"{name}.weight", size)
        if offset:
            weight = self.call(ADD, weight, ScalarValue(offset, "f32"))
        shift = self.vector(f"{name}.bias", size) if bias else Constant(np.zeros(size, np.float32))
        return self.call(LAYER_NORM, x, weight, shift, eps=eps)

    def head(self, x: Atom, name: str, in_size: int, vocab: int, *, bias: bool = False) -> Var:
        return self.linear(x, name, in_size, vocab, bias=bias, format=WeightFormat(8) if self.format.bits < 8 else None)

    def _is_decoded(self, w: Var) -> bool:
        return w in self._decoded

    def _held(self, w: Var, format: WeightFormat) -> Var:
        """The weight as it lies in memory, and the decoding that the product does on the way."""
        assert isinstance(w.type, TensorType) and w.type.dtype is not None and w.type.shape is not None
        if format.bits == 32 or (format.bits == 16 and w.type.dtype is not F32):
            return w
        if format.bits == 16:
            return self.call(CAST, w, dtype="bf16")
        in_size = w.type.shape[-1].const
        if format.group and in_size % format.group:
            fitting = ["int8", *(f"int{format.bits}-{group}" for group in GROUPS if in_size % group == 0)]
            raise ConfigError(f"{w.name} has {in_size} inputs, no multiple of the group of {format.group}; choose {' or '.join(fitting)}")
        both = self.call(QUANTIZE, self.as_f32(w), bits=format.bits, group=format.group, dtype=format.scale_dtype)
        return self.call(DEQUANTIZE, self.field(both, 0), self.field(both, 1), bits=format.bits, group=format.group)

    def stacked(self, parts: list[Var]) -> Var:
        return parts[0] if len(parts) == 1 else self.call(CONCAT, *parts, axis=0)


def prefix_of(dtypes: Mapping[str, DType], prefix: str) -> str:
    """The prefix, if the checkpoint has it: a model that was saved without a head lacks it."""
    return prefix if any(name.startswith(prefix) for name in dtypes) else ""
