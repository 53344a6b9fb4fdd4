"""Mixtures of experts: their configuration, and the names of their tensors in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate

import numpy as np

from compiler.frontend.fields import Fields
from compiler.frontend.joint import joint, joint_name
from compiler.frontend.weights import Derived, Tensor, TensorInfo, WeightSource

NEW_NAME = "num_local_experts"


class Scoring(StrEnum):
    """How the router's logits become scores."""

    SOFTMAX = "softmax"  # softmax over all experts
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ClippedGate:
    """Experts compute `g * sigmoid(alpha * g) * (u + 1)` from the gate g, clamped to at most `limit`, and the result u of the up
    projection, clamped to -limit .. limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts in place of a layer's MLP. The router gives each expert a score; the experts with the best scores process the
    token, and their outputs are summed with routing weights."""

    num_experts: int
    num_chosen: int  # number of experts per token
    size: int  # intermediate size of an expert
    outer_size: int | None = None  # input and output size of an expert; None: the size of the residual stream
    scoring: Scoring = Scoring.SOFTMAX
    # If given, SparseMixer computes the routing weights. The weight of an expert is its share in a softmax over the logits whose relative
    # distance to the expert's logit is at most this limit. None: `scoring` says how the routing weights are computed.
    sparse_limit: float | None = None
    normalized: bool = True  # whether routing weights of chosen experts are divided by their sum; no effect if `sparse_limit` is given
    scale: float = 1.0  # factor that multiplies the routing weights after normalisation
    scales_inputs: bool = False  # whether a routing weight multiplies an expert's input instead of its output; a token then has one expert
    num_groups: int = 1  # number of groups of experts; the experts of a token are chosen from its best groups
    num_chosen_groups: int = 1  # number of best groups from which the experts of a token are chosen
    shared_size: int = 0  # intermediate size of the shared expert, which processes every token; 0: no shared expert
    dense_layers: frozenset[int] = frozenset()  # numbers of the layers with a plain MLP instead of experts
    bias: bool = False  # true if the router and the experts have biases
    clipped: ClippedGate | None = None  # how gate and up projection are combined; None: by the activation of the configuration


def read_mixture(fields: Fields, num_experts: str, size: str, *, normalized: bool | None = None) -> Mixture:
    """Read the fields that most families have. `num_experts` and `size` are the family's names of the fields for the number of experts and
    their intermediate size. In newer files, `num_local_experts` states the number of experts instead. If `normalized` is given, the field
    `norm_topk_prob` is not read."""
    if NEW_NAME in fields:
        fields.skip(num_experts)
        num_experts = NEW_NAME
    count = fields.integer(num_experts)
    return Mixture(
        num_experts=count,
        num_chosen=fields.integer("num_experts_per_tok", maximum=count),
        size=fields.integer(size),
        normalized=fields.flag("norm_topk_prob", False) if normalized is None else normalized,
    )


# --- names of tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of weights within a layer. `*` stands for the number of an expert, if the checkpoint has separate tensors for each expert.
    Programs have one tensor for all experts, whose name omits the number."""

    router: str = "mlp.gate"
    gate: str | None = "mlp.experts.*.gate_proj"  # None: experts have an activation but no gate
    up: str = "mlp.experts.*.up_proj"
    down: str = "mlp.experts.*.down_proj"
    correction: str | None = None  # bias that is added to scores when experts are chosen, but not in their routing weights
    correction_rank: int = 1  # 2: the bias is stored with a leading axis of extent 1
    scales: str | None = None  # factors that multiply each expert's routing weight
    shared: str | None = None  # the shared expert, which processes every token
    shared_gate: str | None = None  # the projection that computes the shared expert's weight for each token
    # If files stack the experts, `stacked` has the names of the stacked gate and up projection and of the down projection: see
    # StackedExperts. Quantised files of the same model may have separate tensors for each expert.
    stacked: tuple[str, str] | None = None
    halves: bool = False  # true if the stacked rows are all gates, then all ups; false if gates and ups alternate
    inputs_first: bool = False  # whether halves are stored as [experts, in, out]

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The names of the projections of experts: those that read the input, and last the one that computes the output."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def by_gguf_name(self) -> dict[str, str]:
        """A map from names in GGUF files, which are the same in all families, to names in programs."""
        found = {"ffn_gate_inp": self.router, "ffn_gate_exps": self.gate, "ffn_up_exps": self.up, "ffn_down_exps": self.down}
        found |= {"exp_probs_b.bias": self.correction, "ffn_down_exps.scale": self.scales, "ffn_gate_inp_shexp": self.shared_gate}
        if self.shared is not None:
            found |= {f"ffn_{part}_shexp": f"{self.shared}.{part}_proj" for part in ("gate", "up", "down")}
        return {own: joint_name(name) for own, name in found.items() if name is not None}


def joint_experts(source: WeightSource, names: ExpertNames | None) -> WeightSource:
    """Return the source with one tensor per projection for all experts of a layer, or the source itself if there are no `names`."""
    if names is None:
        return source
    return joint(source if names.stacked is None else StackedExperts(source, names), names.of_experts)


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Where one tensor of the program is stored: in some rows of a stored tensor that covers all experts."""

    stored: str
    rows: slice
    transposed: bool


class StackedExperts(Derived):
    """A source whose file has the gate and up projections of all experts in one tensor, with alternating rows or in halves, and their down
    projections in another one. If the name of a stored tensor ends with `.weight`, or with `.weight` and the name of a part as in quantised
    checkpoints, the tensor is stored as [experts, out, in]. Without such an ending, it is stored as [experts, in, out] if rows alternate or
    the family says `inputs_first`, and otherwise as [experts, out, in]. Biases are stored as [experts, out].

    A stored tensor stays in memory until all its parts are read, since reading it again may require decoding it again.
    """

    def __init__(self, source: WeightSource, names: ExpertNames) -> None:
        super().__init__(source, source.tensors)
        self.names = names
        self.parts = {name: part for stored in source.tensors for name, part in self._parts_of(stored)}
        taken = {part.stored for part in self.parts.values()}
        infos = {name: info for name, info in source.tensors.items() if name not in taken}
        self.tensors = infos | {name: self._info(part) for name, part in self.parts.items()}
        # stored tensors of which some parts were read, with the parts not yet read
        self._begun: dict[str, tuple[Tensor, set[str]]] = {}

    def read(self, name: str) -> Tensor:
        if name not in self.parts:
            return self.source.read(name)
        part = self.parts[name]
        tensor = self._whole(name, part.stored)
        rows = tensor.swapaxes(1, 2) if part.transposed else tensor
        return np.ascontiguousarray(rows[:, part.rows])

    def release(self, name: str) -> None:
        self.source.release(self.parts[name].stored if name in self.parts else name)

    def _whole(self, name: str, stored: str) -> Tensor:
        """Return the stored tensor that contains the tensor `name`. Forget it if all other tensors that it contains have been read."""
        if stored not in self._begun:
            self._begun[stored] = self.source.read(stored), {other for other, part in self.parts.items() if part.stored == stored}
        tensor, unread = self._begun[stored]
        unread.discard(name)
        if not unread:
            del self._begun[stored]
        return tensor

    def _parts_of(self, stored: str) -> Iterator[tuple[str, StackedPart]]:
        """Yield the program's tensors whose values are in the stored tensor `stored`. Yield nothing if its name is not that of stacked
        experts, or if it has an unexpected shape, which `Accounting` reports later."""
        assert self.names.stacked is not None
        both, down = map(re.escape, self.names.stacked)
        pattern = rf"(.*\.)(?:({both})|{down})(_bias|\.weight(?:\.\w+)?|)"
        match = re.fullmatch(pattern, stored, re.ASCII)
        shape = self.source.tensors[stored].shape
        if match is None or len(shape) != (2 if match[3] == "_bias" else 3):
            return
        kind = {"_bias": "bias", "": "weight"}.get(match[3], match[3][1:])
        transposed = not match[3] and (not self.names.halves or self.names.inputs_first)
        num_rows = shape[2 if transposed else 1]
        if match[2] is None:
            yield f"{match[1]}{joint_name(self.names.down)}.{kind}", StackedPart(stored, slice(num_rows), transposed)
        elif num_rows % 2 == 0:
            half = num_rows // 2
            assert self.names.gate is not None
            gates, ups = (slice(half), slice(half, num_rows)) if self.names.halves else (slice(0, num_rows, 2), slice(1, num_rows, 2))
            yield f"{match[1]}{joint_name(self.names.gate)}.{kind}", StackedPart(stored, gates, transposed)
            yield f"{match[1]}{joint_name(self.names.up)}.{kind}", StackedPart(stored, ups, transposed)

    def _info(self, part: StackedPart) -> TensorInfo:
        info = self.source.tensors[part.stored]
        experts, *sizes = info.shape
        rows, *inputs = reversed(sizes) if part.transposed else sizes
        taken = len(range(*part.rows.indices(rows)))
        return TensorInfo((experts, taken, *inputs), info.dtype, info.num_bytes * taken // rows)


def without(source: WeightSource, patterns: Iterable[str]) -> WeightSource:
    """Return the source without the tensors whose names match one of the shell patterns."""
    taken = re.compile("|".join(map(translate, patterns)))
    return Derived(source, {name: info for name, info in source.tensors.items() if taken.match(name) is None})
